"""Liveness: the last sign of life and the addresses of each registered session.

A member can end silently in two ways. A killed process loses its connections, and the service detects that by sending a
probe. A frozen process, or a vanished host, keeps its connections and sends nothing. Pure: time is an argument.
"""

import math
from dataclasses import dataclass

from server.group.contributor import Contributor
from server.group.master import SyncMaster
from server.group.recovery import RECONNECT_SECONDS


@dataclass(slots=True, eq=False)
class Session:
    """A registered session; the address of a socket is b"" before its first message, and after its disconnection."""

    master: SyncMaster  # its group
    contributor: Contributor  # its member there
    key: str  # its public key
    last_heard: float  # time of its last message
    peer: bytes  # source of its last message from the main socket
    heartbeat_peer: bytes = b""  # source of its last heartbeat or report from the heartbeat socket
    unreachable_since: float | None = None  # when it lost its last address

    def record_message(self, now: float, peer: bytes) -> None:
        """Record a message from the main socket."""
        self.last_heard, self.peer, self.unreachable_since = now, peer, None

    def record_heartbeat(self, now: float, peer: bytes) -> None:
        """Record a message from the heartbeat socket, which must not replace the address of the main one."""
        self.last_heard, self.heartbeat_peer, self.unreachable_since = now, peer, None

    @property
    def address(self) -> bytes:
        """Address to probe: a living member keeps its heartbeat socket open, but may close the others."""
        return self.heartbeat_peer or self.peer


class Sessions(dict[bytes, Session]):
    """All registered sessions, by token."""

    def __init__(self, now: float, silence: float) -> None:
        self._silence = silence  # allowed, in seconds
        self._measured_from = now

    def probe_addresses(self, since: float) -> set[bytes]:
        """Addresses of the sessions without a message after `since`, one for each."""
        return {session.address for session in self.values() if session.address and session.last_heard <= since}

    def heartbeat_address(self, token: bytes) -> bytes:
        """Source of a session's heartbeats; b"" before the first one, and once it is disconnected or has ended."""
        session = self.get(token)
        return session.heartbeat_peer if session else b""

    def unreachable(self, now: float, peer: bytes) -> set[bytes]:
        """Record that a peer is disconnected; returns the other addresses of its sessions."""
        concerned = [session for session in self.values() if peer in {session.peer, session.heartbeat_peer}]
        for session in concerned:
            session.peer = b"" if session.peer == peer else session.peer
            session.heartbeat_peer = b"" if session.heartbeat_peer == peer else session.heartbeat_peer
            if not session.address and session.unreachable_since is None:
                session.unreachable_since = now
        return {session.address for session in concerned if session.address}

    def lost(self, now: float, *, was_delayed: bool) -> list[tuple[bytes, str]]:
        """Lost sessions and the causes, in the order in which they fell silent; call it at each tick."""
        if was_delayed:  # messages that arrived during the delay may be unread, so the silence is measured from now
            self._measured_from = now
        lost = [(token, session, cause) for token, session in self.items() if (cause := self._loss_cause(now, session))]
        # Connected sessions come first, because they are lost only after a longer silence. Disconnected ones are
        # sorted by the disconnect, not the last message: the process killed first may have sent its last message last.
        lost.sort(key=lambda entry: (entry[1].unreachable_since or -math.inf, entry[1].last_heard))
        return [(token, cause) for token, _, cause in lost]

    def _loss_cause(self, now: float, session: Session) -> str:
        """Reason to consider a session lost; "" while it is alive."""
        unreachable_since, measured_from = session.unreachable_since, self._measured_from
        if unreachable_since is not None and now - max(unreachable_since, measured_from) >= RECONNECT_SECONDS:
            return "the connection was lost"
        silence = now - max(session.last_heard, measured_from)
        return f"no sign of life for {silence:.1f} s" if silence >= self._silence else ""
