"""Passing memory on: one process makes it, and hands it to the others of this host over a Unix socket.

Who can take it is found out by trying: another host cannot connect, another user is turned away. The memory has no
name, so nothing is left behind, however its processes end.
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
from contextlib import closing, suppress
from mmap import mmap
from pathlib import Path

from client.transports import group_memory

# How long a process may take to hand the memory over. A process that has ended closes the connection at once, and the
# server detects a frozen one earlier. So only a busy machine needs this long, and a group must not leave shared memory
# for that.
SECONDS = 60.0

# How often a wait for it checks whether the job has broken.
CHECK_SECONDS = 0.5

# Memory that somebody cuts short would kill whoever reads it.
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)

# How many users a system has, and the one that stands for those whom a user namespace does not have.
_USERS, _UNKNOWN_USER = 2**32 - 1, 65_534

_CREDENTIALS = struct.Struct("3i")
_NAME_BYTES = 16


def why_not() -> str:
    """Returns why this process cannot share memory with others; empty if it can."""
    if not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no memory that processes can share without a name"
    if why := group_memory.why_not():
        return why
    if os.getuid() == _unknown_user():
        return f"user {os.getuid()} stands here for all users outside of this container; run as another user"
    return ""


class Offer:
    """Memory that other processes of this user on this host may take; a thread hands it out until `close`.

    Args:
        size: in bytes.

    Raises:
        OSError: the system gives no memory, or no socket.

    Attributes:
        name: where to take it.
        memory: the memory, all zero at first.
    """

    def __init__(self, size: int) -> None:
        self._descriptor = os.memfd_create("statsd_bn", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            os.ftruncate(self._descriptor, size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = mmap(self._descriptor, size)
            self.name = f"statsd_bn-{secrets.token_hex(_NAME_BYTES)}"
            self._listener.bind(_address(self.name))
            self._listener.listen(128)
            self._thread = threading.Thread(target=self._serve, name="statsd_bn memory", daemon=True)
            self._thread.start()
        except BaseException:
            self._listener.close()
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Hands out no more; what was handed out stays."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        os.close(self._descriptor)

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


def take(name: str, size: int, is_broken: Callable[[], bool] = bool) -> mmap:
    """Takes memory that a process of this user on this host offers.

    Args:
        name: of the offer.
        size: in bytes.
        is_broken: whether waiting for the other process is in vain.

    Raises:
        OSError: it cannot; the text says why.
    """
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(CHECK_SECONDS)
        try:
            server.connect(_address(name))
        except OSError as error:
            raise OSError(
                "it cannot reach the memory of the others; it is on another host, or in a container"
            ) from error
        if _user_of(server) != os.getuid():
            raise OSError(
                f"the memory of the others is that of user {_user_of(server)}, and this is user {os.getuid()}"
            )
        descriptors = _received(server, is_broken)
    if not descriptors:
        raise OSError("the memory of the others was not handed over")
    (descriptor,) = descriptors
    try:
        if os.fstat(descriptor).st_size != size:
            raise OSError(f"the memory of the others has {os.fstat(descriptor).st_size} bytes, not {size}")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("the memory of the others is not sealed: whoever has it could cut it short")
        return mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _received(server: socket.socket, is_broken: Callable[[], bool]) -> list[int]:
    expiry = time.monotonic() + SECONDS
    while True:
        try:
            _, descriptors, _, _ = socket.recv_fds(server, 1, 1)
        except TimeoutError:
            if is_broken() or time.monotonic() >= expiry:
                raise
        else:
            return descriptors


def _unknown_user() -> int:
    """Returns the number that the system gives all users that this user namespace does not have; -1 if it has all."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        # Each line is a range: first number here, first number outside, how many.
        has_all = sum(int(line.split()[2]) for line in lines) >= _USERS
        return -1 if has_all else int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        return _UNKNOWN_USER


def _address(name: str) -> str:
    """The zero byte puts it beside the file system, where it goes with its process."""
    return f"\0{name}"


def _user_of(peer: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
