"""Liveness: the last sign of life and the addresses of each session.

A member can end silently in two ways. A killed process loses its connections, and the service detects that by sending a
probe. A frozen process, or a vanished host, keeps its connections and sends nothing. Pure: time is an argument.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile

from server.group.membership import RECONNECT_SECONDS
from statsd_bn import limits


@dataclass(slots=True)
class SessionLiveness:
    """Signs of life of one session; an address is b"" before the first message from there, and once disconnected."""

    last_heard: float  # time of its last message
    peer: bytes  # source of its last message from the main socket
    heartbeat_peer: bytes = b""  # source of its last heartbeat, or of a report from that socket
    unreachable_since: float | None = None  # when it lost its last address

    @property
    def address(self) -> bytes:
        """Address to probe: a living member keeps its heartbeat socket open, but may close the others."""
        return self.heartbeat_peer or self.peer

    def mark_unreachable(self, now: float, peer: bytes) -> None:
        """Record that `peer` is disconnected."""
        if self.peer == peer:
            self.peer = b""
        if self.heartbeat_peer == peer:
            self.heartbeat_peer = b""
        if not self.address and self.unreachable_since is None:
            self.unreachable_since = now

    def loss_cause(self, now: float, most: float) -> str:
        """Reason to consider the session lost; "" while it is alive. `most` is the allowed silence in seconds."""
        if self.unreachable_since is not None and now - self.unreachable_since >= RECONNECT_SECONDS:
            return "the connection was lost"
        silence = now - self.last_heard
        return f"no sign of life for {silence:.1f} s" if silence >= most else ""


class Liveness:
    """The liveness of all sessions."""

    def __init__(self, now: float, silence: float) -> None:
        self._silence = silence
        # Ordered by last message, so that the search for silent sessions stops at the first recent one.
        self._sessions: OrderedDict[bytes, SessionLiveness] = OrderedDict()
        self._unreachable: dict[bytes, SessionLiveness] = {}
        self._last_check = now

    def add(self, now: float, session: bytes, peer: bytes) -> None:
        """Record a registration, which may be a repeated one."""
        self._sessions.setdefault(session, SessionLiveness(now, peer))
        self.record_message(now, session, peer)

    def record_message(self, now: float, session: bytes, peer: bytes) -> None:
        """Record a message of a session; an unknown session is ignored."""
        if state := self._sessions.get(session):
            state.last_heard, state.peer = now, peer
            self._sessions.move_to_end(session)
            if state.unreachable_since is not None:
                self._revive(session, state)

    def record_heartbeat(self, now: float, session: bytes, peer: bytes) -> None:
        """Record a message from a session's heartbeat socket; an unknown session is ignored."""
        if state := self._sessions.get(session):
            state.last_heard, state.heartbeat_peer = now, peer
            self._sessions.move_to_end(session)
            if state.unreachable_since is not None:
                self._revive(session, state)

    def _revive(self, session: bytes, state: SessionLiveness) -> None:
        state.unreachable_since = None
        del self._unreachable[session]

    def remove(self, session: bytes) -> None:
        """Remove a session that has ended; an unknown session is ignored."""
        self._sessions.pop(session, None)
        self._unreachable.pop(session, None)

    def probe_addresses(self, since: float) -> set[bytes]:
        """Addresses of the sessions without a message after `since`, one for each."""
        return {state.address for state in self._sessions.values() if state.address and state.last_heard <= since}

    def heartbeat_address(self, session: bytes) -> bytes:
        """Source of a session's heartbeats; b"" before the first one, and once it is disconnected."""
        state = self._sessions.get(session)
        return state.heartbeat_peer if state else b""

    def unreachable(self, now: float, peer: bytes) -> set[bytes]:
        """Record that a peer is disconnected; returns the other addresses of its sessions."""
        concerned = {
            session: state for session, state in self._sessions.items() if peer in {state.peer, state.heartbeat_peer}
        }
        for session, state in concerned.items():
            state.mark_unreachable(now, peer)
            if state.unreachable_since is not None:
                self._unreachable[session] = state
        return {state.address for state in concerned.values() if state.address}

    def lost(self, now: float) -> list[tuple[bytes, str]]:
        """Lost sessions, each with the cause; call it at each tick."""
        was_delayed = now - self._last_check > limits.HEARTBEAT_SECONDS
        self._last_check = now
        if was_delayed:
            # The server itself was frozen or starved. Messages of that time may still be in flight, so the silence is
            # measured from now.
            for state in self._sessions.values():
                state.last_heard = now
                state.unreachable_since = None if state.unreachable_since is None else now
        silent = takewhile(lambda entry: now - entry[1].last_heard >= self._silence, self._sessions.items())
        causes = {
            session: state.loss_cause(now, self._silence) for session, state in (*silent, *self._unreachable.items())
        }
        return [(session, cause) for session, cause in causes.items() if cause]
