"""Registration: a session asks to belong to its group, and waits until the group is open."""

import logging

from client.session.protocol.member import Member
from client.session.protocol.session import Session, Turn
from statsd_bn.endpoints import silent
from statsd_bn.error_text import error_text, in_brief, without_traceback
from statsd_bn.errors import DuplicateMember, GroupIncomplete, ServerUnreachable, StatsdBNError
from statsd_bn.messages import WORLD, Participation, Registered, missing_members

logger = logging.getLogger("statsd_bn.client")

# A server that is there answers a registration in milliseconds; a loaded network may take seconds.
ANSWER_SECONDS = 5.0

# Asking again sooner than that finds an answer that was lost, or a group that has opened.
ASK_AGAIN_SECONDS = 1.0

# Warn after a wait of this length, then at doubling intervals.
WARN_SECONDS = 10.0

# A server notices within a second that a killed process has ended, so asking again helps.
TAKEN_SECONDS = 1.0
TAKEN_PAUSE_SECONDS = 0.1


def cause_of(error: BaseException | None) -> str:
    """Returns what the other members are told about an exception; empty for none.

    Of an error of ours they know the rest already, since it concerns them all.
    """
    if error is None:
        return ""
    if isinstance(error, StatsdBNError):
        return in_brief(error)
    if isinstance(error, KeyboardInterrupt):
        return "KeyboardInterrupt (Ctrl-C)"
    return f"{type(error).__name__}: {without_traceback(str(error))}".removesuffix(": ")


NOT_CONNECTED = "Look at the logs of the missing ranks: did they start, with the same endpoint and job name?"
NOT_BACK = (
    "They are still in their pass, or do nothing that all ranks do behind it. DistributedDataParallel needs torch's "
    "Join around ours: `with Join([ddp]), client.join(ddp):`."
)


class Registration:
    """A `Machine` whose result is the answer that says that the group is open.

    It asks until there is an answer. While members are missing it listens for the news that they have come, and asks
    again now and then. While an earlier process may still hold its number, it pauses and asks again.

    Args:
        timeout: how long the other members may take, in seconds.
    """

    def __init__(self, session: Session, endpoint: str, timeout: float) -> None:
        self._session = session
        self._endpoint = endpoint
        self._timeout = timeout
        self._next_warning = WARN_SECONDS
        self._is_asking = False
        self._is_pausing = False

    def begin(self, now: float) -> Turn[Registered]:
        """Asks for the first time."""
        self._started = now
        return self._ask(now, ANSWER_SECONDS)

    def step(self, now: float, frame: bytes | None) -> Turn[Registered]:
        """Reads a frame; without one, asks again.

        Raises:
            ServerUnreachable: nobody answers at the endpoint.
            RegistrationRefused: the server does not take this member, or the group did not fill in time.
            ReplicaLost: the group is broken.
        """
        try:
            answer = None if frame is None else self._session.registered(frame)
        except DuplicateMember:
            if not self._is_asking or now >= self._taken_until:
                raise
            return self._pause(now)
        if answer is not None:
            return self._take(now, answer)
        if frame is not None and now < self._due:
            return (), self._due, None
        return self._go_on(now)

    def _go_on(self, now: float) -> Turn[Registered]:
        """The time to wait for an answer, for the others, or for an earlier process is over."""
        if self._is_pausing:
            return self._ask_anew(now)
        if self._is_asking:
            return self._ask_again(now)
        # However little is left, a server that is there has its time to answer.
        return self._ask(now, max(ANSWER_SECONDS, self._started + self._timeout - now))

    def _ask(self, now: float, seconds: float) -> Turn[Registered]:
        self._is_asking = True
        self._answer_within = seconds
        self._taken_until = now + TAKEN_SECONDS
        return self._ask_anew(now)

    def _ask_anew(self, now: float) -> Turn[Registered]:
        self._is_pausing = False
        self._expiry = now + self._answer_within
        return self._ask_again(now)

    def _ask_again(self, now: float) -> Turn[Registered]:
        if now >= self._expiry:
            raise ServerUnreachable(
                silent(self._endpoint, self._answer_within),
                endpoint=self._endpoint,
                seconds=self._answer_within,
            )
        self._session.spoke = now
        return self._wait(min(now + ASK_AGAIN_SECONDS, self._expiry), self._session.register())

    def _pause(self, now: float) -> Turn[Registered]:
        self._is_pausing = True
        return self._wait(now + TAKEN_PAUSE_SECONDS)

    def _take(self, now: float, answer: Registered) -> Turn[Registered]:
        if not answer.missing:
            return (), now, answer
        waited = now - self._started
        who = self._session.member
        if waited >= self._timeout:
            raise _incomplete(self._session, answer, self._timeout)
        if waited >= self._next_warning:
            self._next_warning = 2 * waited
            name, awaited = f"job {who.job!r}, group {who.group!r}", _awaited(who, answer)
            what = "come back from client.join" if self._session.participation is Participation.REJOINING else "connect"
            logger.warning("%s: has waited %.0f s for %s to %s", name, waited, awaited, what)
        self._is_asking = self._is_pausing = False
        return self._wait(now + min(ANSWER_SECONDS, self._timeout - waited))

    def _wait(self, due: float, *frames: bytes) -> Turn[Registered]:
        self._due = due
        return frames, due, None


def _incomplete(session: Session, answer: Registered, timeout: float) -> GroupIncomplete:
    who = session.member
    what, advice = ("did not connect", NOT_CONNECTED)
    if session.participation is Participation.REJOINING:
        what, advice = ("did not come back from client.join", NOT_BACK)
    fields = {"job": who.job, "group": who.group, "size": who.world_size, "present": list(answer.present)}
    if who.group == WORLD:
        fields["missing"] = sorted(set(range(who.world_size)).difference(answer.present))
    return GroupIncomplete(
        error_text(
            f"{_awaited(who, answer)} {what} within {timeout:g} s",
            where=f"job {who.job!r}, group {who.group!r} of {who.world_size}",
            advice=advice,
        ),
        **fields,
    )


def _awaited(who: Member, answer: Registered) -> str:
    return missing_members(who.group, who.world_size, answer.present, answer.missing)
