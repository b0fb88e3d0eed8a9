"""Exchange: one call of one layer, with its rounds forward and backward."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from client.ops import rounds
from client.ops.findings import Few, too_few
from client.ops.rounds import phase_of
from client.ops.statistics import ChannelMoments, ChannelStatistics
from client.transports.device_rows import Count, LocalRows
from client.transports.transport import Transport
from statsd_bn.errors import ConfigurationError
from statsd_bn.round_key import FORWARD, FORWARD_WITHOUT_GRADIENT, RoundKey

_numbers = itertools.count()


class Turn(NamedTuple):
    """When a call is computed, in autograd's terms.

    Attributes:
        sequence_nr: how many nodes there were in this thread before it.
        is_inside_node: whether a node ran it, that of a reentrant checkpoint, say: then it has no nodes of its own.
    """

    sequence_nr: int
    is_inside_node: bool

    def distance_to(self, node: int) -> int | None:
        """Returns how far a node is that wants the call computed again, by its sequence number; None if it cannot.

        The node that ran the call was made before it, and all others that ask were made after it.
        """
        distance = self.sequence_nr - node if self.is_inside_node else node - self.sequence_nr + 1
        return distance if distance > 0 else None


def present_turn() -> list[Turn]:
    """Returns the turn of a call that is computed now, in a list."""
    return [Turn(torch._C._autograd._get_sequence_nr(), not torch.is_grad_enabled())]  # noqa: SLF001 - has no public name


def phase_of_forward(*, needs_gradient: bool) -> str:
    """Returns the phase of a forward round: by it ranks see at once whether all of them have a backward round to come.

    A pass without gradients has none, whatever its input needs, so nothing is compared then.

    Args:
        needs_gradient: whether the input of any local replica does.
    """
    return FORWARD if needs_gradient or not torch.is_grad_enabled() else FORWARD_WITHOUT_GRADIENT


@dataclass(slots=True, eq=False, weakref_slot=True)
class Exchange:
    """One layer's call: how it reaches the other replicas, and what they know together.

    Attributes:
        transport: the way to the others.
        layer: the layer's name, for errors.
        eps: the layer's.
        eps_mode: the layer's.
        phase: of its forward round, see `phase_of_forward`.
        capacity: how many rows each rank brings on its device, see `device_rows.capacity_of`; 0 where rows go over the
            host.
        local: what the local replicas contributed to the forward round.
        key: of the forward round; None before it.
        moments: of the whole batch.
        statistics: what they make of it.
        number: grows with each call that this process makes.
        turns: when it was computed, first and again.
        has_moved: whether the forward round has moved the layer's running statistics itself.
        computed_again: the local replicas whose checkpoints have run it a second time.
        streams: in which the devices of the local replicas work; empty where they have none.
    """

    transport: Transport
    layer: str
    eps: float
    eps_mode: str
    phase: str = FORWARD
    capacity: int = 0
    local: list[ChannelMoments] = field(init=False)
    key: RoundKey | None = None
    moments: ChannelMoments = field(init=False)
    statistics: ChannelStatistics = field(init=False)
    number: int = field(init=False, default_factory=_numbers.__next__)
    turns: list[Turn] = field(init=False, default_factory=present_turn)
    has_moved: bool = False
    computed_again: set[int] = field(default_factory=set)
    streams: tuple[Any, ...] = ()
    _passes: dict[str, int] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether the forward round has taken place."""
        return self.key is not None

    def forward(self, local: list[ChannelMoments]) -> None:
        """Exchanges the local replicas' moments for those of the whole batch.

        Raises:
            StatsdBNError: the round has failed; or, where rows stay on devices, an earlier one has.
            ValueError: the whole batch of an earlier round on devices had too few values.
        """
        self.local, counts = local, [moments.count for moments in local]
        rows = LocalRows.of(counts, [moments.vectors for moments in local])
        count: Count
        if self.capacity:
            found = rounds.forward_on_devices(self.transport, rows, self.capacity, self.phase, self._few)
            self.key, count, values = found
        else:
            aggregate, values = rounds.over_host(self.transport, rows, phase=self.phase)
            self.key, count = aggregate.key, aggregate.count
        self.moments = ChannelMoments(count, values[0], values[1])
        self.statistics = ChannelStatistics.of(self.moments, self.eps, self.eps_mode)

    def _few(self, count: Tensor) -> Few | None:
        """Returns whether the whole batch has too few values, as `check_count` has it; None where it has enough.

        Mostly the shapes say that there are enough.
        """
        if sum(moments.known for moments in self.local) > 1:
            return None
        with_positions = [moments.shape for moments in self.local if 0 not in moments.shape]
        if with_positions:
            return Few(count <= 1, self.layer, with_positions[0])
        return Few(count == 1, self.layer, self.local[0].shape)

    def backward(self, phase: str, local: list[Tensor]) -> Tensor:
        """Returns the sums over all replicas.

        Args:
            phase: "backward" or "second backward". Each further backward pass through a graph that is kept has a round
                of its own: "backward 2", ...
            local: shape (vectors, C) for each replica.
        """
        key = self.next_key(phase, len(local))
        rows = LocalRows.of([moments.count for moments in self.local], local)
        return rounds.backward(self.transport, rows, self.capacity, key)

    def next_key(self, phase: str, replicas: int) -> RoundKey:
        """Returns the key of the next round of this phase, to which so many local replicas bring something."""
        if replicas != len(self.local):
            raise ConfigurationError(
                f"layer {self.layer!r}: expected gradients of all {len(self.local)} replicas of this process "
                f"together, got those of {replicas}; a reentrant checkpoint computes one replica at a time, so pass "
                "use_reentrant=False to torch.utils.checkpoint"
            )
        return self._next_key(phase)

    def _next_key(self, phase: str) -> RoundKey:
        number = self._passes[phase] = self._passes.get(phase, 0) + 1
        assert self.key is not None  # noqa: S101 - a backward follows a forward
        return self.key.of_phase(phase_of(phase, number))

    def check_count(self, shape: Sequence[int]) -> None:
        """Raises ValueError if the whole batch has one value per channel, or none for positions of the input.

        Where rows stay on devices, `forward` has seen to it.
        """
        count = self.moments.count
        if isinstance(count, int) and (count == 1 or (count == 0 and 0 not in shape)):
            raise too_few(self.layer, count, tuple(shape))
