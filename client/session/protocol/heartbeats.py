"""HeartbeatScheduler: which sessions send heartbeats and reports, and when; pure.

A session in rounds over the server needs no heartbeat, but one whose rows bypass the server does: heartbeats say how
many rounds it has had and how long it waited.
"""

from collections.abc import Iterable
from math import inf

from client.session.protocol.member import OVER_PROCESS_GROUP
from client.session.protocol.session import Session
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import StackRequest

AWAY_SECONDS = 10.0  # outage of the server after which ranks that bypass it log a warning
UNUSED_SECONDS = 60.0  # after the job opened, warn if no layer has begun a round; loading data and compiling come first


class HeartbeatScheduler:
    """The heartbeats of one process over one connection."""

    def __init__(self) -> None:
        # By token: the transport in the latest heartbeat that was sent over this connection, and in the one being sent.
        self._announced: dict[bytes, str] = {}
        self._announcing: dict[bytes, str] = {}
        self._resent: set[bytes] = set()
        self._last_heartbeat: dict[bytes, float] = {}
        # Start of the current outage, and the time at which the job opened; infinity after the warning.
        self._away_since: float | None = None
        self._open_since: float | None = None

    def on_reconnected(self) -> None:
        """Forget the heartbeats sent before: the connection is a new one."""
        self._announced.clear()
        self._resent.clear()

    def seconds_until_due(self, now: float, sessions: Iterable[Session]) -> float:
        """Seconds until the next heartbeat is due, if nothing is sent until then."""
        last = min(map(self._last_complete, _registered(sessions)), default=now)
        return limits.HEARTBEAT_SECONDS - (now - last)

    def sessions_due(self, now: float, sessions: Iterable[Session]) -> list[Session]:
        """Sessions that must send a heartbeat now; a heartbeat that cannot be sent is not repeated at once."""
        due = [
            session
            for session in _registered(sessions)
            if now - self._last_complete(session) >= limits.HEARTBEAT_SECONDS
            or self._announced.get(session.member_token) != session.transport.name
        ]
        for session in due:
            session.last_sent = self._last_heartbeat[session.member_token] = now
            # If another thread changes the transport before the encoding, a second heartbeat announces it again.
            self._announcing[session.member_token] = session.transport.name
        return due

    def _last_complete(self, session: Session) -> float:
        """When a session last sent everything that a heartbeat reports."""
        if not session.transport.bypasses_server:
            return session.last_sent
        return min(session.last_sent, self._last_heartbeat.get(session.member_token, session.last_sent))

    def mark_sent(self, session: Session) -> None:
        """Record that the heartbeat of a session has left."""
        self._announced[session.member_token] = self._announcing[session.member_token]

    def outage_warning(self, now: float, sessions: Iterable[Session], *, is_connected: bool) -> str:
        """Warning during an outage, for ranks that bypass the server; once per outage, otherwise empty."""
        if is_connected:
            self._away_since = None
            return ""
        if self._away_since is None:
            self._away_since = now
        seconds = now - self._away_since
        bypassing = [session for session in _registered(sessions) if session.transport.bypasses_server]
        if seconds < AWAY_SECONDS or not bypassing:
            return ""
        self._away_since = inf
        by = "over torch's process group" if bypassing[0].transport.name == OVER_PROCESS_GROUP else "in shared memory"
        return (
            f"job {bypassing[0].member.job!r}: no connection to the server for {seconds:.0f} s. The ranks continue "
            f"{by}; late and lost ranks are not reported until the server is back"
        )

    def is_unused(self, now: float, sessions: Iterable[Session]) -> bool:
        """Whether the job has been open for `UNUSED_SECONDS` and no layer has begun a round; True once."""
        opened = [session for session in sessions if session.members]
        if self._open_since is None:
            self._open_since = now if opened else None
        if self._open_since is None or now - self._open_since < UNUSED_SECONDS:
            return False
        self._open_since = inf
        return not any(session.has_forward_rounds for session in opened)

    def skew_frames(self, now: float, sessions: Iterable[Session]) -> list[bytes]:
        """Frames with skew statistics of rounds that bypassed the server; once a second at most."""
        # Samples of sessions that the server does not know yet are dropped; later rounds bring others.
        frames = []
        for session in sessions:
            samples = session.transport.samples.drain(now) if session.transport.samples else ()
            if samples and session.member_token in self._announced and (frame := session.skew_frame(samples)):
                frames.append(frame)
        return frames

    def timing_frames(self, now: float, sessions: Iterable[Session]) -> list[bytes]:
        """Frames with the durations of rounds, and this member's lateness in them."""
        known = [session for session in _registered(sessions) if session.member_token in self._announced]
        return [frame for session in known for frame in session.timing_frames(now)]

    def on_unsolicited(self, frame: bytes, sessions: Iterable[Session]) -> list[bytes]:
        """Replies to a frame that arrived over this connection."""
        # The replies register a member with a restarted server even between two rounds: other members may wait for it.
        replies = []
        for session in _registered(sessions):
            if mine := session.on_unsolicited(frame):
                replies += mine
                # A heartbeat tells the restarted server of this connection; otherwise the server would use the channel
                # of the session's latest message, which may be closed. One heartbeat suffices for repeated requests.
                if session.member_token not in self._resent:
                    self._resent.add(session.member_token)
                    self._announced.pop(session.member_token, None)
        return replies

    @staticmethod
    def request(frame: bytes, sessions: Iterable[Session]) -> tuple[Session, StackRequest | StatsdBNError] | None:
        """The request in a frame, see `Session.request`, and its session; None for another frame."""
        requests = ((session, session.request(frame)) for session in _registered(sessions))
        return next(((session, request) for session, request in requests if request is not None), None)


def _registered(sessions: Iterable[Session]) -> list[Session]:
    return [session for session in sessions if session.is_registered]
