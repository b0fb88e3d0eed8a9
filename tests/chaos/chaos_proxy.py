"""A TCP proxy that disturbs the stream between a member (`UP`) and its server (`DOWN`); one thread owns all sockets."""

import queue
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

UP, DOWN = DIRECTIONS = ("up", "down")

# How a connection ends: in order, as when a process exits, or by a reset, as from a host that has restarted.
FIN, RST = ENDS = ("fin", "rst")

CHUNK_BYTES = 65536
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 20.0


@dataclass(eq=False)
class _Flow:
    """One direction of one connection; it reads only after all bytes that it read before have been sent."""

    direction: str
    source: socket.socket
    sink: socket.socket
    pending: bytearray = field(default_factory=bytearray)
    stalled_until: float = 0.0


class Proxy:
    """Forward TCP connections to a server, with faults on demand; a context manager."""

    def __init__(self, target: str, chance: random.Random) -> None:
        self.connections = 0
        self.halved = 0
        self._target = target
        self._chance = chance
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._waker, self._woken = socket.socketpair()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._flows: list[_Flow] = []
        self._halve_next: dict[str, str] = {}
        self._running = True
        self._thread = threading.Thread(target=self._run, name=f"proxy of {target}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._order(self._stop)
        self._thread.join(ANSWER_SECONDS)
        for each in (self._listener, self._waker, self._woken):
            each.close()

    def cut(self, end: str = RST) -> None:
        self._order(lambda: self._cut_all(end))

    def stall(self, seconds: float, *directions: str) -> None:
        """Keep all connections, and forward nothing in these directions (default: both) for some time."""
        self._order(lambda: self._stall_all(time.monotonic() + seconds, directions or DIRECTIONS))

    def halve(self, direction: str, end: str = RST) -> None:
        """Forwards only the start of the next chunk in this direction, and then ends that chunk's connection."""
        self._order(lambda: self._halve_next.update({direction: end}))

    def _order(self, order: Callable[[], None]) -> None:
        done = threading.Event()
        self._orders.put(lambda: (order(), done.set()))
        self._waker.send(b"\0")
        if not done.wait(ANSWER_SECONDS):
            raise TimeoutError(f"the proxy of {self._target} did not react within {ANSWER_SECONDS:g} s")

    def _run(self) -> None:
        while self._running:
            now = time.monotonic()
            flowing = [flow for flow in self._flows if flow.stalled_until <= now]
            readers = [self._listener, self._woken, *(flow.source for flow in flowing if not flow.pending)]
            writers = [flow.sink for flow in flowing if flow.pending]
            ends = [flow.stalled_until - now for flow in self._flows if flow.stalled_until > now]
            readable, writable, _ = select.select(readers, writers, [], min(ends, default=None))
            for flow in flowing:
                # An earlier flow of this turn may have ended this one.
                if flow in self._flows and (flow.source in readable or flow.sink in writable):
                    self._forward(flow)
            if self._listener in readable:
                self._accept()
            if self._woken in readable:
                self._obey()

    def _obey(self) -> None:
        self._woken.recv(CHUNK_BYTES)
        with suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()

    def _stop(self) -> None:
        self._running = False
        self._cut_all(RST)

    def _accept(self) -> None:
        member, _ = self._listener.accept()
        try:
            server = _connect(self._target)
        except OSError:
            member.close()
            return
        self.connections += 1
        for each in (member, server):
            each.settimeout(0)
        self._flows += [_Flow(UP, member, server), _Flow(DOWN, server, member)]

    def _forward(self, flow: _Flow) -> None:
        """Forward pending data; the end of one side ends the other."""
        try:
            if not flow.pending:
                flow.pending += flow.source.recv(CHUNK_BYTES)
                if not flow.pending:
                    self._end(flow, FIN)
                    return
                if flow.direction in self._halve_next:
                    self._halve(flow)
                    return
            del flow.pending[: flow.sink.send(flow.pending)]
        except BlockingIOError:
            pass
        except OSError:
            self._end(flow, RST)

    def _halve(self, flow: _Flow) -> None:
        end = self._halve_next.pop(flow.direction)
        flow.sink.send(flow.pending[: self._chance.randrange(len(flow.pending))])
        self.halved += 1
        self._end(flow, end)

    def _stall_all(self, until: float, directions: Collection[str]) -> None:
        for flow in self._flows:
            if flow.direction in directions:
                flow.stalled_until = until

    def _cut_all(self, end: str) -> None:
        while self._flows:
            self._end(self._flows[0], end)

    def _end(self, flow: _Flow, end: str) -> None:
        self._flows = [other for other in self._flows if other.source not in {flow.source, flow.sink}]
        for each in (flow.source, flow.sink):
            _close(each, end)


def _connect(endpoint: str) -> socket.socket:
    scheme, _, address = endpoint.partition("://")
    if scheme == "tcp":
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), CONNECT_SECONDS)
    found = socket.socket(socket.AF_UNIX)
    try:
        found.connect(address)
    except OSError:
        found.close()
        raise
    return found


def _close(connection: socket.socket, end: str) -> None:
    with suppress(OSError):
        if end == RST:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            # A close with unread bytes would send a reset.
            while connection.recv(CHUNK_BYTES):
                pass
    connection.close()
