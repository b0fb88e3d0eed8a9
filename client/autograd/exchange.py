"""Exchange: one call of one layer, with its rounds forward and backward."""

import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from client.autograd import non_finite
from client.autograd.backward_passes import phase_of
from client.kernels import on_host
from client.kernels.statistics import Statistics
from client.transports.transport import Transport
from statsd_bn.error_text import broken
from statsd_bn.errors import ConfigurationError
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate
from statsd_bn.moments import Moments
from statsd_bn.round_key import FORWARD, FORWARD_WITHOUT_GRADIENT, RoundKey
from statsd_bn.rows import Rows, sound_rows

_numbers = itertools.count()


def _sequence_nr() -> int:
    number: int = torch._C._autograd._get_sequence_nr()  # noqa: SLF001 - has no public name
    return number


@dataclass(frozen=True, slots=True)
class Turn:
    """When a call is computed, in autograd's terms.

    Attributes:
        sequence_nr: how many nodes there were in this thread before it.
        is_inside_node: whether a node ran it, that of a reentrant checkpoint, say: then it has no nodes of its own.
    """

    sequence_nr: int = field(default_factory=_sequence_nr)
    is_inside_node: bool = field(default_factory=lambda: not torch.is_grad_enabled())

    def distance_to(self, node: int) -> int | None:
        """Returns how far a node is that wants the call computed again, by its sequence number; None if it cannot.

        The node that ran the call was made before it, and all others that ask were made after it.
        """
        distance = self.sequence_nr - node if self.is_inside_node else node - self.sequence_nr + 1
        return distance if distance > 0 else None


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
        kernels: what computes the steps, by where its vectors are.
        transport: the way to the others.
        layer: the layer's name, for errors.
        eps: the layer's.
        eps_mode: the layer's.
        phase: of its forward round, see `phase_of_forward`.
        rows: what the local replicas contributed to the forward round.
        key: of the forward round; None before it.
        members: who took part in the forward round.
        moments: of the whole batch.
        statistics: what they make of it; rows, moments and statistics are such as the kernels have.
        number: grows with each call that this process makes.
        turns: when it was computed, first and again.
        has_moved: whether the forward round has moved the layer's running statistics itself.
        computed_again: the local replicas whose checkpoints have run it a second time.
        streams: in which the devices of the local replicas work; empty where they have none.
    """

    kernels: ClassVar[Any] = on_host

    transport: Transport
    layer: str
    eps: float
    eps_mode: str
    phase: str = FORWARD
    rows: Any = field(init=False)
    key: RoundKey | None = None
    members: Members = field(init=False)
    moments: Any = field(init=False)
    statistics: Any = field(init=False)
    number: int = field(init=False, default_factory=_numbers.__next__)
    turns: list[Turn] = field(init=False, default_factory=lambda: [Turn()])
    has_moved: bool = False
    computed_again: set[int] = field(default_factory=set)
    streams: tuple[Any, ...] = ()
    _passes: dict[str, int] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether the forward round has taken place."""
        return self.key is not None

    def forward(self, local: list[Any]) -> None:
        """Exchanges the local replicas' moments for those of the whole batch."""
        values = np.array([(moments.sums, moments.squares) for moments in local])
        rows = Rows(tuple([moments.count for moments in local]), values)
        aggregate = self.transport.run_slave(rows, phase=self.phase)
        non_finite.check(self.transport, rows, aggregate)
        self.take(rows, aggregate)

    def take(self, rows: Rows, aggregate: Aggregate) -> None:
        """Keeps what the forward round returned for these rows."""
        self.rows = rows
        self.key = aggregate.key
        self.members = aggregate.members
        self.moments = Moments.from_vectors(aggregate.count, aggregate.values)
        self.statistics = Statistics.of(self.moments, self.eps, self.eps_mode)

    def backward(self, phase: str, local: list[Any]) -> Any:
        """Returns the sums over all replicas.

        Args:
            phase: "backward" or "second backward". Each further backward pass through a graph that is kept has a round
                of its own: "backward 2", ...
            local: shape (vectors, C) for each replica.
        """
        key = self.next_key(phase, len(local))
        before, values = self.rows, np.array(local)
        rows = (sound_rows if values.shape == before.values.shape else Rows)(before.counts, values)
        aggregate = self.transport.run_slave(rows, key)
        non_finite.check(self.transport, rows, aggregate)
        return aggregate.values

    def next_key(self, phase: str, replicas: int) -> RoundKey:
        """Returns the key of the next round of this phase, to which so many local replicas bring something."""
        if replicas != len(self.rows.counts):
            raise ConfigurationError(
                f"layer {self.layer!r}: expected gradients of all {len(self.rows.counts)} replicas of this process "
                f"together, got those of {replicas}; a reentrant checkpoint computes one replica at a time, so pass "
                "use_reentrant=False to torch.utils.checkpoint"
            )
        return self._next_key(phase)

    def _next_key(self, phase: str) -> RoundKey:
        number = self._passes[phase] = self._passes.get(phase, 0) + 1
        assert self.key is not None  # noqa: S101 - a backward follows a forward
        return self.key.of_phase(phase_of(phase, number))

    def check_count(self, x: Tensor) -> None:
        """Raises ValueError if the whole batch has one value per channel, or none for the positions of `x`."""
        if self.moments.count > 1 or (self.moments.count == 0 and x.numel() == 0):
            return
        raise too_few(self.layer, self.moments.count, tuple(x.shape))


def too_few(layer: str, count: int, shape: tuple[int, ...]) -> ValueError:
    """Returns the error for a whole batch with so few values per channel."""
    return ValueError(
        broken(
            f"layer {layer!r}: expected more than 1 value per channel over all replicas when training, got {count} "
            f"(this replica's input has shape {shape})"
        )
    )
