"""The libraries of the zoo, torchvision and timm, where they are installed."""

import importlib
import re
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch

# The error for parts that the networks do not need and that some builds of torch cannot load.
NEEDLESS = re.compile("operator torchvision::.* does not exist")


def library(name: str) -> ModuleType:
    """Import "torchvision" or "timm", without torchvision's compiled operators, which need its own build of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except RuntimeError as error:
            if not NEEDLESS.search(str(error)):
                raise
        for part in [part for part in sys.modules if part.split(".")[0] in {"torchvision", "timm"}]:
            del sys.modules[part]
        with mock.patch.object(torch.library, "register_fake", _described_nowhere):
            return importlib.import_module(name)


def is_there(name: str) -> bool:
    try:
        library(name)
    except ImportError:
        return False
    return True


def has_operators() -> bool:
    return bool(library("torchvision").extension._has_ops())


def _described_nowhere(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function
