"""Liveness: which sessions have been heard of, when, and where they can be reached.

There are two ways for a member to end without a word. A process that is killed loses its connections, which the
service finds out by trying to reach it; one that is frozen, or whose host vanishes, keeps them and falls silent. Like
the rest of the dispatcher this is pure: the time goes in.
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
        heard: when it last spoke, in seconds.
        peer: from where it last spoke other than by heartbeat; empty once nothing reaches it there.
        beacon: from where its last heartbeat came; empty before the first, and once nothing reaches it there.
        cut: since when nothing reaches it anywhere; None while something may.
    """

    heard: float
    peer: bytes
    beacon: bytes = b""
    cut: float | None = None

    @property
    def address(self) -> bytes:
        """Where to try to reach it: a member keeps its beacon's socket, but may close any other and live on."""
        return self.beacon or self.peer

    def lose(self, now: float, peer: bytes) -> None:
        """Takes note that nothing reaches it at `peer`."""
        if self.peer == peer:
            self.peer = b""
        if self.beacon == peer:
            self.beacon = b""
        if not self.address and self.cut is None:
            self.cut = now

    def cause_of_death(self, now: float, most: float) -> str:
        """Returns why it must be taken for lost; empty while it need not, as long as its silence is not the most."""
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
        # Whoever was heard last is last, so that those who may be lost are found without a look at all.
        self._pulses: OrderedDict[bytes, Pulse] = OrderedDict()
        self._cut: dict[bytes, Pulse] = {}
        self._looked = now

    def begin(self, now: float, session: bytes, peer: bytes) -> None:
        """Takes note that a session has registered, perhaps not for the first time."""
        self._pulses.setdefault(session, Pulse(now, peer))
        self.hear(now, session, peer)

    def hear(self, now: float, session: bytes, peer: bytes) -> None:
        """Takes note that a session has spoken; one that is unknown does not matter."""
        if pulse := self._pulses.get(session):
            pulse.heard, pulse.peer = now, peer
            self._revive(session, pulse)

    def beat(self, now: float, session: bytes, peer: bytes) -> bool:
        """Takes note of a session's heartbeat, and returns whether the session is known."""
        pulse = self._pulses.get(session)
        if pulse is None:
            return False
        pulse.heard, pulse.beacon = now, peer
        self._revive(session, pulse)
        return True

    def forget(self, session: bytes) -> None:
        """Takes note that a session has ended; harmless if it is unknown."""
        self._pulses.pop(session, None)
        self._cut.pop(session, None)

    def addresses(self, since: float) -> set[bytes]:
        """Returns where to try to reach the sessions that have not been heard since a time: one place for each."""
        return {pulse.address for pulse in self._pulses.values() if pulse.address and pulse.heard <= since}

    def unreachable(self, now: float, peer: bytes) -> set[bytes]:
        """Takes note that nothing reaches a peer, and returns where else its sessions may be reached."""
        concerned = {session: pulse for session, pulse in self._pulses.items() if peer in {pulse.peer, pulse.beacon}}
        for session, pulse in concerned.items():
            pulse.lose(now, peer)
            if pulse.cut is not None:
                self._cut[session] = pulse
        return {pulse.address for pulse in concerned.values() if pulse.address}

    def lost(self, now: float) -> list[tuple[bytes, str]]:
        """Returns the sessions that must be taken for lost, each with the cause; to be asked often."""
        held_up = now - self._looked > limits.HEARTBEAT_SECONDS
        self._looked = now
        if held_up:
            # It was the server that was away, frozen or starved. What the members said meanwhile may still be on its
            # way, so their time begins again.
            self._pardon(now)
        silent = takewhile(lambda entry: now - entry[1].heard >= self._silence, self._pulses.items())
        causes = {session: pulse.cause_of_death(now, self._silence) for session, pulse in (*silent, *self._cut.items())}
        return [(session, cause) for session, cause in causes.items() if cause]

    def _revive(self, session: bytes, pulse: Pulse) -> None:
        self._pulses.move_to_end(session)
        if pulse.cut is not None:
            pulse.cut = None
            del self._cut[session]

    def _pardon(self, now: float) -> None:
        for pulse in self._pulses.values():
            pulse.heard = now
            pulse.cut = None if pulse.cut is None else now
