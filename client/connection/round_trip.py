"""One round trip: rows go to the master, and go again until the answer is there.

The master may be killed and restarted meanwhile, and the network may lose what was under way. What was sent can be
sent again without harm: a contribution is known by its key, and the first bytes count.
"""

import logging
import random
import time

from client.connection.session import Session
from client.connection.transport import Channel
from statsd_bn.errors import RoundTimeout, UnknownSession
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.text import plain

logger = logging.getLogger("statsd_bn.client")

# The master ends a late round itself and says who is missing; only if nothing comes this long after that, the
# member gives up on the master.
GRACE_SECONDS = 5.0

# When to ask again: soon, then less and less often. An undisturbed round is over long before.
ASK_AGAIN_SECONDS = 1.0
ASK_AGAIN_AT_MOST = 3.0

# From when on, and then in growing intervals, a wait is worth a warning.
WARN_SECONDS = 10.0


class RoundTrip:
    """One exchange with the master.

    Args:
        session: who speaks.
        endpoint: where the master is, for people.
        key: of the round.
        rows: what to contribute.
    """

    def __init__(self, session: Session, endpoint: str, key: RoundKey, rows: Rows) -> None:
        self._session = session
        self._endpoint = endpoint
        self._key = key
        self._rows = rows
        self._attempt = 0
        self._started = self._heard = time.monotonic()
        self._next_warning = WARN_SECONDS
        self._told = ""

    def run(self, channel: Channel, frame: bytes) -> Aggregate:
        """Sends `frame`, the contribution, and returns the aggregate.

        Raises:
            StatsdBNError: the round failed, with the reason.
        """
        channel.send(frame)
        self._session.spoke = self._started
        expiry = self._started + self._session.member.deadline + GRACE_SECONDS
        while (left := expiry - time.monotonic()) > 0:
            answer = channel.receive(min(left, self._patience()))
            aggregate = None if answer is None else self._read(answer, channel)
            if aggregate is not None:
                return aggregate
            if answer is None:
                self._ask_again(channel)
        raise self._timeout()

    def _patience(self) -> float:
        growing = min(ASK_AGAIN_SECONDS * (1 + self._attempt), ASK_AGAIN_AT_MOST)
        return growing * (0.9 + 0.2 * random.random())  # noqa: S311 - so that members do not ask in step

    def _read(self, frame: bytes, channel: Channel) -> Aggregate | None:
        self._heard = time.monotonic()
        before = self._session.members
        try:
            answer = self._session.answer(self._key, frame)
        except UnknownSession:
            self._introduce(channel)
            return None
        if isinstance(answer, Aggregate):
            self._tell_changes(before, answer)
            return answer
        if answer is not None:
            self._told = answer.message
            self._warn(answer.seconds, plain(answer.message))
        return None

    def _tell_changes(self, before: Members, answer: Aggregate) -> None:
        """Nothing is dropped silently; in a strict group only members whose data has ended come and go."""
        if self._session.member.is_elastic and answer.members != before:
            logger.warning("%s: from now on members %s, not %s", answer.key, answer.members, before)

    def _introduce(self, channel: Channel) -> None:
        logger.info("the master at %s has been restarted; taking part again", self._endpoint)
        for frame in self._session.introduction():
            channel.send(frame)
        self._ask_again(channel)

    def _ask_again(self, channel: Channel) -> None:
        silent = time.monotonic() - self._heard
        self._warn(silent, f"{self._key}: the master at {self._endpoint} has not answered for {silent:.0f} s")
        self._attempt += 1
        channel.send(self._session.contribution(self._key, self._rows, self._attempt))
        self._session.spoke = time.monotonic()

    def _warn(self, seconds: float, text: str) -> None:
        if seconds >= self._next_warning:
            self._next_warning = seconds * 2
            logger.warning("%s", text)

    def _timeout(self) -> RoundTimeout:
        seconds = self._session.member.deadline + GRACE_SECONDS
        # A restarted master counts the round's time anew, so it may have had no reason to end it yet.
        reason = f"; the latest was: {self._told}" if self._told else ""
        return RoundTimeout(
            f"{self._key}: no aggregate from the master at {self._endpoint} within {seconds:g} s{reason}",
            **self._key.fields,
            seconds=seconds,
        )
