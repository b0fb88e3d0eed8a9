"""Specimen: a deterministic network of the zoo in float64, with weights that let every layer matter, and a batch."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.catalogue import Architecture, is_batch_norm
from zoo.libraries import library

# Images of the batch. They are split into 3 and 2, since equal parts would hide a wrong weighting.
BATCH = 5

# Sides of the images that are tried before the network's own.
SIDES = (32, 64, 96, 128)

# Networks with a last pooling for large videos, which take a CPU many minutes. The comparison does not depend on the
# pooling, so a smaller one replaces it.
FIXED_POOLS = {"s3d"}

# The compared part of networks that cannot be compared as a whole: a detector samples its training boxes at random, and
# optical flow computes positions in float32. The other parts of optical flow have no batch norm.
PARTS = {"detection": "backbone", "optical_flow": "context_encoder"}

# A constant parameter below this is the initial factor of a branch, and would hide the branch.
FAINT = 1e-2

# Attributes that hold the probability of drop-out in one form or another.
CHANCES = ("p", "drop_prob", "drop_rate", "drop_path_rate", "attn_drop", "proj_drop", "attn_drop_rate")

Inputs = tuple[Tensor, ...]


class Unfit(Exception):
    """The reason why a network cannot be compared with itself."""


@dataclass(frozen=True)
class Specimen:
    model: nn.Module  # in training, float64
    inputs: Inputs
    part: str = ""  # part of the architecture; empty for all of it


def specimens(architecture: Architecture) -> Iterator[Specimen]:
    """Prepares the network, or its parts that take a batch."""
    torch.manual_seed(0)
    whole = architecture.build()
    if architecture.name in FIXED_POOLS:
        whole.avgpool = nn.AdaptiveAvgPool3d(1)
    prepare(whole)
    part = next((name for start, name in PARTS.items() if architecture.module.startswith(start)), "")
    model = whole.get_submodule(part)
    specimen = Specimen(model, _fitting(model, _candidates(architecture)), part)
    yield specimen
    if part == "backbone" and any(map(is_batch_norm, getattr(whole, "head", nn.Identity()).modules())):
        maps = tuple(batch(*found.shape[1:]) for found in tensors_of(copy.deepcopy(model)(*specimen.inputs)))
        yield Specimen(OfMaps(whole.head), _fitting(OfMaps(whole.head), iter([maps])), "head")


class OfMaps(nn.Module):
    """A detector's head, which takes a list."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, *maps: Tensor) -> object:
        return self.head(list(maps))


def prepare(model: nn.Module) -> None:
    """Sets weights that let every layer matter, and disables drop-out."""
    model.double().train()
    without_chance(model)
    with torch.no_grad():
        for part in model.modules():
            if is_batch_norm(part) and part.weight is not None:
                part.weight.uniform_(0.5, 1.5)
                part.bias.uniform_(-0.5, 0.5)
        for parameter in model.parameters():
            if parameter.numel() and parameter.abs().max() < FAINT and (parameter == parameter.flatten()[0]).all():
                parameter.uniform_(-0.5, 0.5)


def without_chance(model: nn.Module) -> None:
    """Sets the probability of each drop-out, drop path and stochastic depth to 0."""
    for part in model.modules():
        for name in CHANCES:
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def tensors_of(outputs: object) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _fitting(model: nn.Module, candidates: Iterator[Inputs]) -> Inputs:
    """The first inputs that the network accepts; raises Unfit if there are none, or its outputs vary between runs."""
    refusals: list[str] = []
    for inputs in candidates:
        try:
            first, second = (_seeded(model, inputs, seed) for seed in range(2))
        except Exception as error:  # noqa: BLE001 - networks raise many errors for images that are too small
            refusals.append(f"{_sides(inputs)}: {type(error).__name__}: {error}".splitlines()[0][:100])
            continue
        if not all(map(torch.equal, first, second)):
            raise Unfit("computes another result each time, even without drop-out")
        return inputs
    raise Unfit(f"takes none of the inputs tried; the last error: {refusals[-1]}")


@torch.no_grad()
def _seeded(model: nn.Module, inputs: Inputs, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return tensors_of(copy.deepcopy(model)(*inputs))


def _candidates(architecture: Architecture) -> Iterator[Inputs]:
    for shape in _shapes(architecture):
        yield (batch(*shape),)


def batch(*shape: int) -> Tensor:
    """A whole batch of inputs; the second replica's are larger and off-centre, so that their statistics differ."""
    x = torch.randn(BATCH, *shape, dtype=torch.float64)
    first = BATCH - BATCH // 2
    x[first:] = x[first:] * 2 + 1
    return x


def _shapes(architecture: Architecture) -> Iterator[tuple[int, ...]]:
    if architecture.module.startswith("video"):
        yield from ((3, frames, side, side) for frames, side in ((4, 32), (8, 64), (16, 224)))
    elif architecture.library == "timm":
        channels, *own = library("timm").get_pretrained_cfg(architecture.name).input_size
        yield from ((channels, side, side) for side in SIDES)
        yield (channels, *own)
    else:
        yield from ((3, side, side) for side in (*SIDES, 224, 304))


def _sides(inputs: Inputs) -> str:
    return " x ".join(map(str, inputs[0].shape[1:]))
