"""The networks in the zoo: of each family the smallest network with batch norm, such as `resnet18` of all `resnet*`."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from zoo.libraries import library

LIBRARIES = ("torchvision", "timm")

# timm's own networks for its tests are no architectures.
NO_ARCHITECTURE = "test_"

FAMILY = re.compile(r"(?:(?:tf|quantized|legacy|hf|ese)_)?[a-z]+?(?:v\d+(?=_|$)|(?![a-z]))")


@dataclass(frozen=True)
class Architecture:
    library: str  # "torchvision" or "timm"
    module: str  # its module, without the library's prefix
    name: str

    @property
    def family(self) -> str:
        """The first part of the network's name, with the module's name before it if that differs."""
        found = FAMILY.match(self.name)
        start = found.group() if found else self.name
        return start if start == self.module else f"{self.module}: {start}"

    def build(self, **options: Any) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.library == "timm":
                return library("timm").create_model(self.name, **options)
            return library("torchvision").models.get_model(self.name, **_without_weights(self.module), **options)


@dataclass(frozen=True)
class Survey:
    architecture: Architecture
    parameters: int = 0  # number of parameters
    layers: tuple[tuple[str, int], ...] = ()  # batch norms by class
    problem: str = ""  # why it could not be built, or empty


def architectures(only: str = "") -> Iterator[Architecture]:
    for found in (*_torchvisions(), *_timms()):
        if found.name.startswith(NO_ARCHITECTURE) and found.name != only:
            continue
        if not only or fnmatch(found.name, only) or fnmatch(found.family, only):
            yield found


def survey(architecture: Architecture) -> Survey:
    """Counts parameters and layers of a network, which is built on the meta device if possible."""
    for device in ("meta", "cpu") if architecture.library == "torchvision" else ("meta",):
        try:
            with torch.device(device):
                model = architecture.build()
        except Exception as error:  # noqa: BLE001 - the zoo reports it and continues
            problem = f"{type(error).__name__}: {error}"
        else:
            return Survey(architecture, sum(map(torch.numel, model.parameters())), layers_of(model))
    return Survey(architecture, problem=problem)


def layers_of(model: nn.Module) -> tuple[tuple[str, int], ...]:
    found = Counter(type(part).__name__ for part in model.modules() if is_batch_norm(part))
    return tuple(found.most_common())


def is_batch_norm(part: nn.Module) -> bool:
    return isinstance(part, nn.modules.batchnorm._BatchNorm)


def smallest(surveys: list[Survey]) -> list[Survey]:
    """The smallest network with batch norm of each family, or a survey with a problem if none could be built."""
    families: dict[tuple[str, str], list[Survey]] = {}
    for found in surveys:
        families.setdefault((found.architecture.library, found.architecture.family), []).append(found)
    chosen = []
    for members in families.values():
        made = [one for one in members if not one.problem]
        if with_layers := [one for one in made if one.layers]:
            chosen.append(min(with_layers, key=lambda one: (one.parameters, one.architecture.name)))
        elif not made:
            chosen.append(members[0])
    return chosen


def _torchvisions() -> Iterator[Architecture]:
    models = library("torchvision").models
    for name in models.list_models():
        module = models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
        yield Architecture("torchvision", module, name)


def _timms() -> Iterator[Architecture]:
    timm = library("timm")
    for name in timm.list_models():
        module = timm.model_entrypoint(name).__module__.removeprefix("timm.models.")
        yield Architecture("timm", module, name)


def _without_weights(module: str) -> dict[str, Any]:
    if module.startswith(("segmentation", "detection")):
        return {"weights": None, "weights_backbone": None}
    if module in {"googlenet", "inception"}:
        return {"weights": None, "init_weights": False}  # their initialisation takes a minute
    return {"weights": None}
