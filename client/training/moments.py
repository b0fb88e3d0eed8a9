"""moments() and RunningMoments: statistics of all ranks' values, without a layer.

Each rank sends its count, Σx and Σx² in float64 like a layer, and all ranks receive the same bits of the sums.
"""

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from client.data_parallel import any_device
from client.nn.input_checks import is_distributed
from client.nn.unsynchronized import warn_if_unconnected
from client.ops import non_finite
from client.tracebacks import api_boundary
from client.training.gradients import split_rows
from client.transports import device_rows
from client.transports.choose import GroupSpec, communicator_for, resolve_group, transport_over
from client.transports.process_group import NamedProcessGroup, ProcessGroupPipe, group_of, use_device
from client.transports.transport import Transport
from statsd_bn.errors import ConfigurationError, RoundMismatch
from statsd_bn.reduction import FloatArray, Moments, Rows
from statsd_bn.text import wrap

ROUND_NAME = "moments()"  # name of the rounds; no layer's name contains brackets
_CHUNK = 2**20  # the number of values that are converted to float64 at a time: 8 MB

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

_unnamed = itertools.count()


def _uncompiled(function: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """Applies `torch.compiler.disable` at the first call, because it loads the compiler."""
    disabled: list[Callable[ParamsT, ResultT]] = []

    @functools.wraps(function)
    def run(*arguments: ParamsT.args, **named: ParamsT.kwargs) -> ResultT:
        if not disabled:
            disable: Any = torch.compiler.disable  # untyped in torch
            disabled.append(disable(function))
        return disabled[0](*arguments, **named)

    return run


class BatchMoments(NamedTuple):
    """The result of `moments`.

    Attributes:
        count: the number of values of each mean: an int64 tensor without dimensions.
        mean: the mean; NaN if `count` is 0.
        var: the variance; NaN or infinity if `count` is not above the correction.
    """

    count: Tensor  # type: ignore[assignment] # hides the tuple's method of this name
    mean: Tensor
    var: Tensor


class _Population(NamedTuple):
    """All ranks' values: their number, and their mean and Σ(x - mean)², of shape (C,)."""

    size: int
    mean: FloatArray
    centred: FloatArray


@api_boundary
@_uncompiled
def moments(
    x: Tensor,
    dim: int | Sequence[int] | None = 0,
    mask: Tensor | None = None,
    *,
    correction: float = 1,
    name: str = ROUND_NAME,
    group: GroupSpec = None,
    process_group: Any = None,
) -> BatchMoments:
    """Returns count, mean and variance of all ranks' values, with the same bits on all ranks.

    All ranks of the group call it, equally often and in the same order; a rank without values passes an empty tensor,
    such as (0, C). It takes one round per 65,536 means. It is not differentiable, whatever the grad mode. Without a
    connection or a process group the result covers the values of this process.

    Args:
        x: any shape and device; type float16 to float64. The ranks' shapes may differ in the reduced dimensions only;
            their types and devices may differ.
        dim: the dimensions to reduce, as in `torch.var`; None for all.
        mask: bool, on the device of `x`: the positions to include. It has the shape of the reduced dimensions, in their
            order in `x`, or expands to it.
        correction: the variance is Σ(x - mean)² divided by count - correction, as in `torch.var`: 1 for the
            unbiased variance, 0 for the variance that normalises a batch.
        name: the name of the call in rounds and errors, equal on all ranks. Calls with different names never share a
            round.
        group: the participating ranks, as for a layer: None for the whole job, "local", or a `client.Group`.
        process_group: instead of `group`, a process group of torch, whose collectives are used.

    Returns:
        The count; mean and variance in the remaining shape, on the device of `x`, in its type, but at least float32.
        They are computed in float64 and rounded once.

    Raises:
        TypeError: `x` is not a dense floating-point tensor of this process, or `mask` is not boolean.
        ValueError: `dim` is empty, or has a wrong or repeated dimension; a remaining dimension has size 0; `mask` does
            not expand to the reduced dimensions; `group` is not a group, or both groups are given.
        ConfigurationError: it is called in a replica of `DataParallelWithCallback`.
        RoundMismatch: the ranks' shapes differ in the remaining dimensions.
        NonFinite: there are NaN or infinity, and the policy is to raise.
        StatsdBNError: the round failed, with the reason; in most cases RoundFailed.
    """
    _check(name, x, mask)
    x = x if x.dim() else x.unsqueeze(0)
    listed = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = sorted(each + x.dim() if each < 0 else each for each in listed)
    if not dims or len(set(dims)) != len(dims) or not set(dims) <= set(range(x.dim())):
        text = f"{name}: expected dim to name different dimensions of shape {tuple(x.shape)}, got {dim!r:.80}"
        raise ValueError(wrap(text))
    shape = [x.shape[each] for each in range(x.dim()) if each not in dims]
    population = _over_all_ranks(name, _rows(name, x, dims, mask), shape, resolve_group(group, process_group))
    with np.errstate(all="ignore"):
        var = population.centred / np.float64(max(0.0, population.size - correction))
    dtype = x.dtype if x.element_size() >= torch.float32.itemsize else torch.float32
    tensors = (torch.from_numpy(each).view(shape).to(dtype).to(x.device) for each in (population.mean, var))
    return BatchMoments(torch.tensor(population.size).to(x.device), *tensors)


class RunningMoments(nn.Module):
    """Running count, mean and variance of the values of all ranks; RL libraries call it RunningMeanStd.

    `update` merges a batch of all ranks by the parallel formula of Chan, Golub & LeVeque, in float64. Ranks that start
    from equal states, such as one checkpoint, keep equal bits. `half()` and `to(dtype)` convert the buffers as in any
    module; the update still computes in float64, and rounds to the buffers' type.

    Args:
        shape: the shape of one value, such as an observation; () for numbers, such as returns.
        eps: added to the variance under the root.
        name: the name of its rounds, equal on all ranks; None for the class's name with a number.
        group: the participating ranks, as for a layer: None for the whole job, "local", or a `client.Group`.
        process_group: instead of `group`, a process group of torch, whose collectives are used.
        device: the device of the buffers.

    Attributes:
        count: buffer, int64: the number of values.
        mean: buffer, float64, of `shape`: the mean; 0 before the first update.
        var: buffer, float64, of `shape`: the variance with divisor `count`; 1 before the first update.
        shape: the shape as a tuple.
        group: the group; for a process group of torch its name and size.

    Raises:
        ValueError: `group` is not a group, or both groups are given.
    """

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-8,
        *,
        name: str | None = None,
        group: GroupSpec = None,
        process_group: Any = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps = eps
        self.group = resolve_group(group, process_group)
        self.name = f"{type(self).__name__}-{next(_unnamed)}" if name is None else name
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("mean", torch.zeros(self.shape, dtype=torch.float64, device=device))
        self.register_buffer("var", torch.ones(self.shape, dtype=torch.float64, device=device))

    @api_boundary
    @_uncompiled
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Merges a batch of all ranks; without effect in eval mode, like the statistics of `nn.BatchNorm`.

        All ranks call it in training mode, equally often; a rank without values passes an empty tensor.

        Args:
            x: shape (*, *shape): all dimensions before `shape` are the batch's. Any floating-point type and device.
            mask: bool, of the batch's dimensions: the values to include.

        Raises:
            ValueError: `x` does not end in `shape`.
            Exception: any error of `moments`; the buffers keep their values.
        """
        if not self.training:
            return
        _check(self.name, x, mask)
        batch = x.dim() - len(self.shape)
        if batch < 0 or tuple(x.shape[batch:]) != self.shape:
            shape = ", ".join(map(str, ("*", *self.shape)))
            raise ValueError(f"{self.name}: expected a batch of shape ({shape}), got {tuple(x.shape)}")
        rows = _rows(self.name, x if batch else x.unsqueeze(0), range(max(1, batch)), mask)
        self._merge(_over_all_ranks(self.name, rows, self.shape, self.group))

    def normalize(self, x: Tensor, clip: float | None = None) -> Tensor:
        """Returns (x - mean) / sqrt(var + eps) in the type of `x`, computed in the buffers' type; differentiable.

        Args:
            x: shape (*, *shape), floating-point, on the buffers' device.
            clip: limits the result to [-clip, clip].
        """
        normal = (x - self.mean) / self._std()
        return (normal if clip is None else normal.clamp(-clip, clip)).to(x.dtype)

    def denormalize(self, x: Tensor) -> Tensor:
        """Returns x * sqrt(var + eps) + mean, the inverse of `normalize` without clipping.

        Args:
            x: shape (*, *shape), floating-point, on the buffers' device.
        """
        return (x * self._std() + self.mean).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `normalize(x)`, without an update: a policy uses a batch several times."""
        return self.normalize(x)

    def extra_repr(self) -> str:
        """The shape, and arguments that differ from their defaults."""
        eps = "" if self.eps == 1e-8 else f", eps={self.eps}"  # noqa: PLR2004 - the default
        return f"{self.shape}{eps}{'' if self.group is None else f', group={self.group!r}'}"

    def _std(self) -> Tensor:
        return torch.sqrt(self.var + self.eps)

    @torch.no_grad()
    def _merge(self, batch: _Population) -> None:
        """Adds a batch to the buffers, on the host, so that all ranks round equally."""
        if not batch.size:
            return
        old, total = int(self.count), int(self.count) + batch.size
        mean, var = (buffer.cpu().double().flatten().numpy() for buffer in (self.mean, self.var))
        with np.errstate(all="ignore"):
            delta = batch.mean - mean
            centred = var * old + batch.centred + delta * delta * (old * batch.size / total)
            merged = mean + delta * (batch.size / total), centred / total
        self.count.fill_(total)
        for buffer, values in zip((self.mean, self.var), merged, strict=True):
            buffer.copy_(torch.from_numpy(values).view(self.shape).to(buffer.dtype))


def _check(name: str, x: Any, mask: Tensor | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if not x.is_floating_point() or x.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense floating-point tensor, got {x.dtype}, {x.layout}")
    if is_distributed(x):
        raise TypeError(f"{name}: expected a tensor of this process, got a DTensor; pass its to_local()")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"{name}: expected a boolean mask, got {mask.dtype}")
    if any_device.is_inside_replica():
        where = "called inside a replica of DataParallelWithCallback"
        raise ConfigurationError(wrap(f"{name}: {where}; call it on the whole batch, before or after the model"))


def _rows(name: str, x: Tensor, dims: Sequence[int], mask: Tensor | None) -> Tensor:
    """Returns the included values, shape (n, C), on the host if the device has no float64."""
    reduced, kept = ([x.shape[each] for each in range(x.dim()) if (each in dims) is among] for among in (True, False))
    if not prod(kept):
        raise ValueError(f"{name}: expected a value outside of the reduced dimensions, got shape {tuple(x.shape)}")
    values = x.detach().movedim(tuple(dims), tuple(range(len(dims))))
    rows = values.reshape(prod(reduced), prod(kept))
    if mask is not None:
        lengths = zip(reversed(mask.shape), reversed(reduced), strict=False)
        expands = mask.dim() <= len(reduced) and all(length in (1, expected) for length, expected in lengths)
        if mask.device != x.device or not expands:
            expected = f"expected a mask on {x.device} that expands to the reduced dimensions {tuple(reduced)}"
            raise ValueError(wrap(f"{name}: {expected}, got {tuple(mask.shape)} on {mask.device}"))
        rows = rows[mask.expand(reduced).reshape(-1)]
    return rows if rows.device.type in device_rows.DEVICE_TYPES else rows.cpu()


@torch.no_grad()
def _sums(rows: Tensor) -> FloatArray:
    """Returns Σx and Σx², shape (2, C), in float64."""
    channels = rows.shape[1]
    sums = torch.zeros(2, channels, dtype=torch.float64, device=rows.device)
    for part in torch.split(rows, max(1, _CHUNK // channels)):
        if count := len(part):
            values = part.double()
            mean = values.mean(0)
            sums += torch.stack((count * mean, (values - mean).square().sum(0) + count * mean * mean))
    result: FloatArray = sums.cpu().numpy()
    return result


def _over_all_ranks(name: str, rows: Tensor, shape: Sequence[int], group: GroupSpec) -> _Population:
    """Sends this rank's moments, and returns the moments of all ranks.

    A third vector has a checksum of the remaining shape, because different shapes may have the same number of values.
    It also distinguishes these rounds from a layer's rounds, in which the server compares the ranks' data.
    """
    communicator = communicator_for(group)
    if communicator is None and not isinstance(group, NamedProcessGroup):
        warn_if_unconnected(name)
    transport = transport_over(communicator, name, group)
    if isinstance(transport, ProcessGroupPipe):
        use_device(group_of(transport), rows.device)
    checksum = np.full((1, rows.shape[1]), float(zlib.crc32(str(tuple(shape)).encode())))
    vectors = np.concatenate((_sums(rows), checksum))
    # An elastic job may lose a rank between two parts, so each part covers its own ranks.
    parts = [_exchange(transport, part, shape) for part in split_rows(len(rows), vectors)]
    with np.errstate(all="ignore"):  # of no values, or of infinity
        means, centred = [part.mean for part in parts], [part.centred for part in parts]
    return _Population(parts[0].count, np.concatenate(means), np.concatenate(centred))


def _exchange(transport: Transport, rows: Rows, shape: Sequence[int]) -> Moments:
    aggregate = transport.run_slave(rows)
    if (aggregate.values[2] != aggregate.replicas * rows.values[0, 2]).any():
        raise RoundMismatch(
            f"{aggregate.key}: expected the same shape outside of the reduced dimensions on all ranks, "
            f"got {tuple(shape)} on this rank and another elsewhere",
            **aggregate.key.fields,
        )
    non_finite.check(transport, rows, aggregate)
    return Moments.from_vectors(aggregate.count, aggregate.values)
