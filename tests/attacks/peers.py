"""Attackers' connections: ZeroMQ's sockets with any key and routing id, and TCP sockets for hand-made ZMTP."""

import itertools
import socket
import struct
from collections.abc import Iterable, Mapping
from typing import Self

import zmq

from attacks.servers import Attacked
from statsd_bn.messages import Message
from statsd_bn.wire import decode, encode

ANSWER_SECONDS = 5.0

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"

# Flags in the first byte of a frame (ZMTP 3.1): more to come, a length of 8 bytes, a command.
MORE, LONG, COMMAND = 1, 2, 4

_jobs = itertools.count()


def job_of(tenant: str) -> str:
    """A new name of a job that a tenant's key may join."""
    return f"{tenant}-{next(_jobs)}"


class Peers:
    def __init__(self, server: Attacked, tenant: str = "bob") -> None:
        self._server = server
        self._keys = server.keys_of(tenant)
        # An unreferenced socket would be closed at once.
        self.all: list[Peer] = []
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def open(self, routing_id: bytes = b"", kind: int = zmq.DEALER, **options: int) -> "Peer":
        plain = self._context.socket(kind)
        plain.setsockopt(zmq.LINGER, 0)
        if routing_id:
            plain.setsockopt(zmq.ROUTING_ID, routing_id)
        for name, value in options.items():
            plain.setsockopt(getattr(zmq, name), value)
        if self._keys:
            plain.curve_serverkey = self._keys.server.encode()
            plain.curve_publickey = self._keys.pair.public.encode()
            plain.curve_secretkey = self._keys.pair.secret.encode()
        plain.connect(self._server.endpoint)
        self.all.append(Peer(plain))
        return self.all[-1]


class Peer:
    def __init__(self, plain: "zmq.Socket[bytes]") -> None:
        self.socket = plain

    def send(self, *messages: Message | bytes) -> None:
        """Sends messages, or frames as they are; drops the rest as soon as the socket has no room."""
        for message in messages:
            frame = message if isinstance(message, bytes) else encode(message)
            try:
                self.socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                return

    def receive(self, seconds: float = ANSWER_SECONDS) -> Message | None:
        """The next message, or None if none comes in time."""
        if not self.socket.poll(int(seconds * 1000)):
            return None
        return decode(self.socket.recv())

    def receive_frame(self, seconds: float = ANSWER_SECONDS) -> bytes | None:
        return self.socket.recv() if self.socket.poll(int(seconds * 1000)) else None

    def ask(self, message: Message | bytes, seconds: float = ANSWER_SECONDS) -> Message | None:
        self.send(message)
        return self.receive(seconds)

    def close(self) -> None:
        self.socket.close(linger=0)


def greeting(mechanism: bytes = b"NULL", minor: int = 1) -> bytes:
    return SIGNATURE + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes(32)


def framed(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255 or flags & LONG:
        return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


def ready(metadata: Iterable[tuple[bytes, bytes]] | Mapping[bytes, bytes]) -> bytes:
    """The command that ends a handshake without keys; a name may be given twice."""
    pairs = metadata.items() if isinstance(metadata, Mapping) else metadata
    body = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value for name, value in pairs
    )
    return framed(body, COMMAND)


def handshake(*identities: bytes, kind: bytes = b"DEALER") -> bytes:
    return greeting() + ready([(b"Socket-Type", kind), *((b"Identity", one) for one in identities)])


class Wire:
    def __init__(self, server: Attacked) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=ANSWER_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Sends bytes; returns whether the server still took them."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def begin(self, first: bytes) -> bool:
        """Sends the handshake, and waits for the server's: ZeroMQ refuses earlier frames. Returns whether it came."""
        data = b""
        self.send(first)
        while len(data) <= len(greeting()) and (part := self.receive(1.0)):
            data += part
        return len(data) > len(greeting())

    def receive(self, seconds: float = 0.2) -> bytes:
        self.socket.settimeout(seconds)
        try:
            return self.socket.recv(65536)
        except OSError:
            return b""
