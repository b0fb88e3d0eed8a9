"""A stand-in for a CUDA graph on the CPU.

Like a graph, it replays the recorded operators on the same memory without running Python again, and raises when the
host reads a tensor. Unlike a graph, it also runs the operators while it records them.
"""

from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from support.no_host import host_looks_at_nothing


class Recorder(TorchDispatchMode):
    """Records operators in their order."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[tuple[Any, Any, Any, list[Any]]] = []
        self._guard = host_looks_at_nothing()

    def __enter__(self) -> Self:
        """Begins to record."""
        found: Self = super().__enter__()
        self._guard.__enter__()
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends."""
        self._guard.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and records it with its arguments and results."""
        result = operator(*args, **(kwargs or {}))
        self._recorded.append((operator, args, kwargs or {}, pytree.tree_leaves(result)))
        return result

    def replay(self) -> None:
        """Runs all operators again, and writes their results over the recorded ones."""
        with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - as the operators ran, below autograd
            for operator, args, kwargs, made in self._recorded:
                again = pytree.tree_leaves(operator(*args, **kwargs))
                for new, old in zip(again, made, strict=True):
                    if isinstance(new, torch.ScriptObject):
                        new.wait()  # the work of a collective
                    elif isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)
