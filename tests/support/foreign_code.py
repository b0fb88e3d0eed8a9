"""Code that runs as if it stood in another file and module, such as one of torch."""

import sys
from types import FrameType
from typing import Any


def run_as(source: str, file: str, module: str, **names: Any) -> dict[str, Any]:
    """Runs code as if it stood in a file and module; returns its names."""
    names["__name__"] = module
    exec(compile(source, file, "exec"), names)  # noqa: S102 - it stands in this file
    return names


def frame_in(source: str, file: str, module: str) -> FrameType:
    """The frame that calls `here` in code of a file and module."""
    found: list[FrameType] = []
    run_as(source, file, module, here=lambda: found.append(sys._getframe(1)))
    return found[0]
