"""WatchedRound: a round over torch's process group, of which the server hears once it takes longer than a moment.

It is with such a round as with one in memory, see `client.transports.round_in_memory`: the rows go to the server as
well, which says who is late and where, who is lost, and who has come to another round. The sum is the process group's.
"""

from datetime import timedelta
from time import monotonic
from typing import Any

from client.diagnostics import collectives
from client.diagnostics.broken_job import CAUSE_SECONDS
from client.session.connection import Connection
from client.transports.round_in_memory import ESCALATE_SECONDS, LISTEN_SECONDS
from statsd_bn.errors import StatsdBNError
from statsd_bn.reduction import Rows
from statsd_bn.round_key import RoundKey

# A rank that has left in good order has sent its rows, which may come later than the news.
LAST_SECONDS = 0.5


class WatchedRound:
    """A round of a job whose server watches it, behind the round `before`.

    Attributes:
        is_counted: whether the server has completed the round itself, and counts it.
    """

    def __init__(self, connection: Connection, key: RoundKey, rows: Rows, before: RoundKey | None) -> None:
        self._connection = connection
        self._key = key
        self._rows = rows
        self._before = before
        self.is_counted = False

    def wait(self, work: Any) -> None:
        """Waits for a collective of the round, on the host.

        Raises:
            StatsdBNError: the round failed, with the reason.
            RuntimeError: torch's, and the server does not know why.
        """
        try:
            if not _is_done(work, ESCALATE_SECONDS):
                self._listen(work)
        except RuntimeError as error:  # as when a rank is killed, which the server knows a moment later
            self._connection.check_whole(error, CAUSE_SECONDS)
            raise
        except StatsdBNError:
            if not _is_done(work, LAST_SECONDS):
                collectives.abandoned.set()
                raise

    def _listen(self, work: Any) -> None:
        connection, session = self._connection, self._connection.session(None)
        if self._before:  # one that has just got through it, but is asleep, may not have said so
            session.settled(self._before)
        trip = connection.round_trip(session, self._key, self._rows)
        with connection.channel_pool.channel() as channel:
            frames, due, found = trip.begin(monotonic())
            while True:
                for frame in frames:
                    channel.send(frame)
                if _is_done(work, LISTEN_SECONDS):
                    break
                connection.check_whole()
                frames, answer = (), None if found else channel.look()
                if found is None and (answer is not None or monotonic() >= due):
                    frames, due, found = trip.step(monotonic(), answer)
            self.is_counted = found is not None
            channel.send(session.settled(self._key))


def _is_done(work: Any, seconds: float) -> bool:
    """Waits for so long at most; raises torch's error if the collective has failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises the error again, unless it was that of a wait that ended a moment too early
    return True
