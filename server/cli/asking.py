"""Asking: a connection to a running server over which anybody may ask, and the next answer to each question."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq
from zmq.utils.monitor import recv_monitor_message

from server.secrets.keygen import check_curve
from statsd_bn.errors import ServerUnreachable
from statsd_bn.handshake import EVENTS, Handshakes
from statsd_bn.keys import ClientKeys
from statsd_bn.messages import Message
from statsd_bn.reach import check_is_open_to_us, why_silent
from statsd_bn.wire import encode

ANSWER_SECONDS = 5.0

# After this long an attempt to connect is given up for a new one, over another port.
CONNECT_MILLISECONDS = 1000

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
        ServerUnreachable: no answer within `seconds`, or this is not an endpoint, or it is closed to this user.
    """
    check_is_open_to_us(endpoint)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
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
            handshakes = Handshakes(endpoint, has_key=keys is not None)

            def ask(question: Message) -> bytes:
                dealer.send(encode(question))
                frame = _receive(dealer, monitor, handshakes, seconds)
                if frame is None:
                    raise ServerUnreachable(why_silent(endpoint, seconds, socket), endpoint=endpoint, seconds=seconds)
                return frame

            try:
                dealer.connect(endpoint)
            except zmq.ZMQError as error:
                problem = zmq.strerror(error.errno or 0)
                text = f"endpoint: expected tcp://HOST:PORT or ipc://PATH, got {endpoint!r} ({problem})"
                raise ServerUnreachable(text, endpoint=endpoint) from error
            try:
                yield ask
            finally:
                dealer.disable_monitor()


def _receive(
    dealer: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]", handshakes: Handshakes, seconds: float
) -> bytes | None:
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    of_this_socket = handshakes.socket()
    expiry = time.monotonic() + seconds
    while (left := expiry - time.monotonic()) > 0:
        ready = dict(poller.poll(int(left * 1000) + 1))
        if dealer in ready:
            return dealer.recv()
        if monitor in ready:
            told = recv_monitor_message(monitor)
            of_this_socket.take(time.monotonic(), int(told["event"]), int(told["value"]))
    return None
