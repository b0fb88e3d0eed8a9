"""Query: sends status requests to a running server, and returns the answers.

A request is lost if the server ends before the answer, and is sent again to its successor.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import zmq
from zmq.utils.monitor import recv_monitor_message

from server.security.keygen import check_curve
from statsd_bn.connect_errors import EVENTS, HandshakeMonitor, SocketMonitor, explain_no_answer
from statsd_bn.endpoints import check_server_socket
from statsd_bn.errors import ConfigurationError, ServerUnreachable
from statsd_bn.keys import ClientKeys
from statsd_bn.messages import Message
from statsd_bn.wire import encode

ANSWER_SECONDS = 5.0

CONNECT_MILLISECONDS = 1000  # of one attempt; the next one uses another local port
GREETING_SECONDS = 1.0  # ZeroMQ's thread sends it within milliseconds, however busy the server is

Query = Callable[[Message], bytes]
"""Sends a request and returns the next frame."""


@contextmanager
def query_connection(endpoint: str, seconds: float = ANSWER_SECONDS, keys: ClientKeys | None = None) -> Iterator[Query]:
    """Connect to the server at `endpoint`; yields a function that sends requests."""
    check_server_socket(endpoint)
    handshakes = HandshakeMonitor(endpoint, has_key=keys is not None)
    with zmq.Context() as context, ExitStack() as opened:

        def reconnect() -> Callable[[bytes, float], bytes | None]:
            return opened.enter_context(_connect(context, endpoint, keys, handshakes.new_socket()))

        answer_to = reconnect()

        def ask(question: Message) -> bytes:
            nonlocal answer_to
            frame = encode(question)
            expiry = time.monotonic() + seconds
            while (answer := answer_to(frame, expiry)) is None:
                if time.monotonic() >= expiry:
                    text = explain_no_answer(endpoint, seconds, socket)
                    raise ServerUnreachable(text, endpoint=endpoint, seconds=seconds)
                # A new socket, because the old one may still deliver the answer to the first request.
                opened.close()
                answer_to = reconnect()
            return answer

        yield ask


def is_greeted(endpoint: str) -> bool:
    """Whether a ZeroMQ server listens at a TCP endpoint; it counts one refused connection."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with (
        suppress(OSError, ValueError),  # such as port *
        socket.create_connection((host.strip("[]"), int(port)), GREETING_SECONDS) as plain,
    ):
        return plain.recv(1) == b"\xff"
    return False


@contextmanager
def _connect(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: ClientKeys | None, handshakes: SocketMonitor
) -> Iterator[Callable[[bytes, float], bytes | None]]:
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        # ZeroMQ repeats an attempt that times out from another local port: the server may still hold a connection from
        # the former one.
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
                yield partial(_answer, dealer, monitor, handshakes)
            finally:
                dealer.disable_monitor()


def _answer(
    dealer: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]", handshakes: SocketMonitor, question: bytes, expiry: float
) -> bytes | None:
    """Send a request and return the next frame; None at `expiry`, or after a reconnect."""
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    dealer.send(question)
    while handshakes.successes <= 1 and (left := expiry - time.monotonic()) > 0:
        ready = dict(poller.poll(int(left * 1000) + 1))
        if dealer in ready:
            return dealer.recv()
        if monitor in ready:
            event = recv_monitor_message(monitor)
            handshakes.on_event(time.monotonic(), int(event["event"]), int(event["value"]))
    return None
