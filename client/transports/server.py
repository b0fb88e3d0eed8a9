"""SlavePipe: the transport to the aggregation server, over this process's connection."""

from collections.abc import Mapping
from dataclasses import dataclass

from client.native.row import NativeRow
from client.session.connection import Connection
from client.session.groups import Group
from client.transports.places import places
from client.transports.transport import RowDone
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows
from statsd_bn.round_key import FORWARD, RoundKey


@dataclass(frozen=True, slots=True)
class SlavePipe:
    """The transport to the server.

    Args:
        connection: this process's connection.
        layer: the layer's name, the same on every member.
        group: the members that take part, as `Connection.group` takes it; None for all.
    """

    connection: Connection
    layer: str
    group: Group | str | None = None

    def run_slave(self, contribution: Rows, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Sends this process's rows and waits for the sum over all members of the group.

        Args:
            contribution: counts, and float64 values of shape (replicas, vectors, channels): Σx and Σx² forward,
                Σdy and Σdy·(x-mean) backward.
            key: None for the layer's next forward round; for a backward round the forward aggregate's `key` with
                another phase, one that no earlier round of the same call had.
            phase: of a forward round, see `Transport.run_slave`.

        Returns:
            The aggregate; its values have shape (vectors, channels).

        Raises:
            StatsdBNError: the round failed, with the reason; most kinds are RoundFailed.
        """
        found: Aggregate = self.connection.exchange(self.layer, contribution, key, self.group, None, phase)
        return found

    def run_row(self, row: NativeRow, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate | RowDone:
        """Sends the row as any other."""
        return self.run_slave(row.measured(), key, phase)

    @property
    def rank(self) -> int:
        """This process's number among the members that an aggregate names."""
        return self.connection.rank

    def places(self) -> Mapping[int, str]:
        """Asks the server where the members of the job run."""
        return places(self.connection)

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Returns the key of a round of an earlier call."""
        who, group = self.connection.member, self.connection.group(self.group)
        return RoundKey(who.job, group.name, who.epoch, step, self.layer, call, phase)
