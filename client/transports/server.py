"""SlavePipe: the transport over this process's connection to the aggregation server."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from client.session.channel_pool import Channel
from client.session.connection import Connection
from client.session.groups import Group
from client.transports.transport import Transport
from statsd_bn.errors import ProtocolError, ServerUnreachable, StatsdBNError
from statsd_bn.members import parse_places
from statsd_bn.messages import WORLD, Aggregate, Failure, Status, StatusRequest
from statsd_bn.reduction import Rows
from statsd_bn.round_key import FORWARD, RoundKey
from statsd_bn.text import escape
from statsd_bn.wire import decode, encode

logger = logging.getLogger("statsd_bn.client")

PLACES_SECONDS = 1.0  # timeout of a query for the members' places
MAX_QUERYING_RANKS = 64  # higher ranks do not query: all ranks may query at once, and a large job has a long status

# Time after which a round that bypasses the server escalates: its rows go to the server too, which diagnoses the wait.
# Members rarely arrive at a round further apart than this.
ESCALATE_SECONDS = 0.05
LISTEN_SECONDS = 0.005  # interval at which an escalated round polls the server and its own transport


@dataclass(frozen=True, slots=True)
class SlavePipe(Transport):
    """The transport over the server.

    Args:
        connection: this process's connection.
        layer: the layer's name, the same on every member.
        group: the layer's group, as in `Connection.group`; None for the whole job.
    """

    connection: Connection
    layer: str
    group: Group | str | None = None

    def run_slave(self, contribution: Rows, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Send this process's rows and wait for the sum over all members of the group.

        Args:
            contribution: counts, and float64 values of shape (replicas, vectors, channels): Σx and Σx² forward,
                Σdy and Σdy·(x-mean) backward.
            key: None for the layer's next forward round; for a backward round the forward aggregate's `key` with
                a phase that no earlier round of the same call had.
            phase: the phase of a forward round, see `Transport.run_slave`.

        Returns:
            The aggregate; its values have shape (vectors, channels).

        Raises:
            StatsdBNError: the round failed; the text has the reason. Most of these errors are RoundFailed.
        """
        with self.connection.round(self.layer, key, self.group, phase) as round_:
            return self.connection.over_server(round_.session, round_.key, contribution)

    @property
    def rank(self) -> int:
        """This process's number among the members that an aggregate lists."""
        return self.connection.rank

    def places(self) -> Mapping[int, str]:
        """Query the server for the host and process ID of the job's members, by number; empty if it does not answer."""
        connection = self.connection
        if connection.rank >= MAX_QUERYING_RANKS or connection.closed:
            return {}
        try:
            with connection.channel_pool.channel() as channel:
                return query_places(channel, connection.member.job)
        except StatsdBNError as error:
            logger.debug("cannot ask the server which hosts the ranks run on: %s", error)
            return {}

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Key of a round of an earlier call."""
        member, group = self.connection.member, self.connection.group(self.group)
        return RoundKey(member.job, group.name, member.epoch, step, self.layer, call, phase)


def query_places(channel: Channel, job: str) -> dict[int, str]:
    """Query the server's status for the place of each member of a job, by number, for `PLACES_SECONDS` at most."""
    expiry = monotonic() + PLACES_SECONDS
    while (seconds := expiry - monotonic()) > 0:
        channel.send(encode(StatusRequest()))
        if (frame := channel.receive(seconds)) is None:  # a timeout, or a reconnect: send again
            continue
        match decode(frame):
            case Status(report):
                return places_in_report(report, job)
            case Failure(key=None, message=message):
                raise ProtocolError(f"expected a status, got {message}")
    raise ServerUnreachable(f"no status within {PLACES_SECONDS:.0f} s")


def places_in_report(report: dict[str, Any], job: str) -> dict[int, str]:
    """Places of a job's members in a status report: present members, and members that its non-finite texts name."""
    found: dict[int, str] = {}
    for group in _items(report.get("groups"), dict):
        if group.get("job") == job and group.get("group") == WORLD:
            for text in _items(group.get("non_finite"), str):
                found.update(parse_places(text))
            members = _items(group.get("members"), dict)
            found.update((each["member"], str(each["place"])) for each in members if {"member", "place"} <= each.keys())
    return {member: escape(place) for member, place in found.items()}


def _items(value: object, kind: type) -> list[Any]:
    """Items of this type in a list; empty if the value is not a list."""
    return [each for each in value if isinstance(each, kind)] if isinstance(value, list) else []
