"""Exchange: the rounds of one call of a layer, over the host or on the inputs' devices."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from client.ops import non_finite
from client.ops.device_errors import DeviceErrors, TooFewValues, async_checks, too_few_values
from client.ops.statistics import ChannelMoments, ChannelStatistics, Running
from client.transports import device_rows
from client.transports.device_rows import LocalRows, from_host
from client.transports.transport import Transport
from statsd_bn.errors import ConfigurationError
from statsd_bn.round_key import FORWARD, FORWARD_WITHOUT_GRADIENT, RoundKey

_new_tuple = tuple.__new__
_numbers = itertools.count()
_sequence_nr = torch._C._autograd._get_sequence_nr  # noqa: SLF001 - has no public name

_passes_lock = threading.Lock()

# Enough for all compiled calls with a living graph: 100 layers, dozens of micro-batches, a few mini-batches.
MAX_COUNTED_CALLS = 2**14


class GraphPosition(NamedTuple):
    """Position of a call among the nodes of autograd."""

    sequence_nr: int  # the number of nodes that this thread had created before the call
    # Whether a node ran the call, for example a reentrant checkpoint; then the call has no node. It is inferred from
    # gradient mode, so it is also true under `torch.no_grad()`.
    is_inside_node: bool


def current_position() -> list[GraphPosition]:
    """Position of a call that runs now, in a list."""
    return [_new_tuple(GraphPosition, (_sequence_nr(), not torch.is_grad_enabled()))]


def phase_of_forward(*, needs_gradient: bool) -> str:
    """Phase of a forward round; if only some ranks will run a backward round, phases differ and the round fails."""
    return FORWARD if needs_gradient or not torch.is_grad_enabled() else FORWARD_WITHOUT_GRADIENT


@dataclass(slots=True, eq=False, weakref_slot=True)
class Exchange:
    """One call of a layer: its transport, and the results that all replicas share."""

    transport: Transport
    layer: str
    eps: float
    eps_mode: str
    phase: str = FORWARD  # of the forward round
    capacity: int = 0  # rows per rank on its device; 0 where rows travel over the host
    local: list[ChannelMoments] = field(init=False)  # of each local replica
    key: RoundKey | None = None  # of the forward round; None before it
    moments: ChannelMoments = field(init=False)  # of the whole batch
    statistics: ChannelStatistics = field(init=False)
    number: int = field(init=False, default_factory=_numbers.__next__)  # increases with each call of this process
    positions: list[GraphPosition] = field(init=False, default_factory=current_position)  # also of recomputations
    has_updated_running: bool = False  # whether the forward pass has updated the layer's running statistics
    recomputed: set[int] = field(default_factory=set)  # the local replicas that a checkpoint has run a second time
    streams: tuple[Any, ...] = ()  # of the replicas' threads; empty without such threads or streams
    _passes: dict[str, int] = field(default_factory=dict)

    def forward(self, local: list[ChannelMoments]) -> None:
        """Exchange the local replicas' moments for the whole batch's; on devices, raise errors of earlier rounds.

        Raises ValueError if the whole batch has one value per channel, or if masks exclude all values.
        """
        self.local, counts = local, [moments.count for moments in local]
        rows = LocalRows.of(counts, [moments.vectors for moments in local])
        self.key, count, values, failed = _run(self.transport, rows, self.capacity, None, self.phase, self._too_few)
        if isinstance(count, int) and (check := self._too_few(count)) and check.flag:
            raise too_few_values(self.layer, count, self.local[0].shape if count else check.shape)
        self.moments = ChannelMoments(_nan_where(failed, count), values)
        self.statistics = ChannelStatistics.of(self.moments, self.eps, self.eps_mode)

    def _too_few(self, count: Any) -> TooFewValues | None:
        """The check of the whole batch's count; None where the shapes prove that it passes."""
        if sum(moments.count for moments in self.local if isinstance(moments.count, int)) > 1:
            return None
        nonempty = [moments.shape for moments in self.local if 0 not in moments.shape]
        flag, shape = (count <= 1, nonempty[0]) if nonempty else (count == 1, self.local[0].shape)
        return TooFewValues(flag, self.layer, shape)

    def backward(self, phase: str, local: list[Tensor]) -> Tensor:
        """Exchange the local replicas' sums, each of shape (vectors, C), for the sums over all replicas."""
        if len(local) != len(self.local):
            raise ConfigurationError(
                f"layer {self.layer!r}: backward got gradients of {len(local)}, expected all {len(self.local)} "
                "replicas of this process at once; pass use_reentrant=False to torch.utils.checkpoint (a reentrant "
                "checkpoint runs one replica at a time)"
            )
        rows = LocalRows.of([moments.count for moments in self.local], local)
        return backward_round(self.transport, rows, self.capacity, self.next_key(phase))

    def next_key(self, phase: str) -> RoundKey:
        """Key of the next round of a backward phase; with a retained graph a phase has several rounds."""
        number = self._passes[phase] = self._passes.get(phase, 0) + 1
        assert self.key is not None  # noqa: S101 - a backward follows a forward
        return self.key.of_phase(phase_of(phase, number))


@dataclass(slots=True, eq=False)
class PlainExchange(Exchange):
    """A plain call: a backend computes one slice without a mask, in one step forward and one step backward.

    Second derivatives use the functions of `engine` instead, on tensors made from the call's buffers when needed.
    """

    running: Running | None = None  # to update in the forward pass; None where the layer updates them

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the output; run the forward round first if it has not run yet."""
        raise NotImplementedError

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...] | None:
        """Gradients of input, weight and bias; None if the backend does not support the saved tensors."""
        raise NotImplementedError

    def lazy_attribute(self, name: str) -> Any:
        """Attribute of `Exchange` that few calls need; None for any other name."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if (value := self.lazy_attribute(name)) is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        setattr(self, name, value)
        return value


def backward_round(transport: Transport, rows: LocalRows, capacity: int, key: RoundKey) -> Tensor:
    """Sums of a backward round, shape (vectors, C); NaN where it has failed on devices."""
    _, _, values, failed = _run(transport, rows, capacity, key)
    total: Tensor = _nan_where(failed, values)
    return total


def _run(
    transport: Transport,
    rows: LocalRows,
    capacity: int,
    key: RoundKey | None,
    phase: str = FORWARD,
    too_few: Callable[[Tensor], TooFewValues | None] = lambda _: None,
) -> tuple[RoundKey, Any, Tensor, Tensor | None]:
    """Key, count and values of a round, and whether it has failed on devices; a later call raises that error."""
    if not capacity:
        contribution = rows.on_host()
        aggregate = transport.run_slave(contribution, key, phase=phase)
        non_finite.check(transport, contribution, aggregate)
        return aggregate.key, aggregate.count, from_host(aggregate.values, rows.values.device), None
    async_checks.poll(rows.values.device)
    on_device = device_rows.run(transport, rows, capacity, key, phase=phase)
    failed = DeviceErrors(transport, rows, on_device, too_few(on_device.count)).submit()
    return on_device.key, on_device.count, on_device.values, failed


def _nan_where(failed: Tensor | None, values: Any) -> Any:
    return values if failed is None else torch.where(failed, torch.full_like(values, torch.nan), values)


def phase_of(phase: str, number: int) -> str:
    """Phase of backward pass `number`, counted from 1: "backward", "backward 2", ..."""
    return phase if number == 1 else f"{phase} {number}"


@lru_cache(maxsize=MAX_COUNTED_CALLS)
def _passes_of(call: int) -> Iterator[int]:  # noqa: ARG001 - the cache's key
    return itertools.count(1)


def count_backward_pass(call: int) -> int:
    """Number of this backward pass, from 1, for the compiled call with number `call`, which keeps no `Exchange`."""
    with _passes_lock:
        return next(_passes_of(call))
