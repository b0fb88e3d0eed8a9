"""Barrier: where the replica threads of one process meet, and leave with one result each.

The replicas of one process must form one node of autograd: on a CPU one thread runs the whole backward pass, so a node
that waited for its sibling would wait for a node that only the same thread can run. So each replica brings its part to
the barrier, the last to arrive combines all parts, and each leaves with its result.

No replica waits for one that cannot come. A replica is running, waiting or finished. As soon as none is running, the
meeting either takes place or never will; then all are told which replica waits where.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from statsd_bn.errors import ReplicaLost, RoundMismatch, RoundTimeout

Combine = Callable[[list[Any]], Sequence[Any]]


@dataclass(slots=True)
class _Waiting:
    """A replica at a meeting point; it sleeps until `asleep` is released."""

    point: str
    offer: Any
    asleep: threading.Lock
    result: Any = None
    served: bool = False


class Barrier:
    """Where the replicas of one parallel forward pass meet.

    Args:
        nr_replicas: how many threads take part, numbered from 0.
        timeout: seconds that a replica waits for its siblings.
    """

    def __init__(self, nr_replicas: int, timeout: float) -> None:
        self.nr_replicas = nr_replicas
        self._timeout = timeout
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._finished: set[int] = set()
        self._failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether all replicas have ended their forward pass."""
        return len(self._finished) == self.nr_replicas

    def meet(self, replica: int, point: str, offer: Any, combine: Combine) -> Any:
        """Waits for all replicas at `point` and returns this replica's part of the result.

        Args:
            replica: the caller's number.
            point: where it waits; all must name the same.
            offer: its part.
            combine: takes all offers in replica order and returns a result for each. The last to arrive calls it,
                once.

        Raises:
            RoundMismatch: the replicas wait at different points, or one has finished.
            ReplicaLost: a sibling raised.
            RoundTimeout: a sibling did not come in time.
        """
        me = _Waiting(point, offer, threading.Lock())
        me.asleep.acquire()
        with self._lock:
            self._waiting[replica] = me
            self._settle(combine)
        me.asleep.acquire(timeout=self._timeout)
        if not me.served:
            with self._lock:  # `combine` runs under the lock, and may take longer than the timeout
                self._check_served(me, replica)
        return me.result

    def finish(self, replica: int) -> None:
        """Notes that a replica has ended its forward pass."""
        with self._lock:
            self._finished.add(replica)
            self._settle(None)

    def fail(self, replica: int, error: BaseException) -> None:
        """Makes the siblings of a replica that raised raise too, at once and with its error as the cause."""
        with self._lock:
            self._finished.add(replica)
            if self._failure is None:
                self._failure = _lost(replica, error)
            self._wake()

    def _settle(self, combine: Combine | None) -> None:
        """If nobody is running any more, holds the meeting or says why it cannot take place."""
        if self._failure is None:
            if not self._waiting or len(self._waiting) + len(self._finished) < self.nr_replicas:
                return
            points = {waiting.point for waiting in self._waiting.values()}
            if combine is None or self._finished or len(points) > 1:
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
        """Releases a lock for each replica: with one lock for all, they would wait for each other to take it."""
        for waiting in self._waiting.values():
            waiting.asleep.release()
        self._waiting.clear()

    def _mismatch(self) -> RoundMismatch:
        table = {replica: f"waits at {waiting.point}" for replica, waiting in self._waiting.items()}
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
                f"replica {replica} waited {self._timeout:g} s at {me.point}; waiting there or elsewhere: "
                f"{sorted(self._waiting)} of {self.nr_replicas} replicas",
                waiting=sorted(self._waiting),
                seconds=self._timeout,
            )
            self._wake()
        raise self._failure


def _lost(replica: int, error: BaseException) -> ReplicaLost:
    cause = f"{type(error).__name__}: {error}"
    lost = ReplicaLost(f"replica {replica} failed with {cause}", replica=replica, cause=cause)
    lost.__cause__ = error
    return lost
