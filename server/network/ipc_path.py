"""ipc paths: a socket file for this user alone, which never replaces another file or a running server's socket.

ZeroMQ removes whatever is at the path before it binds. So the socket is bound here and handed to ZeroMQ: the system
refuses a path that is taken. Only a socket that nobody listens on any more is removed.
"""

import errno
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from statsd_bn.endpoints import check_folder, ipc_path, make_private, private_folder, remove_job_folder
from statsd_bn.errors import BindError, ConfigurationError

logger = logging.getLogger("statsd_bn.server")

# No execution, and nothing for others.
PRIVATE_UMASK = 0o177

# A server that starts in the same folder needs a millisecond.
LOCK_SECONDS = 5.0
LOCK_PAUSE_SECONDS = 0.01

# What file systems without locks say. Servers that start there in the same millisecond may take each other's path.
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}

# To ZeroMQ this means "make a socket yourself".
NO_DESCRIPTOR = -1

# Connections that wait to be accepted, for TCP as well: after a restart all members come at once, and the system tries
# one that finds no room again only after a moment.
BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class SocketFile:
    """The file of a bound socket, known by its number in the file system."""

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, endpoint: str) -> "SocketFile | None":
        """The file of an endpoint; None if it has none."""
        path = ipc_path(endpoint)
        with suppress(OSError):
            if path:
                found = path.lstat()
                return cls(path.absolute(), found.st_dev, found.st_ino)
        return None

    def remove(self) -> None:
        """Remove the file if it is still this one, and the folder if that was made for one job.

        Call it while the socket is open: nobody can have taken over the path then.
        """
        with suppress(OSError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                self.path.unlink()
                remove_job_folder(self.path.parent)


@contextmanager
def listening(endpoint: str) -> Iterator[int]:
    """Descriptor of a socket that listens at an ipc path; `NO_DESCRIPTOR` for any other endpoint.

    A caller that leaves the block without an exception owns the descriptor.

    Raises:
        BindError: the path is taken, or cannot be bound.
        ConfigurationError: another user can write to its folder.
    """
    path = ipc_path(endpoint)
    if path is None:
        yield NO_DESCRIPTOR
        return
    if _is_own(path.parent):
        make_private(path.parent)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        try:
            _check(path.parent)
            with _locked(path.parent, endpoint):
                _make_room(path, endpoint)
                _bind(bound, path)
        except OSError as error:
            raise BindError(f"cannot listen on {endpoint}: {error.strerror or error}", endpoint=endpoint) from error
        bound.settimeout(0)
        try:
            yield bound.fileno()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        bound.detach()


def _check(folder: Path) -> None:
    check_folder(folder)
    if folder.stat().st_mode & stat.S_IWGRP:
        logger.warning(
            "the group of %s can write to it, and remove the server's socket or put another in its place; chmod g-w %s",
            folder,
            folder,
        )


def _is_own(folder: Path) -> bool:
    try:
        return folder == private_folder(os.environ)
    except ConfigurationError:
        # There is no private folder, and a path that was named needs none.
        return False


def _bind(bound: socket.socket, path: Path) -> None:
    before = os.umask(PRIVATE_UMASK)
    try:
        bound.bind(os.fsencode(path))
    finally:
        os.umask(before)
    bound.listen(BACKLOG)


@contextmanager
def _locked(folder: Path, endpoint: str) -> Iterator[None]:
    """Keep other servers away from the paths of a folder: between `bind` and `listen` a socket looks abandoned."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        expiry = time.monotonic() + LOCK_SECONDS
        while not _lock(descriptor):
            if time.monotonic() >= expiry:
                text = f"cannot listen on {endpoint}: another process has locked {folder} for {LOCK_SECONDS:g} s"
                raise BindError(text, endpoint=endpoint)
            time.sleep(LOCK_PAUSE_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _make_room(path: Path, endpoint: str) -> None:
    """Remove a socket that nobody listens on; raise BindError if anything else is there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise BindError(
            f"cannot listen on {endpoint}: expected nothing there, or the socket of a server that has ended, and found "
            "a file, a folder or a link, which is left as it is; give another path, or remove it",
            endpoint=endpoint,
        )
    if _is_served(path):
        raise BindError(f"cannot listen on {endpoint}: a running server listens there", endpoint=endpoint)
    path.unlink()


def _is_served(path: Path) -> bool:
    """Whether somebody listens, or may: only a refusal shows that nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(0)
        try:
            caller.connect(os.fsencode(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
