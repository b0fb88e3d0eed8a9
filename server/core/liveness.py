"""Liveness: when each session was last heard, and where it can be reached.

A member can end without a word in two ways. A killed process loses its connections, and the service finds out by
sending it a probe. A frozen process, or one whose host vanishes, keeps its connections and falls silent. Like the rest
of the dispatcher this is pure: the time goes in.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile

from server.group.recovery import RECONNECT_SECONDS
from statsd_bn import limits


@dataclass(slots=True)
class Pulse:
    """The signs of life of one session.

    Attributes:
        heard: when it last spoke.
        peer: where its last message came from, but for those of the beacon; b"" once it cannot be reached there.
        beacon: where its last heartbeat came from, or what follows heartbeats; b"" before the first, and once it cannot
            be reached there.
        cut: since when it cannot be reached anywhere; None while it may be.
    """

    heard: float
    peer: bytes
    beacon: bytes = b""
    cut: float | None = None

    @property
    def address(self) -> bytes:
        """Where to probe it: a living member keeps its beacon's socket, but may close any other."""
        return self.beacon or self.peer

    def lose(self, now: float, peer: bytes) -> None:
        """Note that it cannot be reached at `peer`."""
        if self.peer == peer:
            self.peer = b""
        if self.beacon == peer:
            self.beacon = b""
        if not self.address and self.cut is None:
            self.cut = now

    def why_lost(self, now: float, most: float) -> str:
        """Reason the session is considered lost, or "" while it is alive; `most` is how long it may be silent."""
        if self.cut is not None and now - self.cut >= RECONNECT_SECONDS:
            return "the connection was lost"
        silence = now - self.heard
        return f"no sign of life for {silence:.1f} s" if silence >= most else ""


class Liveness:
    """The pulses of all sessions.

    Args:
        now: the time, on the clock that all methods are given.
        silence: how long a session may be silent, in seconds.
    """

    def __init__(self, now: float, silence: float) -> None:
        self._silence = silence
        # In the order of being heard, so that finding the silent ones does not look at all.
        self._pulses: OrderedDict[bytes, Pulse] = OrderedDict()
        self._cut: dict[bytes, Pulse] = {}
        self._looked = now

    def begin(self, now: float, session: bytes, peer: bytes) -> None:
        """Note that a session has registered, perhaps not for the first time."""
        self._pulses.setdefault(session, Pulse(now, peer))
        self.hear(now, session, peer)

    def hear(self, now: float, session: bytes, peer: bytes) -> None:
        """Note that a session has spoken; an unknown one is ignored."""
        if pulse := self._pulses.get(session):
            pulse.heard, pulse.peer = now, peer
            self._pulses.move_to_end(session)
            if pulse.cut is not None:
                self._revive(session, pulse)

    def beat(self, now: float, session: bytes, peer: bytes) -> None:
        """Note a session's heartbeat, or what follows one; one of an unknown session is ignored."""
        if pulse := self._pulses.get(session):
            pulse.heard, pulse.beacon = now, peer
            self._pulses.move_to_end(session)
            if pulse.cut is not None:
                self._revive(session, pulse)

    def forget(self, session: bytes) -> None:
        """Forget a session that has ended; an unknown one is ignored."""
        self._pulses.pop(session, None)
        self._cut.pop(session, None)

    def addresses(self, since: float) -> set[bytes]:
        """Where to probe the sessions that have not been heard since a time: one address for each."""
        return {pulse.address for pulse in self._pulses.values() if pulse.address and pulse.heard <= since}

    def beacon(self, session: bytes) -> bytes:
        """Where a session's heartbeats come from; b"" while there is no such place."""
        pulse = self._pulses.get(session)
        return pulse.beacon if pulse else b""

    def unreachable(self, now: float, peer: bytes) -> set[bytes]:
        """Note that a peer cannot be reached; returns the other addresses of its sessions."""
        concerned = {session: pulse for session, pulse in self._pulses.items() if peer in {pulse.peer, pulse.beacon}}
        for session, pulse in concerned.items():
            pulse.lose(now, peer)
            if pulse.cut is not None:
                self._cut[session] = pulse
        return {pulse.address for pulse in concerned.values() if pulse.address}

    def lost(self, now: float) -> list[tuple[bytes, str]]:
        """Sessions that are considered lost, each with the cause; call it often."""
        held_up = now - self._looked > limits.HEARTBEAT_SECONDS
        self._looked = now
        if held_up:
            # The server itself was frozen or starved. What the members said meanwhile may still be on its way, so their
            # time starts again.
            self._start_again(now)
        silent = takewhile(lambda entry: now - entry[1].heard >= self._silence, self._pulses.items())
        causes = {session: pulse.why_lost(now, self._silence) for session, pulse in (*silent, *self._cut.items())}
        return [(session, cause) for session, cause in causes.items() if cause]

    def _revive(self, session: bytes, pulse: Pulse) -> None:
        pulse.cut = None
        del self._cut[session]

    def _start_again(self, now: float) -> None:
        for pulse in self._pulses.values():
            pulse.heard = now
            pulse.cut = None if pulse.cut is None else now
