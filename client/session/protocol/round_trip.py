"""RoundTrip: one round over the server; it survives lost frames and a restart of the server.

Repeating a contribution is harmless: the server knows it by its key, and keeps the rows that came first.
"""

import logging
import random
from collections.abc import Callable, Sequence

from client.session.protocol.session import Actions, Session
from statsd_bn.errors import MasterStopped, ProtocolError, RoundTimeout, UnknownSession
from statsd_bn.members import Members, format_ranks
from statsd_bn.messages import Aggregate, Pending
from statsd_bn.reduction import Rows
from statsd_bn.round_key import GATHER, RoundKey
from statsd_bn.text import error_text, escape

logger = logging.getLogger("statsd_bn.client")

# The server itself ends a late round and names the missing ranks. The member gives up if no aggregate has arrived this
# long after the round's timeout.
GRACE_SECONDS = 5.0

# Delay of the first retry, and the longest delay. An undisturbed round ends long before.
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 3.0

# Warn after a wait of this length, then at doubling intervals. If the late member's stack is known, the first warning
# comes earlier, because it shows where that member is.
WARN_SECONDS = 10.0
WARN_WITH_STACK_SECONDS = 2.0


class RoundTrip:
    """A `StateMachine` for one round over the server; its result is the aggregate."""

    def __init__(
        self, session: Session, endpoint: str, key: RoundKey, rows: Rows, chance: Callable[[], float] = random.random
    ) -> None:
        self._session = session
        self._endpoint = endpoint
        self._key = key
        self._rows = rows
        self._chance = chance
        self._attempt = 0
        self._expiry = 0.0
        self._next_warning = WARN_SECONDS
        self._latest_news = ""
        self._round_done = b""
        self.late: Callable[[], Sequence[int]] = tuple  # ranks late in shared memory, if the round runs there too
        self.is_gone: Callable[[], bool] = bool  # whether no server can start at the endpoint any more

    def begin(self, now: float) -> Actions[Aggregate]:
        """Send the contribution; a second call sends it again, on another channel."""
        if self._expiry:
            return self._wait(now, self._retry(now))
        self._last_received = self._session.last_sent = now
        self._expiry = now + self._session.member.round_timeout + GRACE_SECONDS
        return self._wait(now, self._contribution())

    def step(self, now: float, frame: bytes | None) -> Actions[Aggregate]:
        """Handle a frame; without one, send the contribution again."""
        frames: Sequence[bytes] = ()
        if frame is not None:
            self._last_received = now
            try:
                if (aggregate := self._read(frame)) is not None:
                    self._session.last_round_done.acknowledge(self._round_done)
                    return (), now, aggregate
            except UnknownSession:
                frames = self._resync(now)
        if now >= self._expiry:
            raise self._timeout()
        return self._wait(now, frames if frame is not None else self._retry(now))

    def _wait(self, now: float, frames: Sequence[bytes]) -> Actions[Aggregate]:
        seconds = min(RETRY_SECONDS * (1 + self._attempt), MAX_RETRY_SECONDS) * (0.9 + 0.2 * self._chance())
        return frames, min(now + seconds, self._expiry), None

    def _read(self, frame: bytes) -> Aggregate | None:
        before = self._session.members
        answer = self._session.answer(self._key, frame)
        if isinstance(answer, Pending):
            self._report(answer)
        if not isinstance(answer, Aggregate):
            return None
        # A strict group changes only when members pause and rejoin: no warning.
        if self._session.member.is_elastic and answer.members != before:
            logger.warning(
                "%s: membership changed: ranks %s take part, ranks %s did before", self._key, answer.members, before
            )
        shape = self._rows.values.shape[1:]
        if answer.values.shape != shape and self._key.phase != GATHER:
            raise ProtocolError(f"{answer.key}: expected an aggregate of shape {shape}, got {answer.values.shape}")
        return answer

    def _report(self, answer: Pending) -> None:
        self._latest_news = f"{answer.message}; {answer.stacks}" if answer.stacks else answer.message
        is_early = bool(answer.stacks) and self._next_warning == WARN_SECONDS
        after = WARN_WITH_STACK_SECONDS if is_early else self._next_warning
        self._warn(answer.seconds, escape(self._latest_news), after)

    def _resync(self, now: float) -> list[bytes]:
        logger.info("the server at %s has been restarted; this rank registers again", self._endpoint)
        return [*self._session.resync_frames(), *self._retry(now)]

    def _contribution(self) -> Sequence[bytes]:
        """The contribution, after the latest RoundDone if no aggregate has acknowledged that yet."""
        contribution = self._session.contribution(self._key, self._rows, self._attempt)
        self._round_done = self._session.last_round_done.frame
        return (self._round_done, contribution) if self._round_done else (contribution,)

    def _retry(self, now: float) -> Sequence[bytes]:
        if (silent := now - self._last_received) >= self._next_warning:
            if self.is_gone():
                what = f"the server at {self._endpoint} stopped, because the process that started it has ended"
                advice = "Check the other ranks' logs: they may have reported this rank lost."
                raise MasterStopped(error_text(what, where=str(self._key), advice=advice))
            self._warn(silent, self._silence_warning(now, silent), self._next_warning)
        self._attempt += 1
        self._session.last_sent = now
        return self._contribution()

    def _silence_warning(self, now: float, seconds: float) -> str:
        left = max(0.0, self._expiry - now)
        late = Members.of(self.late())
        return (
            f"{self._key}: the server at {self._endpoint} has not answered for {seconds:.0f} s; waiting for it, or for "
            f"another one there, for {left:.0f} s more"
        ) + (f". In shared memory the round waits for {format_ranks(late)}" if late else "")

    def _warn(self, seconds: float, text: str, after: float) -> None:
        if seconds >= after:
            self._next_warning = 2 * seconds
            logger.warning("%s", text)

    def _timeout(self) -> RoundTimeout:
        seconds = self._session.member.round_timeout + GRACE_SECONDS
        # A restarted server measures the round's timeout anew, so it may not have ended the round yet.
        what = f"no aggregate from the server at {self._endpoint} within {seconds:g} s"
        advice = f"last report: {self._latest_news}" if self._latest_news else ""
        return RoundTimeout(error_text(what, where=str(self._key), advice=advice), **self._key.fields, seconds=seconds)
