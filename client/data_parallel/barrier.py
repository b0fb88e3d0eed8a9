"""Rendezvous: where the replica threads of one process meet, and leave with one result each.

The replicas of one process must form one autograd node (CPU autograd walks the graph in a single thread, so a
backward node that waited for its sibling would wait for a node behind it). So each brings what it has to a
meeting, the last to arrive combines everything, and each leaves with its part.

Nobody waits for somebody who cannot come. Every replica is running, waiting at a place, or finished, so the
moment none is running the meeting either takes place or never will, and then all are told who waits where.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from statsd_bn.errors import ReplicaLost, RoundMismatch, RoundTimeout

Combine = Callable[[list[Any]], Sequence[Any]]


@dataclass(slots=True)
class _Waiting:
    """A replica at a meeting place; it sleeps until `asleep` is released."""

    place: str
    offer: Any
    asleep: threading.Lock
    result: Any = None
    served: bool = False


class Rendezvous:
    """The meeting of the replicas of one parallel forward pass.

    Args:
        nr_replicas: how many threads take part, numbered from 0.
        deadline: seconds a replica waits for its siblings.
    """

    def __init__(self, nr_replicas: int, deadline: float) -> None:
        self.nr_replicas = nr_replicas
        self._deadline = deadline
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._finished: set[int] = set()
        self._failure: BaseException | None = None

    def meet(self, replica: int, place: str, offer: Any, combine: Combine) -> Any:
        """Waits for all replicas at `place` and returns this replica's part of what was combined.

        Args:
            replica: the caller's number.
            place: where it waits; all must name the same.
            offer: what it brings.
            combine: takes all offers in replica order and returns a result for each; called once, by the
                last to arrive.

        Raises:
            RoundMismatch: the replicas wait at different places, or one has finished.
            ReplicaLost: a sibling raised.
            RoundTimeout: a sibling did not come in time.
        """
        me = _Waiting(place, offer, threading.Lock())
        me.asleep.acquire()
        with self._lock:
            self._waiting[replica] = me
            self._settle(combine)
        me.asleep.acquire(timeout=self._deadline)
        if not me.served:
            with self._lock:  # it is taken while the results are made, which may end after the deadline
                self._check_served(me, replica)
        return me.result

    def finish(self, replica: int) -> None:
        """A replica is through with its forward pass."""
        with self._lock:
            self._finished.add(replica)
            self._settle(None)

    def fail(self, replica: int, error: BaseException) -> None:
        """A replica raised: its siblings raise too, at once and with the cause."""
        with self._lock:
            self._finished.add(replica)
            if self._failure is None:
                self._failure = _lost(replica, error)
            self._wake()

    def _settle(self, combine: Combine | None) -> None:
        """If nobody is running any more, holds the meeting or says why there is none."""
        if self._failure is None:
            if not self._waiting or len(self._waiting) + len(self._finished) < self.nr_replicas:
                return
            places = {waiting.place for waiting in self._waiting.values()}
            if combine is None or self._finished or len(places) > 1:
                self._failure = self._mismatch()
            else:
                self._serve(combine)
        self._wake()

    def _serve(self, combine: Combine) -> None:
        everyone = [self._waiting[replica] for replica in sorted(self._waiting)]
        try:
            results = combine([waiting.offer for waiting in everyone])
        except BaseException as error:  # noqa: BLE001 - every replica raises it, this one too
            self._failure = error
            return
        for waiting, result in zip(everyone, results, strict=True):
            waiting.result = result
            waiting.served = True

    def _wake(self) -> None:
        """Each by a lock of its own: those who wait for a common one would get in each other's way."""
        for waiting in self._waiting.values():
            waiting.asleep.release()
        self._waiting.clear()

    def _mismatch(self) -> RoundMismatch:
        table = {replica: f"waits at {waiting.place}" for replica, waiting in self._waiting.items()}
        table |= dict.fromkeys(self._finished, "has finished its forward pass")
        lines = "; ".join(f"replica {replica} {state}" for replica, state in sorted(table.items()))
        return RoundMismatch(
            f"the replicas of this process do not run the same layers: {lines}",
            replicas={str(replica): state for replica, state in sorted(table.items())},
        )

    def _check_served(self, me: _Waiting, replica: int) -> None:
        if me.served:
            return
        if self._failure is None:
            self._failure = RoundTimeout(
                f"replica {replica} waited {self._deadline:g} s at {me.place}; waiting there or elsewhere: "
                f"{sorted(self._waiting)} of {self.nr_replicas} replicas",
                waiting=sorted(self._waiting),
                seconds=self._deadline,
            )
            self._wake()
        raise self._failure


def _lost(replica: int, error: BaseException) -> ReplicaLost:
    cause = f"{type(error).__name__}: {error}"
    lost = ReplicaLost(f"replica {replica} failed with {cause}", replica=replica, cause=cause)
    lost.__cause__ = error
    return lost
