"""Barrier at which the replica threads of one process meet, in layers and for the messages of `SyncMaster`.

In a layer's call all replicas share one autograd node, because a node that waited for its sibling would block the
thread that has to run the sibling. When all replicas wait, the barrier combines their values. After a failure, a
timeout or a mismatch every waiting replica raises.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from statsd_bn.errors import ReplicaLost, RoundMismatch, RoundTimeout

Combine = Callable[[list[Any]], Sequence[Any]]


@dataclass(slots=True)
class _Waiter:
    """A replica that waits at `point` until `lock` is released."""

    point: str
    value: Any
    lock: threading.Lock
    result: Any = None
    has_result: bool = False


class Barrier:
    """Barrier of one parallel forward pass; a replica waits `timeout` seconds for its siblings."""

    def __init__(self, nr_replicas: int, timeout: float) -> None:
        self.nr_replicas = nr_replicas
        self._timeout = timeout
        self._lock = threading.Lock()
        self._waiters: dict[int, _Waiter] = {}
        self._finished: set[int] = set()
        self._failure: BaseException | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all replicas have finished their forward pass."""
        return len(self._finished) == self.nr_replicas

    def wait(self, replica: int, point: str, value: Any, combine: Combine) -> Any:
        """Wait for all replicas; the last to arrive combines the values in replica order. Return this replica's result.

        Raises RoundMismatch, ReplicaLost, RoundTimeout, or the error of `combine`.
        """
        waiter = _Waiter(point, value, threading.Lock())
        waiter.lock.acquire()
        with self._lock:
            self._waiters[replica] = waiter
            self._advance(combine)
        waiter.lock.acquire(timeout=self._timeout)
        if not waiter.has_result:
            with self._lock:  # `combine` runs under the lock, and may take longer than the timeout
                if not waiter.has_result:
                    raise self._failure or self._time_out(waiter, replica)
        return waiter.result

    def finish(self, replica: int) -> None:
        """Record that a replica has finished its forward pass."""
        with self._lock:
            self._finished.add(replica)
            self._advance(None)

    def fail(self, replica: int, error: BaseException) -> None:
        """Record that a replica raised; its siblings raise too, caused by `error`, in their current or next `wait`."""
        with self._lock:
            self._finished.add(replica)
            if self._failure is None:
                cause = f"{type(error).__name__}: {error}"
                self._failure = ReplicaLost(f"replica {replica} failed with {cause}", replica=replica, cause=cause)
                self._failure.__cause__ = error
            self._release_all()

    def _advance(self, combine: Combine | None) -> None:
        """Once all replicas wait or have finished, combine or fail. Release the waiters then, and after any failure."""
        if self._failure is None:
            if not self._waiters or len(self._waiters) + len(self._finished) < self.nr_replicas:
                return
            points = {waiter.point for waiter in self._waiters.values()}
            if combine is None or self._finished or len(points) > 1:
                self._failure = self._mismatch()
            else:
                self._run(combine)
        self._release_all()

    def _run(self, combine: Combine) -> None:
        waiters = [self._waiters[replica] for replica in sorted(self._waiters)]
        try:
            results = combine([waiter.value for waiter in waiters])
        except BaseException as error:  # noqa: BLE001 - raised in every replica, this one included
            self._failure = error
            return
        for waiter, result in zip(waiters, results, strict=True):
            waiter.result = result
            waiter.has_result = True

    def _release_all(self) -> None:
        """Release each waiter's own lock; a shared lock would wake the threads one by one."""
        for waiter in self._waiters.values():
            waiter.lock.release()
        self._waiters.clear()

    def _mismatch(self) -> RoundMismatch:
        states = dict.fromkeys(self._finished, "has finished its forward pass")
        states |= {replica: f"waits at {waiter.point}" for replica, waiter in self._waiters.items()}
        replicas = {str(replica): state for replica, state in sorted(states.items())}
        lines = "; ".join(f"replica {replica} {state}" for replica, state in replicas.items())
        return RoundMismatch(f"the replicas of this process do not run the same layers: {lines}", replicas=replicas)

    def _time_out(self, waiter: _Waiter, replica: int) -> RoundTimeout:
        waiting = sorted(self._waiters)
        waits = f"replica {replica} waited {self._timeout:g} s at {waiter.point}"
        text = f"{waits}; waiting there or elsewhere: {waiting} of {self.nr_replicas} replicas"
        self._failure = error = RoundTimeout(text, waiting=waiting, seconds=self._timeout)
        self._release_all()
        return error
