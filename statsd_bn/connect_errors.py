"""Errors of a client that does not reach a server: failed handshakes, and endpoints that do not answer.

A server that refuses a client's key, or has no keys, sends nothing: ZeroMQ reports the failed handshake only to the
monitor of the client's socket, and may or may not retry. The numbers of these events are libzmq's.
"""

from types import ModuleType

from statsd_bn.endpoints import ipc_path
from statsd_bn.errors import AuthenticationRefused
from statsd_bn.text import error_text

# zmq.h: ZMQ_EVENT_HANDSHAKE_*. A handshake fails without a reason (the server closed the connection), because of the
# protocol, or because the server refused it.
SUCCEEDED = 0x1000
FAILED = 0x0800
FAILED_BY_PROTOCOL = 0x2000
FAILED_BY_SERVER = 0x4000
EVENTS = SUCCEEDED | FAILED | FAILED_BY_PROTOCOL | FAILED_BY_SERVER

# zmq.h: ZMQ_PROTOCOL_ERROR_*. Only one side has CURVE; the client has another server's key.
_MECHANISMS_DIFFER = 0x11000002
_WRONG_KEY = 0x11000001

# A server that closes the connection in a handshake may be about to end, or a proxy may stand in for it. So many times
# over so many seconds it means a key. ZeroMQ retries every 0.1 to 0.2 s.
MAX_CLOSED = 3
MAX_CLOSED_SECONDS = 2.0

# ZeroMQ has tried for seconds by then; a working network takes milliseconds.
PROBE_SECONDS = 1.0

START_ADVICE = "Is `python -m server` running there? Start it, or correct the endpoint."
NETWORK_ADVICE = "Check the address, the port and the firewall: not even a refusal came back."
OTHER_PROGRAM_ADVICE = "Check that it is a statsd_bn server; an overloaded or stopped one does not answer."


class HandshakeMonitor:
    """Handshakes of a channel pool's sockets."""

    def __init__(self, endpoint: str, *, has_key: bool) -> None:
        self._endpoint = endpoint
        self._has_key = has_key
        self.has_succeeded = False

    def refusal(self, event: int, value: int, closed: int, seconds: float) -> AuthenticationRefused | None:
        """Returns the error of the last of `closed` failures in a row, or None if a later attempt may succeed."""
        mechanisms_differ = event == FAILED_BY_PROTOCOL and value == _MECHANISMS_DIFFER
        if event == FAILED_BY_SERVER:
            what, reason = "the server does not know this client's key", "unknown key"
        elif mechanisms_differ and self._has_key:
            what, reason = "this client has a key, and the server was started without --curve", "no server key"
        elif mechanisms_differ:
            what = "the server expects a key, and this client has none; pass connect(curve=...) or set STATSD_BN_CURVE"
            reason = "no key"
        elif event == FAILED_BY_PROTOCOL and value == _WRONG_KEY:
            what, reason = "the server's key is not the one this client expects", "wrong server key"
        # After a success, a server that closes the connection has another reason.
        elif self.has_succeeded or closed < MAX_CLOSED or seconds < MAX_CLOSED_SECONDS:
            return None
        elif self._has_key:
            # A server without --curve usually says so in its greeting, but may be gone before the client reads it.
            likely = "its key is probably not the one this client expects, or it was started without --curve"
            what, reason = f"the server closed {closed} handshakes; {likely}", "wrong server key"
        else:
            likely = "it expects a key, and this client has none, or it is no statsd_bn server"
            what, reason = f"the server closed {closed} handshakes; {likely}", "no key"
        return AuthenticationRefused(f"authentication refused at {self._endpoint}: {what}", reason=reason)


class SocketMonitor:
    """The handshakes of one socket."""

    def __init__(self, of_pool: HandshakeMonitor) -> None:
        self.successes = 0  # number of successful handshakes; each is a new connection
        self._of_pool = of_pool
        self._closed = 0
        self._first = 0.0

    def on_event(self, now: float, event: int, value: int) -> None:
        """Process an event of the socket's monitor."""
        if event == SUCCEEDED:
            self.successes += 1
            self._closed = 0
            self._of_pool.has_succeeded = True
            return
        if not self._closed:
            self._first = now
        self._closed += 1
        if refusal := self._of_pool.refusal(event, value, self._closed, now - self._first):
            raise refusal


def explain_no_answer(endpoint: str, seconds: float, network: ModuleType) -> str:
    """Returns the text of an error: why no server answered at an endpoint for so long. Tries a plain connection.

    It takes up to `PROBE_SECONDS` more. `network` is the module `socket`, which this package does not load.
    """
    try:
        _connect(endpoint, network)
    except network.gaierror as error:
        host = endpoint.partition("://")[2].rpartition(":")[0]
        what = f"the name {host!r} is not known here ({error.strerror})"
        return error_text(what, where=endpoint, advice="Correct the name of the server's host, or use its address.")
    except (FileNotFoundError, ConnectionRefusedError) as error:
        how = "connection refused" if isinstance(error, ConnectionRefusedError) else "there is no such file"
        return error_text(f"no server listens at {endpoint} ({how})", advice=START_ADVICE)
    except TimeoutError:
        return error_text(f"no answer from {endpoint} within {seconds:g} s", advice=NETWORK_ADVICE)
    except (OSError, ValueError) as error:
        return error_text(f"cannot reach {endpoint} ({error})", advice=NETWORK_ADVICE)
    what = f"no answer from {endpoint} within {seconds:g} s, but a program listens there"
    return error_text(what, advice=OTHER_PROGRAM_ADVICE)


def format_no_answer(endpoint: str, seconds: float) -> str:
    """Returns the text of an error: no server answered, for an unknown reason."""
    return error_text(f"no answer from {endpoint} within {seconds:g} s", advice=START_ADVICE)


def _connect(endpoint: str, network: ModuleType) -> None:
    if path := ipc_path(endpoint):
        with network.socket(network.AF_UNIX, network.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_SECONDS)
            probe.connect(str(path))
    else:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        network.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
