"""A stand-in for a device without float64, such as MPS: CPU tensors that refuse the operators that MPS refuses.

A dispatch mode runs every operator, forward and backward, on the wrapped CPU tensors. It raises TypeError, like torch
on MPS, for a float64 tensor on the device, also one on the way to the host (`x.to("cpu", torch.float64)`), and
RuntimeError for an operator with tensors of both the device and the host, except host scalars and copies.

Wrapper subclasses and dispatch modes are torch's own means to emulate a device. In C++ the wrappers are "meta" tensors.
Not emulated: other threads, rounding of device kernels, and speed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# With an index: else torch would ask for the current MPS device, which a build without MPS cannot answer.
DEVICE = torch.device("mps", 0)

WIDE = {torch.float64, torch.complex128}

COPIES = {"aten::_to_copy", "aten::copy_"}


class DeviceTensor(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    on_host: Tensor

    @staticmethod
    def __new__(cls, on_host: Tensor) -> Self:
        made = Tensor._make_wrapper_subclass(
            cls,
            on_host.shape,
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            device="meta",
        )
        made.on_host = on_host
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {})


class _Operators(TorchDispatchMode):
    """Intercepts operators without a tensor of the device too: they may create a tensor there."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {})


@contextmanager
def device_without_float64() -> Iterator[torch.device]:
    """Yields the device. Within the block, and in this thread only, tensors and models can be moved to it."""
    with _Operators():
        yield DEVICE


def _run(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    target = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    is_on_device = bool(given) if target is None else _is_ours(target)
    if given and operator.name() not in COPIES:
        _check_no_host_tensors(operator, leaves)
    if given and kwargs.get("dtype") in WIDE:
        raise _no_float64(operator)
    found = operator(*tree_map(_unwrapped, args), **tree_map(_unwrapped, kwargs))
    if operator.name() == "aten::copy_":
        # The result is the first argument, on the device or on the host.
        return args[0]
    wrappers = {id(tensor.on_host): tensor for tensor in given}
    return tree_map(lambda value: _wrapped(operator, value, wrappers), found) if is_on_device else found


def _is_ours(device: torch.device) -> bool:
    return device.type in {DEVICE.type, "meta"}


def _unwrapped(value: Any) -> Any:
    if isinstance(value, torch.device) and _is_ours(value):
        return torch.device("cpu")
    return value.on_host if isinstance(value, DeviceTensor) else value


def _wrapped(operator: Any, value: Any, wrappers: dict[int, DeviceTensor]) -> Any:
    """Wraps a result; an in-place operator returns its argument, which has a wrapper already."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype in WIDE:
        raise _no_float64(operator)
    return wrappers[id(value)] if id(value) in wrappers else DeviceTensor(value)


def _check_no_host_tensors(operator: Any, leaves: list[Any]) -> None:
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor)]
    if any(other.dim() for other in others):
        raise RuntimeError(
            f"{operator.name()}: Expected all tensors to be on the same device, but found at least two devices, "
            f"{DEVICE} and cpu!"
        )


def _no_float64(operator: Any) -> TypeError:
    return TypeError(
        f"{operator.name()}: Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
        "float64. Please use float32 instead."
    )
