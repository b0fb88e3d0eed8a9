"""Runs code under the name of another file and module, for example of torch."""

import sys
from types import FrameType
from typing import Any


def run_as(source: str, file: str, module: str, **names: Any) -> dict[str, Any]:
    """Runs code under the names of a file and a module; returns its global names."""
    names["__name__"] = module
    exec(compile(source, file, "exec"), names)  # noqa: S102 - written in a test
    return names


def frame_in(source: str, file: str, module: str) -> FrameType:
    """Runs `source`, which calls `here()`, like `run_as`; returns the frame of that call."""
    found: list[FrameType] = []
    run_as(source, file, module, here=lambda: found.append(sys._getframe(1)))
    return found[0]
