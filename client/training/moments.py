"""moments() and RunningMoments: statistics of all ranks' values, without a layer.

Reinforcement learning normalises observations and returns by a mean and a variance that all ranks must share. Here they
take the way of a layer's statistics: each rank sends its count, Σx and Σx² in float64, and the sums come back in the
same bits for all.
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
from client.transports import device_rows
from client.transports.choose import GroupSpec, communicator_for, resolve_group, transport_over
from client.transports.named_process_group import NamedProcessGroup
from client.transports.process_group import ProcessGroupPipe, group_of, use_device
from client.transports.transport import Transport
from statsd_bn import limits
from statsd_bn.error_text import broken
from statsd_bn.errors import ConfigurationError, RoundMismatch
from statsd_bn.moments import Moments
from statsd_bn.reduction import FloatArray, Rows

# The name of its rounds. No layer has such a name: the name of a module contains no brackets.
TRANSPORT = "moments()"

# How many values are in float64 at a time: 8 MB.
_PART = 2**20

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

_unnamed = itertools.count()


def _uncompiled(function: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """As `torch.compiler.disable`, which loads the compiler: from the first call on, as torch's optimizers do."""
    disabled: list[Callable[ParamsT, ResultT]] = []

    @functools.wraps(function)
    def run(*arguments: ParamsT.args, **named: ParamsT.kwargs) -> ResultT:
        if not disabled:
            disable: Any = torch.compiler.disable  # torch leaves it untyped
            disabled.append(disable(function))
        return disabled[0](*arguments, **named)

    return run


class BatchMoments(NamedTuple):
    """What `moments` returns.

    Attributes:
        count: how many values each mean is of: an int64 tensor without dimensions.
        mean: the mean; NaN where `count` is 0.
        var: the variance; NaN where `count` is not above the correction.
    """

    count: Tensor  # type: ignore[assignment] # a tuple has a method of this name, and no use for it here
    mean: Tensor
    var: Tensor


class _Whole(NamedTuple):
    """All ranks' values: how many there are, and their mean and Σ(x - mean)², of shape (C,)."""

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
    name: str = TRANSPORT,
    group: GroupSpec = None,
    process_group: Any = None,
) -> BatchMoments:
    """Returns count, mean and variance of all ranks' values, the same bits on every rank.

    All ranks of the group call it, equally often and in the same order; one without values passes a tensor of no rows,
    such as (0, C). It takes one round for each 65,536 means. Nothing is differentiated, and grad mode makes no
    difference. Without a connection or a process group the values of this process are all there are.

    Args:
        x: any shape, type float16 to float64, and device. The lengths of the reduced dimensions may differ between
            ranks, the others may not; types and devices may.
        dim: the dimensions that are reduced, as in `torch.var`; None for all.
        mask: bool, on the device of `x`: which positions count. Its shape is that of the reduced dimensions, in their
            order in `x`, or one that expands to it.
        correction: the variance is the sum of squares divided by count - correction, as in `torch.var`: 1 is
            unbiased, 0 is the variance that normalises a batch.
        name: the name of the call on the wire, the same on every rank; it stands in errors. Calls of different names
            cannot be mistaken for each other.
        group: whose ranks take part, as a layer takes it: None for the whole job, "local", or a `client.Group`.
        process_group: or whose, over torch's collectives.

    Returns:
        The count; mean and variance in the shape that remains, on the device of `x`, in its type, or in float32 where
        that is narrower. They are computed in float64 and rounded once.

    Raises:
        TypeError: `x` is no dense floating-point tensor of this process, or `mask` is not boolean.
        ValueError: `dim` names a dimension that `x` has not, or one twice, or is empty; nothing remains; `mask` does
            not fit; `group` is not a group, or both groups are given.
        ConfigurationError: it is called in a replica of `DataParallelWithCallback`.
        RoundMismatch: the ranks' shapes differ in what remains.
        NonFinite: there are NaN or infinity, and the policy is to raise.
        StatsdBNError: the round failed, with the reason; most kinds are RoundFailed.
    """
    _check(name, x, mask)
    x = x if x.dim() else x.unsqueeze(0)
    dims = _reduced(name, x, dim)
    left = [x.shape[each] for each in range(x.dim()) if each not in dims]
    whole = _over_all_ranks(name, _rows(name, x, dims, mask), left, resolve_group(group, process_group))
    return _as_tensors(whole, correction, left, x)


class RunningMoments(nn.Module):
    """Count, mean and variance of all values that any rank has seen so far; RL libraries call it RunningMeanStd.

    `update` merges a batch of all ranks by the parallel formula of Chan, Golub & LeVeque, in float64. So ranks that
    begin with the same state, as from one checkpoint, keep the same bits. `half()` and `to(dtype)` convert the buffers
    as those of any module: the update computes in float64 all the same, and rounds to their type.

    Args:
        shape: of one value, such as that of an observation; () for numbers, such as returns.
        eps: added to the variance under the root.
        name: the name of its rounds on the wire, the same on every rank; None for one after the class and how many were
            made before it.
        group: whose ranks are merged, as a layer takes it: None for the whole job, "local", or a `client.Group`.
        process_group: or whose, over torch's collectives.
        device: of the buffers.

    Attributes:
        count: buffer, int64: how many values the mean is of.
        mean: buffer, float64, of `shape`: the mean; 0 before the first update.
        var: buffer, float64, of `shape`: the variance, divided by `count`; 1 before the first update.
        shape: as given, a tuple.
        eps: as given.
        name: as given.
        group: as given; for a process group of torch's its name and size.

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
        """Merges a batch of all ranks; in eval it does nothing, as `nn.BatchNorm` keeps its statistics there.

        All ranks call it in training mode, equally often; one without values passes a tensor of no rows.

        Args:
            x: shape (*, *shape): all dimensions before `shape` are the batch's. Any floating-point type and device.
            mask: bool, of the batch's dimensions: which values count.

        Raises:
            ValueError: `x` does not end in `shape`, or as `moments` says.
            Exception: as `moments` says; the buffers keep their values then.
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
        """Returns (x - mean) / sqrt(var + eps), computed in the buffers' type, in that of `x`; it is differentiable.

        Args:
            x: shape (*, *shape), floating-point, on the buffers' device.
            clip: limits the result to [-clip, clip].
        """
        normal = (x - self.mean) / self._std()
        return (normal if clip is None else normal.clamp(-clip, clip)).to(x.dtype)

    def denormalize(self, x: Tensor) -> Tensor:
        """Returns x * sqrt(var + eps) + mean, the inverse of `normalize` where it clipped nothing.

        Args:
            x: shape (*, *shape), floating-point, on the buffers' device.
        """
        return (x * self._std() + self.mean).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `normalize(x)`, and updates nothing: a policy sees a batch more often than once."""
        return self.normalize(x)

    def extra_repr(self) -> str:
        """The shape, and what is not its default."""
        eps = "" if self.eps == 1e-8 else f", eps={self.eps}"  # noqa: PLR2004 - the default
        return f"{self.shape}{eps}{'' if self.group is None else f', group={self.group!r}'}"

    def _std(self) -> Tensor:
        return torch.sqrt(self.var + self.eps)

    @torch.no_grad()
    def _merge(self, batch: _Whole) -> None:
        """Adds a batch to the buffers; on the host, where all ranks round alike."""
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
        raise ConfigurationError(
            broken(
                f"{name}: expected a call outside of DataParallelWithCallback, got one in a replica; call it on the "
                "whole batch, before or after the model"
            )
        )


def _reduced(name: str, x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """Returns the dimensions to reduce, in order, counted from 0."""
    given = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = sorted(each + x.dim() if each < 0 else each for each in given)
    if not dims or len(set(dims)) != len(dims) or not set(dims) <= set(range(x.dim())):
        raise ValueError(
            broken(f"{name}: expected dim to name different dimensions of shape {tuple(x.shape)}, got {dim!r:.80}")
        )
    return dims


def _rows(name: str, x: Tensor, dims: Sequence[int], mask: Tensor | None) -> Tensor:
    """Returns the values that count, shape (n, C); on the host where the device has no float64."""
    reduced, left = ([x.shape[each] for each in range(x.dim()) if (each in dims) is among] for among in (True, False))
    if not prod(left):
        raise ValueError(f"{name}: expected a value beside the reduced dimensions, got shape {tuple(x.shape)}")
    values = x.detach().movedim(tuple(dims), tuple(range(len(dims))))
    rows = values.reshape(prod(reduced), prod(left))
    if mask is not None:
        rows = rows[_expanded(name, mask, reduced, x.device)]
    return rows if rows.device.type in device_rows.TYPES else rows.cpu()


def _expanded(name: str, mask: Tensor, reduced: list[int], device: torch.device) -> Tensor:
    """Returns the mask with an entry for each row."""
    lengths = zip(reversed(mask.shape), reversed(reduced), strict=False)
    if (
        mask.device != device
        or mask.dim() > len(reduced)
        or not all(length in (1, expected) for length, expected in lengths)
    ):
        raise ValueError(
            broken(
                f"{name}: expected a mask on {device} that expands to the reduced dimensions {tuple(reduced)}, got "
                f"{tuple(mask.shape)} on {mask.device}"
            )
        )
    return mask.expand(reduced).reshape(-1)


@torch.no_grad()
def _sums(rows: Tensor) -> FloatArray:
    """Returns Σx and Σx², shape (2, C), in float64."""
    channels = rows.shape[1]
    sums = torch.zeros(2, channels, dtype=torch.float64, device=rows.device)
    for part in torch.split(rows, max(1, _PART // channels)):
        if count := len(part):
            values = part.double()
            mean = values.mean(0)
            sums += torch.stack((count * mean, (values - mean).square().sum(0) + count * mean * mean))
    found: FloatArray = sums.cpu().numpy()
    return found


def _over_all_ranks(name: str, rows: Tensor, left: Sequence[int], group: GroupSpec) -> _Whole:
    """Exchanges this rank's moments for those of all.

    A third vector says by a number which shape is left, since others may have as many values. And rounds of two vectors
    are taken for a layer's, whose ranks' data are compared.
    """
    communicator = communicator_for(group)
    if communicator is None and not isinstance(group, NamedProcessGroup):
        warn_if_unconnected(name)
    transport = transport_over(communicator, name, group)
    if isinstance(transport, ProcessGroupPipe):
        use_device(group_of(transport), rows.device)
    shape = np.full((1, rows.shape[1]), float(zlib.crc32(str(tuple(left)).encode())))
    vectors = np.concatenate((_sums(rows), shape))
    parts = np.split(vectors, np.arange(limits.MAX_CHANNELS, vectors.shape[1], limits.MAX_CHANNELS), axis=1)
    # A rank of an elastic job may be lost between two parts; each is of its own ranks.
    wholes = [_exchanged(transport, Rows((len(rows),), part[None]), left) for part in parts]
    counts, means, centred = zip(*wholes, strict=True)
    return _Whole(counts[0], np.concatenate(means), np.concatenate(centred))


def _exchanged(transport: Transport, rows: Rows, left: Sequence[int]) -> _Whole:
    aggregate = transport.run_slave(rows)
    if (aggregate.values[2] != aggregate.replicas * rows.values[0, 2]).any():
        raise RoundMismatch(
            f"{aggregate.key}: expected one shape beside the reduced dimensions on all ranks, got {tuple(left)} here "
            "and another elsewhere",
            **aggregate.key.fields,
        )
    non_finite.check(transport, rows, aggregate)
    found = Moments.from_vectors(aggregate.count, aggregate.values)
    with np.errstate(all="ignore"):  # of no values, or of infinity
        return _Whole(found.count, found.mean, found.centred)


def _as_tensors(whole: _Whole, correction: float, left: Sequence[int], x: Tensor) -> BatchMoments:
    dtype = x.dtype if x.element_size() >= torch.float32.itemsize else torch.float32
    with np.errstate(all="ignore"):
        var = whole.centred / np.float64(max(0.0, whole.size - correction))
    count = torch.tensor(whole.size).to(x.device)
    return BatchMoments(
        count, *(torch.from_numpy(each).view(tuple(left)).to(dtype).to(x.device) for each in (whole.mean, var))
    )
