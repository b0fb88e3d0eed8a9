"""Asking: a connection to a running server over which anybody may ask, and the next answer to each question.

A server that ends may take a question with it; the one that is started in its place is asked again.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from server.security.keygen import check_curve
from statsd_bn.endpoints import check_server, why_silent
from statsd_bn.errors import ConfigurationError, ServerUnreachable
from statsd_bn.handshake import EVENTS, Handshakes, SocketHandshakes
from statsd_bn.keys import ClientKeys
from statsd_bn.messages import Message
from statsd_bn.wire import encode

ANSWER_SECONDS = 5.0

# After this long an attempt to connect is given up for a new one, over another port.
CONNECT_MILLISECONDS = 1000

# ZeroMQ's thread answers a greeting in milliseconds, however busy the server is.
GREETING_SECONDS = 1.0

# ZMTP (RFC 23): a greeting's signature and version, which the peer waits for; its length, and where the mechanism is.
_GREETING = b"\xff" + bytes(8) + b"\x7f\3\0"
_GREETING_BYTES = 64
_MECHANISM = slice(12, 32)

Ask = Callable[[Message], bytes]
"""Sends a question, and returns the frame that comes next."""


@contextmanager
def asking(endpoint: str, seconds: float = ANSWER_SECONDS, keys: ClientKeys | None = None) -> Iterator[Ask]:
    """A connection to the server at `endpoint`.

    Args:
        endpoint: where it listens.
        seconds: how long each answer may take.
        keys: this client's, and the server's public one; None for a server that asks for none.

    Raises:
        AuthenticationRefused: server and client do not accept each other's keys.
        ConfigurationError: this is not an endpoint, or a socket that may be another user's.
        ServerUnreachable: no answer within `seconds`, or it is closed to this user.
    """
    check_server(endpoint)
    handshakes = Handshakes(endpoint, has_key=keys is not None)
    with zmq.Context() as context, ExitStack() as opened:

        def open_line() -> "_Line":
            return opened.enter_context(_line(context, endpoint, keys, handshakes.socket()))

        line = open_line()

        def ask(question: Message) -> bytes:
            nonlocal line
            frame = encode(question)
            expiry = time.monotonic() + seconds
            while (answer := line.answer(frame, expiry)) is None:
                if time.monotonic() >= expiry:
                    raise ServerUnreachable(why_silent(endpoint, seconds, socket), endpoint=endpoint, seconds=seconds)
                # Over another socket, since this one may still bring the answer to the first question.
                opened.close()
                line = open_line()
            return answer

        yield ask


def expects_key(endpoint: str) -> bool:
    """Whether a server at a TCP endpoint greets as one with keys; it counts at most one refused connection.

    ZeroMQ would connect several times before it tells.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    expiry = time.monotonic() + GREETING_SECONDS
    got = b""
    with (
        suppress(OSError, ValueError),  # as a port of *
        socket.create_connection((host.strip("[]"), int(port)), GREETING_SECONDS) as plain,
    ):
        plain.sendall(_GREETING)
        while len(got) < _GREETING_BYTES and time.monotonic() < expiry and (part := plain.recv(_GREETING_BYTES)):
            got += part
    return got[:1] == _GREETING[:1] and got[_MECHANISM].rstrip(b"\0") == b"CURVE"


@contextmanager
def _line(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: ClientKeys | None, handshakes: SocketHandshakes
) -> Iterator["_Line"]:
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        # A port of ours whose former connection the server has not done with yet leads nowhere; another one does.
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
        dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
        if keys:
            check_curve()
            dealer.curve_serverkey = keys.server.encode()
            dealer.curve_publickey = keys.pair.public.encode()
            dealer.curve_secretkey = keys.pair.secret.encode()
        with dealer.get_monitor_socket(EVENTS) as monitor:
            try:
                dealer.connect(endpoint)
            except zmq.ZMQError as error:
                problem = zmq.strerror(error.errno or 0)
                text = f"endpoint: expected tcp://HOST:PORT or ipc://PATH, got {endpoint!r} ({problem})"
                raise ConfigurationError(text) from error
            try:
                yield _Line(dealer, monitor, handshakes)
            finally:
                dealer.disable_monitor()


class _Line:
    """One socket to the server, and what its monitor tells."""

    def __init__(self, dealer: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]", handshakes: SocketHandshakes) -> None:
        self._dealer = dealer
        self._monitor = monitor
        self._handshakes = handshakes
        self._poller = zmq.Poller()
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def answer(self, question: bytes, expiry: float) -> bytes | None:
        """The next frame that comes; None at `expiry`, or once the connection was made anew."""
        self._dealer.send(question)
        while self._handshakes.successes <= 1 and (left := expiry - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(left * 1000) + 1))
            if self._dealer in ready:
                return self._dealer.recv()
            if self._monitor in ready:
                told = recv_monitor_message(self._monitor)
                self._handshakes.take(time.monotonic(), int(told["event"]), int(told["value"]))
        return None
