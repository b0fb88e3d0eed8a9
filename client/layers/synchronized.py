"""Synchronized: what every layer of ours is and has, whichever of torch's classes it stands for."""

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from client.connection.groups import Group
from client.data_parallel.barrier import Barrier
from client.layers import running_stats
from client.layers.micro_batches import Deferred, check_chunks
from client.layers.recalibration_moments import Tally

Kind = TypeVar("Kind", bound=type[nn.Module])

TWINS: dict[type[nn.Module], type[nn.Module]] = {}
"""Which class of ours stands for which of torch's."""


def twin_of(torchs: type[nn.Module]) -> Callable[[Kind], Kind]:
    """Makes a class of ours the one that stands for a class of torch's."""

    def register(ours: Kind) -> Kind:
        TWINS[torchs] = ours
        return ours

    return register


class Synchronized:
    """A layer of ours, and its mini-batches that come in micro-batches.

    Attributes:
        eps_mode: "plus" or "clamp".
        layer_name: its name on the wire.
        group: with whom it synchronises.
    """

    eps_mode: str
    layer_name: str
    group: Group | str | None = None
    _replica: tuple[Barrier, int] | None = None
    _tally: Tally | None = None
    _deferred: Deferred | None = None

    @property
    def chunks(self) -> int:
        """Micro-batches per mini-batch."""
        return 1 if self._deferred is None else self._deferred.chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        check_chunks(chunks)
        if chunks != self.chunks:
            self.commit_running_statistics()
            self._deferred = Deferred(chunks) if chunks > 1 else None

    def commit_running_statistics(self) -> None:
        """Ends a mini-batch: its micro-batches so far move the running statistics; without any nothing happens."""
        if self._deferred is not None and (pending := self._deferred.take()):
            running_stats.move_by(self, pending)

    def forget_pending(self) -> None:
        """The micro-batches of an unfinished mini-batch will not move the running statistics."""
        if self._deferred is not None:
            self._deferred.take()


# The attributes that a layer of ours has and torch's has not.
OWN_ATTRIBUTES = tuple(Synchronized.__annotations__)
