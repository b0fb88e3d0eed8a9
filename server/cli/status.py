"""Requests to a running server: its report for `python -m server status`, where it listens, and whether it answers.

If the server ends before it answers, the request is sent again to its successor.
"""

import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TextIO

import zmq
from zmq.utils.monitor import recv_monitor_message

from server.config import bind_endpoints
from server.security.keygen import check_curve
from statsd_bn import endpoints, limits
from statsd_bn.checks import check_integer
from statsd_bn.endpoints import HANDSHAKES, HandshakeMonitor, SocketMonitor, explain_no_answer
from statsd_bn.errors import AuthenticationRefused, ConfigurationError, ProtocolError, ServerUnreachable, from_wire
from statsd_bn.keys import ClientKeys
from statsd_bn.messages import Failure, Message, Status, StatusRequest
from statsd_bn.text import escape_nested, log_line
from statsd_bn.wire import decode, encode

ANSWER_SECONDS = 5.0
CONNECT_MILLISECONDS = 1000  # of one attempt; the next attempt uses another local port
GREETING_SECONDS = 1.0  # ZeroMQ's thread sends the greeting within milliseconds, however busy the server is

Query = Callable[[Message], bytes]
"""Sends a request and returns the next frame."""


@contextmanager
def query_connection(endpoint: str, seconds: float = ANSWER_SECONDS, keys: ClientKeys | None = None) -> Iterator[Query]:
    """Connect to the server at `endpoint`; yields a function that sends requests."""
    endpoints.check_server_socket(endpoint)
    handshakes = HandshakeMonitor(endpoint, has_key=keys is not None)
    with zmq.Context() as context, ExitStack() as opened:

        def reconnect() -> Callable[[bytes, float], bytes | None]:
            return opened.enter_context(_connect(context, endpoint, keys, SocketMonitor(handshakes)))

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
    """Whether a ZeroMQ server listens at a TCP endpoint; the server counts one refused connection."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    # ValueError for port *.
    with suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), GREETING_SECONDS) as to:
        return to.recv(1) == b"\xff"
    return False


@contextmanager
def _connect(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: ClientKeys | None, handshakes: SocketMonitor
) -> Iterator[Callable[[bytes, float], bytes | None]]:
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        # After a timeout ZeroMQ tries again, from another local port: the server may still hold a connection from the
        # former port.
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
        dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
        if keys:
            check_curve()
            dealer.curve_serverkey = keys.server.encode()
            dealer.curve_publickey = keys.pair.public.encode()
            dealer.curve_secretkey = keys.pair.secret.encode()
        with dealer.get_monitor_socket(HANDSHAKES) as monitor:
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


SIZES = ("world_size", "missing", "members_left_out")  # numbers of members in a group's entry

# Timeout of `check`: a server answers its own host within milliseconds, a loaded server later. A health probe that runs
# `check` needs a longer timeout, or it ends `check` before the reason is printed.
CHECK_SECONDS = 3.0

# A server that was just started in the background listens within one second.
FIND_SECONDS, FIND_PAUSE_SECONDS = 2.0, 0.05

# Wildcard addresses for listening, each with a loopback address to connect to.
ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - nothing is bound here


def ask(endpoint: str, seconds: float = ANSWER_SECONDS, keys: ClientKeys | None = None) -> dict[str, Any]:
    """Report of the server at `endpoint`; raises ServerUnreachable, AuthenticationRefused or ConfigurationError."""
    with query_connection(endpoint, seconds, keys) as question:
        return report_of(endpoint, question(StatusRequest()))


def report_of(endpoint: str, frame: bytes) -> dict[str, Any]:
    """Report in a frame from the server at `endpoint`."""
    try:
        answer = decode(frame)
    except ProtocolError as error:
        raise ServerUnreachable(f"{endpoint} gave no status: {error.message}", endpoint=endpoint) from error
    if isinstance(answer, Failure) and answer.code == AuthenticationRefused.code:
        raise from_wire(answer.code, answer.message, answer.fields)
    if not isinstance(answer, Status):
        text = answer.message if isinstance(answer, Failure) else type(answer).__name__
        raise ServerUnreachable(f"{endpoint} gave no status: {text}", endpoint=endpoint)
    report: dict[str, Any] = escape_nested(answer.report)
    with refuses_malformed():
        # Bounded, because readers of the report make lists of these sizes.
        for entry in (*report["groups"], *report.get("ended", ())):
            for name in (name for name in SIZES if name in entry):
                check_integer(name, entry[name], 0, limits.MAX_MEMBERS)
    return report


@contextmanager
def refuses_malformed() -> Iterator[None]:
    """Context or decorator of code that reads a report: raises ServerUnreachable if the report is malformed."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ProtocolError) as error:
        what = error.message if isinstance(error, ProtocolError) else type(error).__name__
        text = f"expected a status report of this version, got a malformed one: {what}"
        raise ServerUnreachable(text) from error


def own_endpoint(environ: Mapping[str, str]) -> str:
    """Endpoint of this host's server: the first in STATSD_BN_BIND, else this user's server; raises if it finds none."""
    bound = bind_endpoints(environ)
    if not bound:
        expiry = time.monotonic() + FIND_SECONDS
        while True:
            try:
                return endpoints.find_server(environ)
            except ServerUnreachable:
                if time.monotonic() >= expiry:
                    raise
            time.sleep(FIND_PAUSE_SECONDS)
    endpoint = bound[0]
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        return endpoint
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ConfigurationError(f"ENDPOINT: expected one, since STATSD_BN_BIND has no fixed port: {endpoint!r}")
    return f"{scheme}://{_address_of(host)}:{port}"


def _address_of(host: str) -> str:
    """Address to connect to, given the host of a listening endpoint: a name, a wildcard or an interface."""
    if host not in {name for _, name in socket.if_nameindex()}:
        return ALL_ADDRESSES.get(host, host)
    with zmq.Context() as context, context.socket(zmq.PAIR) as found:
        # ZeroMQ accepts an interface name for bind only.
        try:
            found.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            problem = zmq.strerror(error.errno or 0)
            text = f"STATSD_BN_BIND: expected an interface with an address, got {host!r} ({problem})"
            raise ConfigurationError(text) from error
        address = found.getsockopt_string(zmq.LAST_ENDPOINT)
    return address.removeprefix("tcp://").rpartition(":")[0]


REFRESH_SECONDS = 1.0

# Terminal control: clear all; cursor to the top left; clear the rest of the line; clear all below. Overwriting avoids
# flicker.
_CLEAR, _HOME, _END_OF_LINE, _BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"


def watch(
    text: Callable[[], str],
    out: TextIO | None = None,
    pause: Callable[[float], None] = time.sleep,
    failed: Callable[[ServerUnreachable], str] = log_line,
) -> None:
    """Prints a text every second, until Ctrl-C; `failed` returns the text while the server does not answer."""
    out = out or sys.stdout
    is_terminal = out.isatty()
    try:
        shown = text()
        out.write(_CLEAR if is_terminal else "")
        while True:
            lines = shown.replace("\n", f"{_END_OF_LINE}\n")
            out.write(f"{_HOME}{lines}{_END_OF_LINE}\n{_BELOW}" if is_terminal else f"{shown}\n")
            out.flush()
            pause(REFRESH_SECONDS)
            try:
                shown = text()
            except ServerUnreachable as error:
                shown = failed(error)
    except KeyboardInterrupt:
        out.write("\n" if is_terminal else "")
