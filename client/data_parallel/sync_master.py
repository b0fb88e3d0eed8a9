"""SyncMaster: one replica asks the others of its process for a message each, and answers them.

Synchronized-BatchNorm-PyTorch makes its own layers of this, and other people's modules use it the same way: in
`__data_parallel_replicate__` copy 0 hangs its `SyncMaster` on the context, and the other copies register with it.

    def __data_parallel_replicate__(self, ctx, copy_id):
        if copy_id == 0:
            ctx.master = self.master
        else:
            self.pipe = ctx.master.register_slave(copy_id)

    def forward(self, x):
        total = self.master.run_master(x.sum()) if self.pipe is None else self.pipe.run_slave(x.sum())

There a replica that raises leaves the others waiting for ever. Here the replicas meet at the barrier that they meet at
in synchronised layers. So whoever waits in vain is told at once, and why. Nothing of this leaves the process: ranks
exchange values of their own by `Connection.all_gather`.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, Full, Queue
from typing import Any

from client.data_parallel.barrier import Barrier
from client.session.protocol.member import DEFAULT_ROUND_TIMEOUT
from statsd_bn.error_text import broken
from statsd_bn.errors import RoundTimeout

Messages = list[tuple[Any, Any]]
"""Pairs of who and what: the master's first, whose identifier is 0."""

_thread = threading.local()
_numbers = itertools.count()


@contextmanager
def slaves_of(barrier: Barrier, copy_id: int) -> Iterator[None]:
    """While it lasts, slaves that register in this thread belong to that copy of a model, and meet there."""
    before = getattr(_thread, "replica", None)
    _thread.replica = barrier, copy_id
    try:
        yield
    finally:
        _thread.replica = before


class _Circle:
    """A master and the slaves of one replication.

    Attributes:
        identifiers: of the slaves, in the order in which they registered.
        given: where all replicas of the model meet; None for slaves that registered outside of a replication.
    """

    def __init__(self, name: str, barrier: Barrier | None) -> None:
        self.identifiers: list[Any] = []
        self.given = barrier
        self._replicas = [0]  # the replica number of the master, then those of the slaves
        self._name = name
        self._own: Barrier | None = None
        self._lock = threading.Lock()

    def add(self, identifier: Any, copy_id: int) -> None:
        """Adds a slave; `copy_id` is the replica that it is in."""
        self.identifiers.append(identifier)
        self._replicas.append(copy_id)

    def meet(self, place: int, offer: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Waits for all others; `place` is 0 for the master, and i + 1 for slave i."""
        barrier = self._barrier()
        replica = self._replicas[place] if barrier is self.given else place
        return barrier.meet(replica, self._name, offer, combine)

    def _barrier(self) -> Barrier:
        """Returns where they meet: with all replicas, or by themselves if only some of these take part."""
        with self._lock:
            size = len(self._replicas)
            if self.given is not None and sorted(self._replicas) == list(range(self.given.nr_replicas)):
                return self.given
            if self._own is None:
                self._own = Barrier(size, DEFAULT_ROUND_TIMEOUT)
            return self._own


class SlavePipe:
    """A slave's way to its master.

    Attributes:
        identifier: as it registered.
    """

    def __init__(self, identifier: Any, circle: _Circle) -> None:
        self.identifier = identifier
        self._circle = circle
        self._place = len(circle.identifiers)

    def run_slave(self, msg: Any) -> Any:
        """Sends a message to the master, and returns its answer.

        Raises:
            RoundMismatch: the master, or another replica, waits somewhere else or has ended its forward pass.
            ReplicaLost: the master, or another replica, has raised.
            RoundTimeout: the master did not come in time.
        """
        self._circle.meet(self._place, msg, _hand_over)
        return self._circle.meet(self._place, None, _answers)


class SyncMaster:
    """Collects a message from each slave, and gives each an answer.

    Args:
        master_callback: takes the messages as pairs `(identifier, message)`, the master's own first with 0 for its
            identifier, then the slaves' in the order in which they registered. Returns the answers as such pairs,
            the master's first. It runs in the master's thread.
    """

    def __init__(self, master_callback: Callable[[Messages], Messages]) -> None:
        self._master_callback = master_callback
        self._start()

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle has no slaves."""
        return {"master_callback": self._master_callback}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over the state of a copy or pickle."""
        self._master_callback = state["master_callback"]
        self._start()

    def _start(self) -> None:
        self._name = f"SyncMaster {next(_numbers)}"
        self._circle = _Circle(self._name, None)
        self._was_run = False

    @property
    def nr_slaves(self) -> int:
        """How many slaves are registered."""
        return len(self._circle.identifiers)

    def register_slave(self, identifier: Any) -> SlavePipe:
        """Adds a slave. The first one after a run, or of another replication, begins anew without those of before.

        Args:
            identifier: names it in the messages; its replica's number, as a rule.
        """
        barrier, copy_id = getattr(_thread, "replica", None) or (None, 0)
        circle = self._circle
        if self._was_run or circle.given is not barrier or identifier in circle.identifiers:
            circle = self._circle = _Circle(self._name, barrier)
            self._was_run = False
        circle.add(identifier, copy_id)
        return SlavePipe(identifier, circle)

    def run_master(self, master_msg: Any) -> Any:
        """Waits for the slaves' messages, calls the callback, sends the answers, and returns the master's own.

        Raises:
            RoundMismatch: a slave waits somewhere else or has ended its forward pass.
            ReplicaLost: a slave has raised.
            RoundTimeout: a slave did not come in time.
            ValueError: the callback does not return one answer for each, the master's first.
        """
        if self._circle.given is not None and self._circle.given.is_over:  # this batch feeds one replica only
            self._circle = _Circle(self._name, None)
        self._was_run = True
        identifiers = [0, *self._circle.identifiers]
        if len(identifiers) == 1:
            return _checked(self._master_callback([(0, master_msg)]), identifiers)[0]
        messages = self._circle.meet(0, master_msg, _hand_over)
        found = self._master_callback(list(zip(identifiers, messages, strict=True)))
        return self._circle.meet(0, _checked(found, identifiers), _answers)


class FutureResult:
    """A place for one result, which one thread puts there and another takes."""

    def __init__(self) -> None:
        # No SimpleQueue, which may wait for ever where a signal comes: see `client.session.channel_pool`.
        self._results: Queue[Any] = Queue()

    def put(self, result: Any) -> None:
        """Puts a result there.

        Raises:
            Full: the one before has not been taken.
        """
        if not self._results.empty():
            raise Full("FutureResult: expected the result before to have been taken")
        self._results.put(result)

    def get(self, timeout: float = DEFAULT_ROUND_TIMEOUT) -> Any:
        """Takes the result, and waits for it if it is not there.

        Args:
            timeout: seconds.

        Raises:
            RoundTimeout: no result came in time.
        """
        try:
            return self._results.get(timeout=timeout)
        except Empty:
            raise RoundTimeout(f"FutureResult: no result came within {timeout:g} s", seconds=timeout) from None


def _hand_over(messages: list[Any]) -> list[Any]:
    """The master gets all messages, the slaves nothing."""
    return [messages, *[None] * (len(messages) - 1)]


def _answers(offers: list[Any]) -> list[Any]:
    """Everyone gets an answer out of those that the master offers."""
    answers: list[Any] = offers[0]
    return answers


def _checked(answers: Messages, identifiers: list[Any]) -> list[Any]:
    """Returns the answers alone, in the order of the identifiers."""
    found = dict(answers)
    if not answers or answers[0][0] != 0 or found.keys() != set(identifiers):
        raise ValueError(
            broken(
                f"master_callback: expected an answer for each of {identifiers}, 0 first, got "
                f"{[who for who, _ in answers]}"
            )
        )
    return [found[who] for who in identifiers]
