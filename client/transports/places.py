"""Places: where the other ranks of a job run, for a text that names one.

A member knows the others by number only. The server knows host and process of each, and is asked for its status when
there is something to say of one, once in a run. A text without that is better than none, so nobody insists.
"""

import logging
from typing import Any

from client.session.channel_pool import run_machine
from client.session.connection import Connection
from client.session.protocol.member import Member
from client.session.protocol.session import Turn
from statsd_bn.errors import ProtocolError, ServerUnreachable, StatsdBNError
from statsd_bn.members import places_in
from statsd_bn.messages import WORLD, Failure, Status, StatusRequest
from statsd_bn.text import plain
from statsd_bn.wire import decode, encode

logger = logging.getLogger("statsd_bn.client")

# How long an answer may take.
SECONDS = 1.0

# All ranks have the same to say at the same time, and the status of a large job is long: this many ask.
MOST_ASKING = 64


class Asking:
    """A `Machine` whose result is where the members of a job run, by number.

    Args:
        who: this process.
    """

    def __init__(self, who: Member) -> None:
        self._who = who
        self._frame = encode(StatusRequest())
        self._until = 0.0

    def begin(self, now: float) -> Turn[dict[int, str]]:
        """Asks."""
        self._until = now + SECONDS
        return (self._frame,), self._until, None

    def step(self, now: float, frame: bytes | None) -> Turn[dict[int, str]]:
        """Reads the answer; asks again over a new connection.

        Raises:
            ServerUnreachable: none has come in time.
            ProtocolError: it makes no sense, or the server does not give it.
        """
        answer = decode(frame) if frame is not None else None
        if isinstance(answer, Status):
            return (), now, of_job(answer.report, self._who.job)
        if isinstance(answer, Failure) and answer.key is None:
            raise ProtocolError(f"expected a status, got {answer.message}")
        if now >= self._until:
            raise ServerUnreachable(f"no status within {SECONDS:.0f} s")
        return (self._frame,) if frame is None else (), self._until, None


def places(connection: Connection) -> dict[int, str]:
    """Returns host and process of the members of a connection's job, by number; of none if the server does not say."""
    if connection.rank >= MOST_ASKING or connection.closed:
        return {}
    try:
        with connection.channel_pool.channel() as channel:
            return run_machine(Asking(connection.member), channel)
    except StatsdBNError as error:
        logger.debug("where the other ranks run is not known: %s", error)
        return {}


def of_job(report: dict[str, Any], job: str) -> dict[int, str]:
    """Returns what a status report says of a job's members: of those that are there, and of others that it names."""
    found: dict[int, str] = {}
    for group in _maps(report.get("groups")):
        if group.get("job") == job and group.get("group") == WORLD:
            for text in _listed(group.get("non_finite")):
                found.update(places_in(str(text)))
            members = _maps(group.get("members"))
            found.update((each["member"], str(each["place"])) for each in members if {"member", "place"} <= each.keys())
    return {member: plain(place) for member, place in found.items()}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _maps(value: object) -> list[dict[str, Any]]:
    return [each for each in _listed(value) if isinstance(each, dict)]
