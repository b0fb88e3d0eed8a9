"""Pulse: which silent sessions say now that this process is alive, pure.

A session that takes part in rounds is heard by that, and needs no heartbeat.
"""

from collections.abc import Iterable

from client.connection.session import Session
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Question


class Pulse:
    """The heartbeats of one process over one connection, which it does not have itself."""

    def __init__(self) -> None:
        # Who has spoken over this connection, and so made it known to the master.
        self._introduced: set[bytes] = set()

    def connected_anew(self) -> None:
        """The connection is another one, over which nobody has spoken."""
        self._introduced.clear()

    def pause(self, now: float, sessions: Iterable[Session]) -> float:
        """Returns how many seconds there are until the next heartbeat is due, if nothing is said until then."""
        spoken = min((session.spoke for session in _known(sessions)), default=now)
        return limits.HEARTBEAT_SECONDS - (now - spoken)

    def due(self, now: float, sessions: Iterable[Session]) -> list[Session]:
        """Returns the sessions that must send a heartbeat now; one that cannot be sent waits for its next time."""
        due = [
            session
            for session in _known(sessions)
            if now - session.spoke >= limits.HEARTBEAT_SECONDS or session.token not in self._introduced
        ]
        for session in due:
            session.spoke = now
        return due

    def sent(self, session: Session) -> None:
        """The heartbeat of a session has left."""
        self._introduced.add(session.token)

    @staticmethod
    def overhear(frame: bytes, sessions: Iterable[Session]) -> list[bytes]:
        """Returns the replies to a frame that came over this connection.

        A member that is between two rounds returns to a restarted master from here, so that nobody waits for it.
        """
        return [reply for session in _known(sessions) for reply in session.overhear(frame)]

    @staticmethod
    def asked(frame: bytes, sessions: Iterable[Session]) -> tuple[Session, Question] | None:
        """Returns the question in a frame, and the session that it is for; None if the frame asks nothing."""
        for session in _known(sessions):
            if question := session.asked(frame):
                return session, question
        return None

    @staticmethod
    def news(frame: bytes, sessions: Iterable[Session]) -> StatsdBNError | None:
        """Returns why the strict job is broken, if a frame says so."""
        return next((news for session in _known(sessions) if (news := session.news(frame))), None)


def _known(sessions: Iterable[Session]) -> list[Session]:
    return [session for session in sessions if session.is_known]
