"""Handshakes: how the handshakes of a client's socket ended.

A server that does not accept a client's key, or has none, says nothing: ZeroMQ tells only the monitor of the client's
socket, and goes on trying, or no longer does. What it tells there is read here; the numbers are libzmq's.
"""

from statsd_bn.errors import AuthenticationRefused

# zmq.h: ZMQ_EVENT_HANDSHAKE_*. The failures: without a reason (the server has hung up), for a reason of the protocol,
# and by the server's word.
SUCCEEDED = 0x1000
FAILED = 0x0800
FAILED_BY_PROTOCOL = 0x2000
FAILED_BY_SERVER = 0x4000
EVENTS = SUCCEEDED | FAILED | FAILED_BY_PROTOCOL | FAILED_BY_SERVER

# zmq.h: ZMQ_PROTOCOL_ERROR_*. One side has CURVE and the other has not; a key does not fit.
_MECHANISMS_DIFFER = 0x11000002
_WRONG_KEY = 0x11000001

# A server that hangs up in the middle of a handshake may be about to end, or a proxy may stand before one that is away.
# This often, and for this long, it means a key; ZeroMQ tries again every 0.1 to 0.2 seconds.
HUNG_UP_TIMES = 3
HUNG_UP_SECONDS = 2.0


class Handshakes:
    """What the monitors of a client's sockets have told; those of one channel pool share it."""

    def __init__(self, endpoint: str, *, has_key: bool) -> None:
        self._endpoint = endpoint
        self._has_key = has_key
        self._was_accepted = False

    def socket(self) -> "SocketHandshakes":
        """Returns what takes the events of one socket."""
        return SocketHandshakes(self)

    def accepted(self) -> None:
        """Takes note that a handshake has succeeded: a server that hangs up later has another reason."""
        self._was_accepted = True

    def refusal(self, event: int, value: int, hung_up: int, seconds: float) -> AuthenticationRefused | None:
        """Returns what a failure means, after so many in so many seconds; None while it may mean anything."""
        if event == FAILED_BY_SERVER:
            return self._refused("the server does not know this client's key", "unknown key")
        if event == FAILED_BY_PROTOCOL and value == _MECHANISMS_DIFFER:
            return self._mechanisms_differ()
        if event == FAILED_BY_PROTOCOL and value == _WRONG_KEY:
            return self._refused("the server's key is not the one this client expects", "wrong server key")
        if self._was_accepted or hung_up < HUNG_UP_TIMES or seconds < HUNG_UP_SECONDS:
            return None
        what = f"it hung up in the middle of {hung_up} handshakes; "
        if self._has_key:
            # One without --curve mostly says so in its greeting, but may be gone before the client has read that.
            likely = "its key is probably not the one this client expects, or it was started without --curve"
            return self._refused(what + likely, "wrong server key")
        likely = "it expects a key, and this client has none, or it is no statsd_bn server"
        return self._refused(what + likely, "no key")

    def _mechanisms_differ(self) -> AuthenticationRefused:
        if self._has_key:
            return self._refused("this client has a key, and the server was started without --curve", "no server key")
        return self._refused(
            "the server expects a key, and this client has none; pass connect(curve=...) or set STATSD_BN_CURVE",
            "no key",
        )

    def _refused(self, text: str, reason: str) -> AuthenticationRefused:
        return AuthenticationRefused(f"authentication refused at {self._endpoint}: {text}", reason=reason)


class SocketHandshakes:
    """The handshakes of one socket.

    Attributes:
        successes: how many there were: each is a connection, made anew but for the first.
    """

    def __init__(self, all_of_them: Handshakes) -> None:
        self.successes = 0
        self._all = all_of_them
        self._hung_up = 0
        self._first = 0.0

    def take(self, now: float, event: int, value: int) -> None:
        """Takes an event of the socket's monitor.

        Raises:
            AuthenticationRefused: server and client do not accept each other's keys.
        """
        if event == SUCCEEDED:
            self.successes += 1
            self._hung_up = 0
            self._all.accepted()
            return
        if not self._hung_up:
            self._first = now
        self._hung_up += 1
        if refusal := self._all.refusal(event, value, self._hung_up, now - self._first):
            raise refusal
