"""SyncMaster: the master replica of a process collects a message from each other replica, and answers it.

As in Synchronized-BatchNorm-PyTorch copy 0 puts its `SyncMaster` on the context, and the other copies register with it.

    def __data_parallel_replicate__(self, ctx, copy_id):
        if copy_id == 0:
            ctx.master = self.master
        else:
            self.pipe = ctx.master.register_slave(copy_id)

    def forward(self, x):
        total = self.master.run_master(x.sum()) if self.pipe is None else self.pipe.run_slave(x.sum())

In the original, if a replica raises, the others wait for ever; here the barrier of the synchronised layers raises in
each waiting replica at once. Messages stay in the process; ranks exchange values by `Connection.all_gather`.
"""

import itertools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from queue import Empty, Full, Queue
from typing import Any

from client.data_parallel.barrier import Barrier
from client.session.protocol.member import DEFAULT_ROUND_TIMEOUT
from statsd_bn.errors import RoundTimeout
from statsd_bn.text import wrap

Messages = list[tuple[Any, Any]]  # pairs of identifier and message, the master's with identifier 0 first

# The barrier and the number of the replica whose callbacks run now; a slave registers with them.
current_replica: "ContextVar[tuple[Barrier | None, int]]" = ContextVar("current_replica", default=(None, 0))

_numbers = itertools.count()


class _Replication:
    """A master and the slaves of one replication; `barrier` is None if they registered outside of a replication."""

    def __init__(self, name: str, barrier: Barrier | None) -> None:
        self.slaves: dict[Any, int] = {}  # replica of each identifier, in the order of registration
        self.barrier = barrier
        self._name = name
        self._own_barrier = Barrier(1, DEFAULT_ROUND_TIMEOUT)  # used if only some of the replicas participate

    def add(self, identifier: Any, copy_id: int) -> "SlavePipe":
        """Add the slave in replica `copy_id`."""
        self.slaves[identifier] = copy_id
        self._own_barrier.nr_replicas += 1
        return SlavePipe(identifier, self)

    def wait(self, participant: int, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait for the others at the barrier; the master is participant 0, slave i is i + 1."""
        replicas = [0, *self.slaves.values()]
        if self.barrier is not None and sorted(replicas) == list(range(self.barrier.nr_replicas)):
            return self.barrier.wait(replicas[participant], self._name, value, combine)
        return self._own_barrier.wait(participant, self._name, value, combine)


class SlavePipe:
    """Connection of a slave to its master; `identifier` is the slave's, as registered."""

    def __init__(self, identifier: Any, replication: _Replication) -> None:
        self.identifier = identifier
        self._replication = replication
        self._participant = len(replication.slaves)

    def run_slave(self, msg: Any) -> Any:
        """Send a message to the master, and return its answer; the errors are those of `SyncMaster.run_master`."""
        self._replication.wait(self._participant, msg, _messages_for_master)
        return self._replication.wait(self._participant, None, _answers_of_master)


class SyncMaster:
    """Collects a message from each slave, and sends each an answer.

    Args:
        master_callback: takes the messages as pairs `(identifier, message)`: the master's with identifier 0, then the
            slaves' in the order of registration. Returns the answers as such pairs, the master's first. It runs in
            the master's thread.
    """

    def __init__(self, master_callback: Callable[[Messages], Messages]) -> None:
        self._master_callback = master_callback
        self._name = f"SyncMaster {next(_numbers)}"
        self._replication = _Replication(self._name, None)
        self._has_run = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or pickle, which has no slaves."""
        return {"master_callback": self._master_callback}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SyncMaster.__init__(self, state["master_callback"])

    @property
    def nr_slaves(self) -> int:
        """Number of registered slaves."""
        return len(self._replication.slaves)

    def register_slave(self, identifier: Any) -> SlavePipe:
        """Add a slave; `identifier`, usually the number of the replica, marks the slave's messages.

        Earlier slaves are removed if the master has run, another replication has begun, or `identifier` is in use.
        """
        barrier, copy_id = current_replica.get()
        replication = self._replication
        if self._has_run or replication.barrier is not barrier or identifier in replication.slaves:
            replication = self._replication = _Replication(self._name, barrier)
            self._has_run = False
        return replication.add(identifier, copy_id)

    def run_master(self, master_msg: Any) -> Any:
        """Wait for the slaves' messages, call the callback, send the answers, and return the master's own.

        Raises:
            RoundMismatch: a slave waits elsewhere or has finished its forward pass.
            ReplicaLost: a slave has raised.
            RoundTimeout: a slave did not arrive in time.
            ValueError: the callback does not return one answer for each identifier, the master's first.
        """
        barrier = self._replication.barrier
        if barrier is not None and barrier.is_finished:  # a batch for one replica; the slaves are of an earlier batch
            self._replication = _Replication(self._name, None)
        self._has_run = True
        identifiers = [0, *self._replication.slaves]
        if len(identifiers) == 1:
            return self._answers([master_msg], identifiers)[0]
        messages = self._replication.wait(0, master_msg, _messages_for_master)
        return self._replication.wait(0, self._answers(messages, identifiers), _answers_of_master)

    def _answers(self, messages: list[Any], identifiers: list[Any]) -> list[Any]:
        """Call the callback, and return the answers in the order of the identifiers."""
        answers = self._master_callback(list(zip(identifiers, messages, strict=True)))
        by_identifier = dict(answers)
        if not answers or answers[0][0] != 0 or by_identifier.keys() != set(identifiers):
            expected = f"expected an answer for each of {identifiers}, 0 first"
            raise ValueError(wrap(f"master_callback: {expected}, got {[identifier for identifier, _ in answers]}"))
        return [by_identifier[identifier] for identifier in identifiers]


def _messages_for_master(messages: list[Any]) -> list[Any]:
    return [messages, *[None] * (len(messages) - 1)]


def _answers_of_master(values: list[Any]) -> list[Any]:
    return list(values[0])


class FutureResult:
    """Slot for one result, which one thread puts and another gets."""

    def __init__(self) -> None:
        # Not a SimpleQueue: in Python 3.11 it never times out if a signal handler runs for longer than the timeout.
        self._results: Queue[Any] = Queue()

    def put(self, result: Any) -> None:
        """Store a result, or raise Full if the previous one was not read."""
        if not self._results.empty():
            raise Full("FutureResult: put() before the previous result was read")
        self._results.put(result)

    def get(self, timeout: float = DEFAULT_ROUND_TIMEOUT) -> Any:
        """Wait for the result, and remove it; raise RoundTimeout after `timeout` seconds."""
        try:
            return self._results.get(timeout=timeout)
        except Empty:
            raise RoundTimeout(f"FutureResult: no result came within {timeout:g} s", seconds=timeout) from None
