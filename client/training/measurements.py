"""Measured values as tensors: what `mp_sync` accepts, and how the values of all members are joined."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.serialization import NUMPY_DTYPES
from statsd_bn.checks import shown
from statsd_bn.error_text import broken
from statsd_bn.errors import RoundMismatch
from statsd_bn.members import Members

_NUMBERS = (bool, int, float, np.integer, np.floating, np.bool_)


def as_tensor(data: Any, double_precision: bool) -> Tensor:
    """Returns a tensor of at least one dimension.

    Args:
        data: a tensor, which is returned as it is; an array, a number, or a list or tuple of these.
        double_precision: whether anything but a tensor becomes float64 (complex128).

    Raises:
        TypeError: `data` is something else.
        ValueError: a list's elements differ in shape, or a number is too large for int64, or for float64 where asked.
    """
    tensor = _tensor(data, double_precision and not isinstance(data, Tensor))
    return tensor if tensor.ndim else tensor.reshape(1)


def joined(name: str, tensors: dict[int, Tensor]) -> Tensor:
    """Returns the members' tensors one behind the other along dimension 0.

    An empty list, or any tensor of shape (0,), fits all others: it has no dtype or further dimensions of its own.

    Raises:
        RoundMismatch: they differ in dtype, or in more than the length of dimension 0.
    """
    parts = {member: tensor for member, tensor in tensors.items() if tensor.shape != (0,)} or tensors
    sorts: dict[str, list[int]] = {}
    for member, tensor in parts.items():
        sorts.setdefault(_sort(tensor), []).append(member)
    if len(sorts) > 1:
        told = "; ".join(f"{sort} from {_told(members)}" for sort, members in sorts.items())
        raise RoundMismatch(
            f"{name}: expected one dtype, and one shape but for dimension 0, from all ranks, got {told}"
        )
    return torch.cat(list(parts.values()))


def like(tensor: Tensor, data: Any, return_tensor: bool) -> Any:
    """Returns a result in the form asked for: a tensor on the device of `data`, an array for an array, or a list."""
    if return_tensor:
        return tensor.to(data.device) if isinstance(data, Tensor) else tensor
    return tensor.numpy() if isinstance(data, np.ndarray) else tensor.tolist()


def _sort(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} of shape ({', '.join(['*', *map(str, tensor.shape[1:])])})"


def _told(members: list[int]) -> str:
    return f"rank{'s' * (len(members) > 1)} {Members.of(members)}"


def _tensor(data: Any, is_double: bool) -> Tensor:
    """Returns the tensor of the same shape."""
    if isinstance(data, Tensor):
        if data.layout is not torch.strided:
            raise TypeError(f"expected a dense tensor, got one with layout {data.layout}")
        return _cast(data.cpu(), is_double)
    if isinstance(data, np.ndarray):
        if data.dtype.name not in NUMPY_DTYPES:
            raise TypeError(f"expected an array of numbers or bool, got dtype {data.dtype}")
        return _cast(torch.tensor(data.astype(data.dtype.newbyteorder("="))), is_double)
    if isinstance(data, _NUMBERS):
        return _of_numbers(data, is_double)
    if isinstance(data, list | tuple):
        return _of_list(data, is_double)
    raise TypeError(f"expected a tensor, an array, a number, or a list of these, got {type(data).__name__}")


def _cast(tensor: Tensor, is_double: bool) -> Tensor:
    if not is_double:
        return tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _of_numbers(data: Any, is_double: bool) -> Tensor:
    try:
        # Directly: a detour through float32 would lose digits.
        return torch.tensor(data, dtype=torch.float64 if is_double else None)
    except (OverflowError, RuntimeError, ValueError) as error:  # which of them depends on the version of torch
        if isinstance(error, OverflowError) or "Overflow" in str(error):
            kind = "float64" if is_double else "int64"
            raise ValueError(f"expected numbers that fit into {kind}, got {shown(data)}") from error
        raise


def _of_list(data: list[Any] | tuple[Any, ...], is_double: bool) -> Tensor:
    kinds = _kinds_within(data)
    for kind in kinds:
        if not issubclass(kind, (Tensor, np.ndarray, *_NUMBERS)):
            raise TypeError(
                broken(f"expected a list of numbers, arrays, tensors or such lists, got {kind.__name__} in it")
            )
    # torch is fast with plain numbers, slow with arrays, and warns for tensors.
    if not any(issubclass(kind, Tensor | np.ndarray) for kind in kinds):
        return _of_numbers(data, is_double)
    elements = [_tensor(element, is_double) for element in data]
    shapes = {tuple(element.shape) for element in elements}
    if len(shapes) > 1:
        raise ValueError(f"expected a list whose elements have one shape, got {sorted(shapes)}")
    return torch.stack(elements)


def _kinds_within(data: list[Any] | tuple[Any, ...]) -> set[type]:
    kinds = {type(element) for element in data}
    nested = (element for element in data if isinstance(element, list | tuple))
    return {kind for kind in kinds if not issubclass(kind, list | tuple)}.union(*map(_kinds_within, nested))
