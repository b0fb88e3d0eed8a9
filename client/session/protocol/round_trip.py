"""One round trip: rows go to the server, and go again until the answer is there.

The server may be killed and restarted meanwhile, and the network may lose what was under way. What was sent can be
sent again without harm: a contribution is known by its key, and the first bytes count.
"""

import logging
import random
from collections.abc import Callable, Sequence

from client.session.protocol.session import Session, Turn
from statsd_bn.error_text import error_text
from statsd_bn.errors import MasterStopped, ProtocolError, RoundTimeout, UnknownSession
from statsd_bn.members import Members, ranks_in_words
from statsd_bn.messages import Aggregate, Pending
from statsd_bn.reduction import Rows
from statsd_bn.round_key import GATHER, RoundKey
from statsd_bn.text import plain

logger = logging.getLogger("statsd_bn.client")

# The server ends a late round itself and says who is missing; only if nothing comes this long after that, the
# member gives up on the server.
GRACE_SECONDS = 5.0

# When to ask again: soon, then less and less often. An undisturbed round is over long before.
ASK_AGAIN_SECONDS = 1.0
ASK_AGAIN_AT_MOST = 3.0

# Warn after a wait of this length, then at doubling intervals. The first warning comes earlier if it can say where the
# late member is: then it helps, and is not only a complaint about a slow step.
WARN_SECONDS = 10.0
WARN_WITH_PLACE_SECONDS = 2.0


class RoundTrip:
    """One exchange with the server, a `Machine` whose result is the aggregate.

    Args:
        frame: the contribution of the rows, encoded.
        chance: returns a number from 0 to 1, so that members do not ask in step.

    Attributes:
        late: returns the ranks that are known here not to have come, where the round is one in memory too.
        is_gone: returns whether there can be no server any more.
    """

    def __init__(
        self,
        session: Session,
        endpoint: str,
        key: RoundKey,
        rows: Rows,
        frame: bytes,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._session = session
        self._endpoint = endpoint
        self._key = key
        self._rows = rows
        self._frame = frame
        self._chance = chance
        self._attempt = 0
        self._expiry = 0.0
        self._next_warning = WARN_SECONDS
        self._told = ""
        self.late: Callable[[], Sequence[int]] = tuple
        self.is_gone: Callable[[], bool] = bool
        self._settled = b""

    def begin(self, now: float) -> Turn[Aggregate]:
        """Sends the contribution; again, if it has begun before, on another channel."""
        if self._expiry:
            return self._wait(now, self._ask_again(now))
        self._heard = self._session.spoke = now
        self._expiry = now + self._session.member.round_timeout + GRACE_SECONDS
        return self._wait(now, self._with_settled(self._frame))

    def step(self, now: float, frame: bytes | None) -> Turn[Aggregate]:
        """Reads a frame; without one, asks again.

        Raises:
            MasterStopped: there is no server, and there can be none.
            StatsdBNError: the round failed, with the reason.
        """
        frames: Sequence[bytes] = ()
        if frame is not None:
            self._heard = now
            try:
                if (aggregate := self._read(frame)) is not None:
                    self._session.last_settled.was_heard(self._settled)
                    return (), now, aggregate
            except UnknownSession:
                frames = self._introduction(now)
        if now >= self._expiry:
            raise self._timeout()
        return self._wait(now, frames if frame is not None else self._ask_again(now))

    def _wait(self, now: float, frames: Sequence[bytes]) -> Turn[Aggregate]:
        seconds = min(ASK_AGAIN_SECONDS * (1 + self._attempt), ASK_AGAIN_AT_MOST) * (0.9 + 0.2 * self._chance())
        return frames, min(now + seconds, self._expiry), None

    def _read(self, frame: bytes) -> Aggregate | None:
        before = self._session.members
        answer = self._session.answer(self._key, frame)
        if isinstance(answer, Aggregate):
            self._tell_changes(before, answer)
            shape = self._rows.values.shape[1:]
            if answer.values.shape != shape and self._key.phase != GATHER:
                raise ProtocolError(f"{answer.key}: expected an aggregate of shape {shape}, got {answer.values.shape}")
            return answer
        if answer is not None:
            self._take_news(answer)
        return None

    def _take_news(self, answer: Pending) -> None:
        self._told = f"{answer.message}; {answer.stacks}" if answer.stacks else answer.message
        is_early = bool(answer.stacks) and self._next_warning == WARN_SECONDS
        self._warn(answer.seconds, plain(self._told), WARN_WITH_PLACE_SECONDS if is_early else self._next_warning)

    def _tell_changes(self, before: Members, answer: Aggregate) -> None:
        """Nothing is dropped silently; in a strict group only members whose data has ended come and go."""
        if self._session.member.is_elastic and answer.members != before:
            logger.warning("%s: from now on ranks %s, before ranks %s", answer.key, answer.members, before)

    def _introduction(self, now: float) -> list[bytes]:
        logger.info("the server at %s has been restarted; taking part again", self._endpoint)
        return [*self._session.introduction(), *self._ask_again(now)]

    def _with_settled(self, contribution: bytes) -> Sequence[bytes]:
        """Returns a contribution, behind the last RoundDone of this process where the server may not have that."""
        self._settled = self._session.last_settled.frame
        return (self._settled, contribution) if self._settled else (contribution,)

    def _ask_again(self, now: float) -> Sequence[bytes]:
        if (silent := now - self._heard) >= self._next_warning:
            if self.is_gone():
                raise self._stopped()
            self._warn(silent, self._about_silence(now, silent), self._next_warning)
        self._attempt += 1
        self._session.spoke = now
        return self._with_settled(self._session.contribution(self._key, self._rows, self._attempt))

    def _about_silence(self, now: float, seconds: float) -> str:
        left = max(0.0, self._expiry - now)
        late = Members.of(self.late())
        return (
            f"{self._key}: the server at {self._endpoint} has not answered for {seconds:.0f} s; waiting for it, or for "
            f"another one there, for {left:.0f} s more"
        ) + (f". In shared memory the round waits for {ranks_in_words(late)}" if late else "")

    def _warn(self, seconds: float, text: str, least: float) -> None:
        if seconds >= least:
            self._next_warning = 2 * seconds
            logger.warning("%s", text)

    def _stopped(self) -> MasterStopped:
        return MasterStopped(
            error_text(
                f"the server has ended with the process that had started it; it was at {self._endpoint}",
                where=str(self._key),
                advice="Look at the logs of the other ranks: they may have taken this one for lost.",
            )
        )

    def _timeout(self) -> RoundTimeout:
        seconds = self._session.member.round_timeout + GRACE_SECONDS
        # A restarted server counts the round's time anew, so it may have had no reason to end it yet.
        reason = f"the latest was: {self._told}" if self._told else ""
        return RoundTimeout(
            error_text(
                f"no aggregate from the server at {self._endpoint} within {seconds:g} s",
                where=str(self._key),
                advice=reason,
            ),
            **self._key.fields,
            seconds=seconds,
        )
