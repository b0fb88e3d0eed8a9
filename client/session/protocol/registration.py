"""Registration: registers a session with its group and waits until the group is open."""

import logging

from client.session.protocol.session import Actions, Session
from statsd_bn.endpoints import format_no_answer
from statsd_bn.errors import DuplicateMember, GroupIncomplete, ServerUnreachable, StatsdBNError
from statsd_bn.messages import WORLD, Participation, Registered, format_missing_members
from statsd_bn.text import error_summary, error_text, strip_traceback

logger = logging.getLogger("statsd_bn.client")

# Timeout of an answer, and the pause between two requests while members are missing. A server answers a registration
# in milliseconds; a loaded network may take seconds.
ANSWER_SECONDS = 5.0
RETRY_SECONDS = 1.0  # pause before a request is repeated, in case it or its answer was lost
WARN_SECONDS = 10.0  # first warning; further ones at doubling intervals

# How long, and how often, to retry while an earlier process holds this rank: the server detects within a second that a
# killed process has ended.
DUPLICATE_SECONDS = 1.0
DUPLICATE_RETRY_SECONDS = 0.1


def cause_of(error: BaseException | None) -> str:
    """Text about an exception for the other members; of our own errors only class and first line."""
    if error is None:
        return ""
    if isinstance(error, StatsdBNError):
        return error_summary(error)
    if isinstance(error, KeyboardInterrupt):
        return "KeyboardInterrupt (Ctrl-C)"
    return f"{type(error).__name__}: {strip_traceback(str(error))}".removesuffix(": ")


NOT_CONNECTED = "Check the missing ranks' logs: did they start, with the same endpoint and job name?"
NOT_BACK = (
    "The missing ranks are still in client.join, or begin no further pass, step or gather after it. A "
    "DistributedDataParallel model also needs torch's Join: `with Join([ddp]), client.join(ddp):`."
)


class Registration:
    """A `StateMachine` that registers a session; its result is the server's answer that the group is open."""

    # It waits for the other members, `timeout` seconds at most. It repeats its request: every second without an answer,
    # every 5 s while members are missing, and every 0.1 s while an earlier process may still hold its rank.

    def __init__(self, session: Session, endpoint: str, timeout: float) -> None:
        self._session = session
        self._endpoint = endpoint
        self._timeout = timeout
        self._next_warning = WARN_SECONDS
        self._is_asking = False
        self._expiry: float | None = None  # of the answer; None: the next request sets it

    def begin(self, now: float) -> Actions[Registered]:
        """Send the first request."""
        self._started = now
        return self._ask(now, ANSWER_SECONDS)

    def step(self, now: float, frame: bytes | None) -> Actions[Registered]:
        """Handle a frame; without one, send the request again."""
        try:
            answer = None if frame is None else self._session.registered(frame)
        except DuplicateMember:
            if not self._is_asking or now >= self._duplicate_expiry:
                raise
            self._expiry = None
            return self._wait(now + DUPLICATE_RETRY_SECONDS)
        if answer is not None:
            return self._handle(now, answer)
        if frame is not None and now < self._due:
            return (), self._due, None
        if self._is_asking:
            return self._request(now)
        # Wait for the answer for all the time that is left, but at least ANSWER_SECONDS.
        return self._ask(now, max(ANSWER_SECONDS, self._started + self._timeout - now))

    def _ask(self, now: float, seconds: float) -> Actions[Registered]:
        self._is_asking = True
        self._answer_timeout = seconds
        self._duplicate_expiry = now + DUPLICATE_SECONDS
        self._expiry = None
        return self._request(now)

    def _request(self, now: float) -> Actions[Registered]:
        if self._expiry is None:
            self._expiry = now + self._answer_timeout
        if now >= self._expiry:
            endpoint, seconds = self._endpoint, self._answer_timeout
            raise ServerUnreachable(format_no_answer(endpoint, seconds), endpoint=endpoint, seconds=seconds)
        self._session.last_sent = now
        return self._wait(min(now + RETRY_SECONDS, self._expiry), self._session.register())

    def _handle(self, now: float, answer: Registered) -> Actions[Registered]:
        if not answer.missing:
            return (), now, answer
        waited = now - self._started
        member = self._session.member
        is_rejoining = self._session.participation is Participation.REJOINING
        what, advice = ("come back from client.join", NOT_BACK) if is_rejoining else ("connect", NOT_CONNECTED)
        missing = format_missing_members(member.group, member.world_size, answer.present, answer.missing)
        where = f"job {member.job!r}, group {member.group!r}"
        if waited >= self._timeout:
            size, present = member.world_size, list(answer.present)
            fields = {"job": member.job, "group": member.group, "size": size, "present": present}
            if member.group == WORLD:
                fields["missing"] = sorted(set(range(size)).difference(present))
            text = f"{missing} did not {what} within {self._timeout:g} s"
            where += f" of {size}"
            raise GroupIncomplete(error_text(text, where=where, advice=advice), **fields)
        if waited >= self._next_warning:
            self._next_warning = 2 * waited
            logger.warning("%s: waited %.0f s for %s to %s", where, waited, missing, what)
        self._is_asking = False
        return self._wait(now + min(ANSWER_SECONDS, self._timeout - waited))

    def _wait(self, due: float, *frames: bytes) -> Actions[Registered]:
        self._due = due
        return frames, due, None
