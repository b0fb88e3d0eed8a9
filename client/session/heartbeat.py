"""Heartbeats: a socket and a thread that show the server that this process is alive, and answer its stack requests.

ZeroMQ's own heartbeats would not do: its I/O thread answers them even if Python is stuck.
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import zmq

from client.diagnostics.broken_job import BrokenJob
from client.session.protocol.heartbeats import HeartbeatScheduler
from client.session.protocol.session import Session
from statsd_bn.errors import ConfigurationError, StatsdBNError
from statsd_bn.keys import ClientKeys
from statsd_bn.messages import StackRequest
from statsd_bn.wire import encode

logger = logging.getLogger("statsd_bn.client")

RECONNECT_MILLISECONDS = 50  # ZeroMQ's pause; the server waits 300 ms before it takes the member for dead
CONNECT_MILLISECONDS = 1000  # timeout of an attempt; TCP itself repeats a lost first packet after 1, 3 and 7 s

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


class HeartbeatSocket:
    """A socket that sends frames at once or drops them; one thread uses it, but any thread may call `wake`."""

    # It lives as long as the connection, so the server always knows where it reaches a live process.

    def __init__(self, context: Context, endpoint: str, keys: ClientKeys | None = None) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        self._socket = new_socket(context, endpoint, linger=0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # no queue without a connection
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        secure(self._socket, keys)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        for readable in (self._socket, self._monitor, self._reader):
            self._poller.register(readable, zmq.POLLIN)

    def send(self, frame: bytes) -> bool:
        """Send a frame if it can leave now; return whether it could."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    @property
    def is_connected(self) -> bool:
        """Whether a frame could leave now."""
        return bool(self._socket.poll(0, zmq.POLLOUT))

    def wait(self, seconds: float) -> bool:
        """Wait for a connection, a frame, a `wake` or the timeout; return whether it has connected."""
        ready = dict(self._poller.poll(max(0, math.ceil(seconds * 1000))))
        with suppress(BlockingIOError):
            self._reader.recv(64)
        return self._monitor in ready and bool(self._drain(self._monitor))

    def received(self) -> list[bytes]:
        """Return the frames that have arrived."""
        return self._drain(self._socket)

    def wake(self) -> None:
        """End a `wait`; from any thread."""
        with suppress(OSError):  # a full buffer wakes as well as one byte more; on a closed socket no thread waits
            self._writer.send(b"\0")

    def close(self) -> None:
        """Close all of its sockets."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._reader.close()
        self._writer.close()

    @staticmethod
    def _drain(readable: "zmq.Socket[bytes]") -> list[bytes]:
        frames = []
        with suppress(zmq.Again):
            while True:
                frames.append(readable.recv_multipart(zmq.NOBLOCK)[-1])
        return frames


def new_socket(context: Context, endpoint: str, linger: int) -> zmq.Socket[bytes]:
    """Return a socket to be connected to an endpoint; `linger` in milliseconds."""
    found = context.socket(zmq.DEALER)
    found.setsockopt(zmq.LINGER, linger)
    found.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
    found.setsockopt(zmq.IPV6, int("[" in endpoint))
    return found


def secure(socket: "zmq.Socket[bytes]", keys: ClientKeys | None) -> None:
    """Set a socket's CURVE keys, before it connects; do nothing without keys."""
    if keys is None:
        return
    if not zmq.has("curve"):
        raise ConfigurationError(f"curve: libzmq {zmq.zmq_version()} was built without it; install pyzmq from a wheel")
    socket.curve_serverkey = keys.server.encode()
    socket.curve_publickey = keys.pair.public.encode()
    socket.curve_secretkey = keys.pair.secret.encode()


class HeartbeatThread:
    """A running thread; `stop` ends it, and it closes the socket."""

    def __init__(
        self,
        heartbeat_socket: HeartbeatSocket,
        sessions: Callable[[], list[Session]],
        on_reconnected: Callable[[], None],
        on_unused: Callable[[], None],
        job: BrokenJob,
    ) -> None:
        self._job = job
        self._socket = heartbeat_socket
        self._sessions = sessions
        self._on_reconnected = on_reconnected
        self._on_unused = on_unused
        self._has_connected = False
        self._scheduler = HeartbeatScheduler()
        self._stopping = False
        # A daemon, so that a process that never calls `stop` can end.
        self._thread = threading.Thread(target=self._run, name="statsd_bn heartbeat", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Announce new sessions to the server now."""
        self._socket.wake()

    def stop(self) -> None:
        """End the thread now; harmless when repeated."""
        self._stopping = True
        self._socket.wake()
        self._thread.join()

    def _run(self) -> None:
        scheduler = self._scheduler
        try:
            while not self._stopping:
                has_connected = self._socket.wait(scheduler.seconds_until_due(time.monotonic(), self._sessions()))
                now, sessions = time.monotonic(), self._sessions()
                if has_connected:
                    scheduler.on_reconnected()
                for frame in self._socket.received():
                    self._send(scheduler.on_unsolicited(frame, sessions))
                    with _errors_logged():
                        self._handle_request(frame, sessions)
                for session in scheduler.sessions_due(now, sessions):
                    if self._socket.send(session.heartbeat()):
                        scheduler.mark_sent(session)
                with _errors_logged():
                    is_connected = self._socket.is_connected
                    if text := scheduler.outage_warning(now, sessions, is_connected=is_connected):
                        logger.warning("%s", text)
                with _errors_logged():
                    if scheduler.is_unused(now, sessions):
                        self._on_unused()
                with _errors_logged():
                    self._send(scheduler.skew_frames(now, sessions))
                with _errors_logged():
                    self._send(scheduler.timing_frames(now, sessions))
                if has_connected:
                    # After the heartbeat: a server that sees other connections close must know this one.
                    if self._has_connected:
                        self._on_reconnected()
                    self._has_connected = True
                with _errors_logged():
                    self._job.check(time.monotonic())
        finally:
            self._socket.close()

    def _send(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self._socket.send(frame)

    def _handle_request(self, frame: bytes, sessions: list[Session]) -> None:
        match self._scheduler.request(frame, sessions):
            case session, StackRequest(number=number, torch_group=group):
                self._socket.send(encode(self._job.sampler.sample(group).report(session.member_token, number)))
            case _, StatsdBNError() as error:
                self._job.report(error)


@contextmanager
def _errors_logged() -> Iterator[None]:
    """Log errors, which must not end the heartbeats."""
    try:
        yield
    except Exception:
        logger.debug("sampling this process failed", exc_info=True)
