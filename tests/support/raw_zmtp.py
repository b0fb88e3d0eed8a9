"""A peer that speaks ZMTP over a plain socket, to send frames that libzmq never sends."""

import socket
import struct
from typing import Self

WAIT_SECONDS = 30.0

_GREETING_BYTES = 64
PING = b"\x04\x07\x04PING\0\0"


def greeting(major: int = 3) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + bytes([major, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)


def properties(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"".join(bytes([len(name)]) + name + struct.pack(">I", len(value)) + value for name, value in pairs)


def ready(*pairs: tuple[bytes, bytes]) -> bytes:
    body = b"\x05READY" + properties((b"Socket-Type", b"DEALER"), *pairs)
    return b"\x06" + struct.pack(">Q", len(body)) + body


def message(body: bytes) -> bytes:
    return b"\x02" + struct.pack(">Q", len(body)) + body


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes a connection; reads all data before that."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


class RawPeer:
    """A connection after the handshake; with `is_late` it sends its properties `pairs` after receiving the server's."""

    def __init__(self, endpoint: str, *pairs: tuple[bytes, bytes], is_late: bool = False) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), WAIT_SECONDS)
        self.socket.sendall(greeting())
        if not is_late:
            self.socket.sendall(ready(*pairs))
        self._receive(_GREETING_BYTES)
        self.receive()
        if is_late:
            self.socket.sendall(ready(*pairs))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, frame: bytes) -> None:
        self.socket.sendall(message(frame))

    def receive(self) -> bytes:
        """Body of the next frame or command."""
        (flags,) = self._receive(1)
        size = struct.unpack(">Q", self._receive(8))[0] if flags & 2 else self._receive(1)[0]
        return self._receive(size)

    def reset(self) -> None:
        """Resets the connection, like the death of a process with unread data."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.socket.recv(size - len(data))
            if not chunk:
                raise EOFError(f"expected {size} bytes, got {len(data)}")
            data += chunk
        return data
