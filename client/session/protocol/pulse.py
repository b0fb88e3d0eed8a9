"""Pulse: which silent sessions say now that this process is alive, pure.

A session that takes part in rounds is heard by that, and needs no heartbeat. Where rows pass the server by it needs one
all the same, because that says how many rounds they have had, and how long the member has waited.
"""

from collections.abc import Iterable
from math import inf

from client.session.protocol.member import OVER_PROCESS_GROUP
from client.session.protocol.session import Session
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import StackRequest

# How long the server may be away before ranks that do not need it for their rounds are told.
AWAY_SECONDS = 10.0

# How long after a job has opened a layer should have begun a round. Loading data and compiling come before it.
UNUSED_SECONDS = 60.0


class Pulse:
    """The heartbeats of one process over one connection, which it does not have itself."""

    def __init__(self) -> None:
        # Who has spoken over this connection, and so made it known to the server; and which transport each has told it.
        self._told: dict[bytes, str] = {}
        self._telling: dict[bytes, str] = {}
        self._returned: set[bytes] = set()
        self._beaten: dict[bytes, float] = {}
        # Since when no heartbeat could leave, and whether that was told.
        self._away_since: float | None = None
        self._is_away_told = False
        # Since when the job has been open; infinity once its layers were looked for.
        self._open_since: float | None = None

    def connected_anew(self) -> None:
        """The connection is another one, over which nobody has spoken."""
        self._told.clear()
        self._returned.clear()

    def pause(self, now: float, sessions: Iterable[Session]) -> float:
        """Returns how many seconds there are until the next heartbeat is due, if nothing is said until then."""
        spoken = min(map(self._told_all, _known(sessions)), default=now)
        return limits.HEARTBEAT_SECONDS - (now - spoken)

    def due(self, now: float, sessions: Iterable[Session]) -> list[Session]:
        """Returns the sessions that must send a heartbeat now; one that cannot be sent waits for its next time."""
        due = [
            session
            for session in _known(sessions)
            if now - self._told_all(session) >= limits.HEARTBEAT_SECONDS
            or self._told.get(session.token) != session.transport.name
        ]
        for session in due:
            session.spoke = self._beaten[session.token] = now
            # Another thread may change it before the heartbeat is written: then the next one says it again.
            self._telling[session.token] = session.transport.name
        return due

    def _told_all(self, session: Session) -> float:
        """When a session has last told the server all that it tells."""
        passes_by = session.transport.passes_server_by
        return min(session.spoke, self._beaten.get(session.token, session.spoke)) if passes_by else session.spoke

    def sent(self, session: Session) -> None:
        """The heartbeat of a session has left."""
        self._told[session.token] = self._telling[session.token]

    def away(self, now: float, sessions: Iterable[Session], *, is_connected: bool) -> str:
        """Returns what ranks that need no server are to be told where it is away; once for each time."""
        if is_connected:
            self._away_since, self._is_away_told = None, False
            return ""
        if self._away_since is None:
            self._away_since = now
        seconds = now - self._away_since
        if seconds < AWAY_SECONDS or self._is_away_told:
            return ""
        going_on = [session for session in _known(sessions) if session.transport.passes_server_by]
        if not going_on:
            return ""
        self._is_away_told = True
        by = "over torch's process group" if going_on[0].transport.name == OVER_PROCESS_GROUP else "in shared memory"
        return (
            f"job {going_on[0].member.job!r}: the server has been away for {seconds:.0f} s. The ranks go on {by}, "
            "but until it is back nobody says which rank is late or lost"
        )

    def is_unused(self, now: float, sessions: Iterable[Session]) -> bool:
        """Returns, once, whether the job has been open for `UNUSED_SECONDS` and no layer has begun a round."""
        opened = [session for session in sessions if session.members]
        if self._open_since is None:
            self._open_since = now if opened else None
        if self._open_since is None or now - self._open_since < UNUSED_SECONDS:
            return False
        self._open_since = inf
        return not any(session.has_layers for session in opened)

    def figures(self, now: float, sessions: Iterable[Session]) -> list[bytes]:
        """Returns the frames that tell of rounds in memory, once a second at most.

        What is not sent is dropped: the server is away, or does not know the session, and will see later rounds.
        """
        looks = [(session, session.transport.samples.take(now)) for session in sessions if session.transport.samples]
        frames = [session.figures(samples) for session, samples in looks if samples and session.token in self._told]
        return [frame for frame in frames if frame]

    def told_times(self, now: float, sessions: Iterable[Session]) -> list[bytes]:
        """Returns the frames that tell how long rounds took, and how late members came to them."""
        known = [session for session in _known(sessions) if session.token in self._told]
        return [frame for session in known for frame in session.told_times(now)]

    def overhear(self, frame: bytes, sessions: Iterable[Session]) -> list[bytes]:
        """Returns the replies to a frame that came over this connection.

        A member that is between two rounds returns to a restarted server from here, so that nobody waits for it.
        """
        replies = []
        for session in _known(sessions):
            if mine := session.overhear(frame):
                replies += mine
                self._returns(session)
        return replies

    def _returns(self, session: Session) -> None:
        """The server has not known the session, nor taken its heartbeat: it needs one, to know where to reach it.

        Else it would look for it where it has spoken last, which may be a connection that is closed by now. This is
        done once, since a server that misses something says the same.
        """
        if session.token not in self._returned:
            self._returned.add(session.token)
            self._told.pop(session.token, None)

    @staticmethod
    def asked(frame: bytes, sessions: Iterable[Session]) -> tuple[Session, StackRequest] | None:
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
