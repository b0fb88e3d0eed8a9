"""The backend of the native core, for what is on a CPU; `client.native` has the core itself."""

import ctypes
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from client.native import library
from client.native.library import BF16, F16, F32, F64, OK, Slice
from client.ops.layout import alike, dense
from client.ops.statistics import ChannelMoments, ChannelStatistics

CODES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.float64: F64}

# Up to so many values the core takes less time than to release Python's global lock and to take it again.
SMALL = 2**15

core = library.library()


class Native:
    """The backend for a CPU, without masks."""

    def takes(self, x: Tensor) -> bool:
        """Takes all types of floating point that torch computes batch norm in."""
        return x.is_cpu and x.dtype in CODES

    def moments(self, x: Tensor) -> ChannelMoments:
        """Adds in float64 from the first value on."""
        x = dense(x)
        row = torch.empty(2 * x.shape[1] + 1, dtype=torch.float64, device="cpu")
        _call("sbn_moments", x, x.data_ptr(), row.data_ptr())
        sums, squares = row[:-1].view(2, -1)
        return ChannelMoments(x.numel() // x.shape[1], sums, squares, tuple(x.shape))

    def normalise(self, x: Tensor, statistics: ChannelStatistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Computes in float64, and rounds once."""
        x = dense(x)
        output = torch.empty_like(x)
        kept = torch.stack((statistics.mean, statistics.invstd, statistics.slope))
        weight, bias = _dense(weight), _dense(bias)
        _call("sbn_normalize", x, x.data_ptr(), output.data_ptr(), kept.data_ptr(),
            *parameter(weight), *parameter(bias),
        )  # fmt: skip
        return output

    def for_backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both alike."""
        return alike(grad, x)

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: ChannelStatistics) -> Tensor:
        """Adds in float64."""
        grad, x = alike(grad, x)
        mean = statistics.mean.contiguous()
        row = torch.empty(2 * x.shape[1] + 1, dtype=torch.float64, device="cpu")
        _call("sbn_backward_sums", x, grad.data_ptr(), x.data_ptr(), mean.data_ptr(), row.data_ptr())
        return row[:-1].view(2, -1)

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: ChannelStatistics, means: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Computes in float64, and rounds once."""
        grad, x = alike(grad, x)
        found = torch.empty_like(x)
        ones = torch.ones_like(statistics.mean)  # the means have the slope in them
        kept = torch.stack((statistics.mean, statistics.invstd, ones))
        total = torch.cat((means.flatten(), ones[:1]))
        weight = _dense(weight)
        _call("sbn_input_grad", x, grad.data_ptr(), x.data_ptr(), found.data_ptr(), kept.data_ptr(),
            total.data_ptr(), *parameter(weight),
        )  # fmt: skip
        return found


def functions_for(x: Tensor) -> Any:
    """Returns the functions of the core for a slice: those of large ones release Python's global lock."""
    assert core is not None  # noqa: S101 - `takes` is asked before
    return core.holding if x.numel() <= SMALL else core.releasing


def check(code: int) -> None:
    """Raises MemoryError where a function of the core has returned that it got none."""
    if code != OK:
        raise MemoryError("the native core got no memory for vectors of one value per channel")


def _call(name: str, x: Tensor, *arguments: Any) -> None:
    slice_ = slice_of(x)
    check(getattr(functions_for(x), name)(slice_.address, *arguments))


def parameter(values: Tensor | None) -> tuple[int | None, int]:
    """Returns address and type of a dense weight, bias or the like, as the core takes them."""
    return (None, F32) if values is None else (values.data_ptr(), CODES[values.dtype])


def _dense(values: Tensor | None) -> Tensor | None:
    if values is None or (values.dtype in CODES and values.is_contiguous()):
        return values
    values = values.detach().contiguous()
    return values if values.dtype in CODES else values.float()


def slice_of(x: Tensor) -> "AddressedSlice":
    """Returns the description of a dense `x`, shape (N, C, *); it has to live as long as its address is in use."""
    return _slice(x.shape, x.dtype, x.is_contiguous(), torch.get_num_threads())


class AddressedSlice(Slice):
    """A slice, and where it is.

    Attributes:
        address: as functions of the core take it.
    """

    address: int


@lru_cache(maxsize=4096)
def _slice(shape: tuple[int, ...], dtype: torch.dtype, is_contiguous: bool, threads: int) -> AddressedSlice:
    samples, channels, *positions = shape
    length = prod(positions)
    if length == 1 or not is_contiguous:
        found = AddressedSlice(samples * length, channels, 1, CODES[dtype], 1, threads)
    else:
        found = AddressedSlice(samples, channels, length, CODES[dtype], 0, threads)
    found.address = ctypes.addressof(found)
    return found
