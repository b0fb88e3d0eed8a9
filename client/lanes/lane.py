"""SlavePipe: a replica layer's handle on its rounds.

Each lane looks like this: rows go in, the aggregate of everybody's rows comes out. `SlavePipe` leads to the
master, `LocalPipe` ends in this process and adds its replicas' rows as the master would, to the same bits.
"""

from dataclasses import dataclass
from typing import Protocol

from client.connection.connection import Connection
from client.connection.current import current_connection
from client.connection.groups import Group
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import sum_in_order
from statsd_bn.round_key import FORWARD, RoundKey
from statsd_bn.rows import Rows

_THIS_PROCESS = Members.of([0])


class Pipe(Protocol):
    """A lane on which a contribution travels."""

    def run_slave(self, contribution: Rows, key: RoundKey | None = None) -> Aggregate:
        """Exchanges a contribution for the aggregate of its round."""

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Returns the key of a round of an earlier call."""


@dataclass(frozen=True, slots=True)
class SlavePipe:
    """The lane to the master.

    Args:
        connection: this process's connection.
        layer: the layer's name, the same on every member.
        group: the members that take part, as `Connection.group` takes it; None for all.
    """

    connection: Connection
    layer: str
    group: Group | str | None = None

    def run_slave(self, contribution: Rows, key: RoundKey | None = None) -> Aggregate:
        """Sends this process's rows and waits for the sum over all members of the group.

        Args:
            contribution: counts, and float64 values of shape (replicas, vectors, channels): Σx and Σx² forward,
                Σdy and Σdy·(x-mean) backward.
            key: None for the layer's next forward round; for a backward round the forward aggregate's `key` with
                another phase, one that no earlier round of the same call had.

        Returns:
            The aggregate; its values have shape (vectors, channels).

        Raises:
            StatsdBNError: the round failed, with the reason; most kinds are RoundFailed.
        """
        return self.connection.exchange(self.layer, contribution, key, self.group)

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Returns the key of a round of an earlier call."""
        who, group = self.connection.member, self.connection.group(self.group)
        return RoundKey(who.job, group.name, who.epoch, step, self.layer, call, phase)


@dataclass(frozen=True, slots=True)
class LocalPipe:
    """The lane of a process without a master: its replicas are all there is.

    Args:
        layer: the layer's name.
    """

    layer: str

    def run_slave(self, contribution: Rows, key: RoundKey | None = None) -> Aggregate:
        """Adds the rows in replica order."""
        total = sum_in_order(contribution.values)
        counts = contribution.counts
        return Aggregate(key or self.key(0, 0, FORWARD), len(counts), sum(counts), _THIS_PROCESS, total)

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Returns the key of a round of an earlier call."""
        return RoundKey("in-process", "world", 0, step, self.layer, call, phase)


def pipe_of(layer: str, group: Group | str | None) -> Pipe:
    """Returns the lane of a layer in this process, as it is connected now.

    Args:
        layer: the layer's name.
        group: with whom it synchronises.
    """
    connection = current_connection()
    if connection is None or connection.is_alone(group):
        return LocalPipe(layer)
    return SlavePipe(connection, layer, group)
