"""Share anonymous memory with processes of the same host by its file descriptor.

The descriptor travels over a Unix socket. Nothing remains when the processes end, however they end.
"""

import fcntl
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from mmap import mmap
from pathlib import Path

from client.transports import group_memory

# Timeout for receiving the memory. A process that has ended closes the connection at once, and the server detects a
# frozen one earlier. Only a busy machine takes this long, and a group must not lose shared memory because of it.
SECONDS = 60.0
CHECK_SECONDS = 0.5  # interval at which a waiting process checks whether the job is broken

# Truncated memory would kill its readers.
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)

# Number of user IDs of a system, and the usual overflow ID, to which unmapped users of a user namespace are mapped.
_USERS, _OVERFLOW_USER = 2**32 - 1, 65_534

_CREDENTIALS, _NAME_BYTES = struct.Struct("3i"), 16


def unavailable_reason() -> str:
    """Why this process cannot share memory with others; empty if it can."""
    if not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no anonymous shared memory (memfd)"
    if reason := group_memory.unavailable_reason():
        return reason
    if os.getuid() == _overflow_user():
        return f"uid {os.getuid()} is the overflow uid of this container, shared by all unmapped users; use another"
    return ""


class MemoryOffer:
    """Memory that other processes of this user and host receive by its `name`; a thread sends it until `close`."""

    def __init__(self, size: int) -> None:
        # An OSError says that the system provides no memory, or no socket.
        with ExitStack() as stack:
            self._descriptor = os.memfd_create("statsd_bn", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            stack.callback(os.close, self._descriptor)
            os.ftruncate(self._descriptor, size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = mmap(self._descriptor, size)
            self.name = f"statsd_bn-{secrets.token_hex(_NAME_BYTES)}"
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(_address(self.name))
            self._listener.listen(128)
            self._thread = threading.Thread(target=self._serve, name="statsd_bn memory", daemon=True)
            self._thread.start()
            self._resources = stack.pop_all()

    def close(self) -> None:
        """End the offer; processes that received the memory keep it."""
        with self._resources:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with closing(peer), suppress(OSError):
                peer.settimeout(SECONDS)
                if _user_of(peer) == os.getuid():
                    socket.send_fds(peer, [b"\0"], [self._descriptor])


def receive_memory(name: str, size: int, is_broken: Callable[[], bool] = bool) -> mmap:
    """Receive the memory of an offer; the text of an OSError says why it cannot be received."""
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(CHECK_SECONDS)
        try:
            server.connect(_address(name))
        except OSError as error:
            raise OSError("it cannot open the shared memory; it is on another host, or in another container") from error
        if _user_of(server) != os.getuid():
            raise OSError(f"the shared memory belongs to uid {_user_of(server)}, and it runs as uid {os.getuid()}")
        descriptors = _receive_descriptors(server, is_broken)
    if not descriptors:
        raise OSError("it received no file descriptor of the shared memory")
    (descriptor,) = descriptors
    try:
        if os.fstat(descriptor).st_size != size:
            raise OSError(f"the shared memory has {os.fstat(descriptor).st_size} bytes, expected {size}")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("the shared memory is not sealed: another process could truncate it")
        return mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _receive_descriptors(server: socket.socket, is_broken: Callable[[], bool]) -> list[int]:
    expiry = time.monotonic() + SECONDS
    while True:
        try:
            return socket.recv_fds(server, 1, 1)[1]
        except TimeoutError:
            if is_broken() or time.monotonic() >= expiry:
                raise


def _overflow_user() -> int:
    """Overflow user ID of this user namespace; -1 if all users are mapped."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        # Each line is a range: first ID inside, first ID outside, length.
        has_all = sum(int(line.split()[2]) for line in lines) >= _USERS
        return -1 if has_all else int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        return _OVERFLOW_USER


def _address(name: str) -> str:
    """Abstract address of an offer: without a file, so it ends with its process."""
    return f"\0{name}"


def _user_of(peer: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
