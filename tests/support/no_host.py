"""Detection of host synchronisation: on the CPU, operations that would wait for CUDA raise `HostLooks`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

METHODS = {
    *("__array__", "__bool__", "__complex__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist"),
}

# Operators that return a value to the host, have a result whose size depends on values, or copy numbers from the host.
OPERATORS = {
    *("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::lift_fresh", "aten::masked_select"),
    *("aten::nonzero", "aten::repeat_interleave.Tensor", "aten::_unique2"),
}


class HostLooks(AssertionError):
    """The host read a tensor."""


class _Methods(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in METHODS:
            raise HostLooks(f"Tensor.{name}")
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.name()
        moves = name == "aten::_to_copy" and (kwargs or {}).get("device") not in {None, args[0].device}
        if name in OPERATORS or moves:
            raise HostLooks(name)
        return operator(*args, **(kwargs or {}))


@contextmanager
def host_looks_at_nothing() -> Iterator[None]:
    """Makes operations raise `HostLooks` if the host would wait for a device in them."""
    with _Methods(), _Operators():
        yield


def nobody_waits_for(device: str) -> AbstractContextManager[None]:
    """Makes operations raise if the host waits for the device in them; on CUDA torch raises the errors."""
    return host_looks_at_nothing() if device == "cpu" else _torch_refuses()


@contextmanager
def _torch_refuses() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# Ways to read or copy a tensor.
WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": torch.Tensor.item,
    "bool": bool,
    "float": float,
    "int": int,
    "tolist": torch.Tensor.tolist,
    "numpy": torch.Tensor.numpy,
    "cpu": torch.Tensor.cpu,
    "nonzero": torch.Tensor.nonzero,
    "to another device": lambda tensor: tensor.to("meta"),
    "from the host": lambda _: torch.tensor([1.0]),
}
