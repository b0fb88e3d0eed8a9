"""ipc paths: binds a socket file of mode 0600 without replacing another file or a running server's socket.

ZeroMQ removes any file at the path before it binds. So the socket is bound here and its descriptor passed to ZeroMQ:
the system refuses a path in use. Only an abandoned socket is removed.
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
from pathlib import Path

from statsd_bn.endpoints import check_folder, ipc_path, make_private_folder, private_folder, remove_job_folder
from statsd_bn.errors import BindError, ConfigurationError

logger = logging.getLogger("statsd_bn.server")

PRIVATE_UMASK = 0o177  # for mode 0600

# A server that starts in the same folder needs a millisecond.
LOCK_SECONDS = 5.0
LOCK_PAUSE_SECONDS = 0.01

# Errors of file systems without locks. Servers that start there in the same millisecond may replace each other's
# socket.
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
NO_DESCRIPTOR = -1  # makes ZeroMQ create the socket itself

# Connections that wait to be accepted, for TCP as well: after a restart all members connect at once, and the system
# retries a refused one only after a moment.
BACKLOG = 4096


def remove_socket(path: Path, bound: os.stat_result) -> None:
    """Remove the file of a bound socket if it is unchanged, and its folder if that was created for one job.

    Call it while the socket is open, so that no other server can own the path.
    """
    with suppress(OSError):
        if os.path.samestat(path.lstat(), bound):
            path.unlink()
            remove_job_folder(path.parent)


@contextmanager
def listen(endpoint: str) -> Iterator[int]:
    """Listen at an ipc path; yields the descriptor of the socket, or `NO_DESCRIPTOR` for any other endpoint.

    A caller that leaves the block without an exception owns the descriptor.
    """
    path = ipc_path(endpoint)
    if path is None:
        yield NO_DESCRIPTOR
        return
    if _is_own(path.parent):
        make_private_folder(path.parent)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        try:
            check_folder(path.parent)
            if path.parent.stat().st_mode & stat.S_IWGRP:
                text = "the group of %s can write to it and could replace the server's socket; chmod g-w %s"
                logger.warning(text, path.parent, path.parent)
            with _folder_lock(path.parent, endpoint):
                _remove_abandoned(path, endpoint)
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


def _is_own(folder: Path) -> bool:
    try:
        return folder == private_folder(os.environ)
    except ConfigurationError:
        # A path given by the user needs no private folder.
        return False


def _bind(bound: socket.socket, path: Path) -> None:
    before = os.umask(PRIVATE_UMASK)
    try:
        bound.bind(os.fsencode(path))
    finally:
        os.umask(before)
    bound.listen(BACKLOG)


@contextmanager
def _folder_lock(folder: Path, endpoint: str) -> Iterator[None]:
    """Lock a folder against other servers: between `bind` and `listen` a socket looks abandoned."""
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


def _remove_abandoned(path: Path, endpoint: str) -> None:
    """Remove an abandoned socket; raise BindError for anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise BindError(
            f"cannot listen on {endpoint}: the path exists and is no socket; remove it, or give another path",
            endpoint=endpoint,
        )
    if _is_in_use(path):
        raise BindError(f"cannot listen on {endpoint}: a running server listens there", endpoint=endpoint)
    path.unlink()


def _is_in_use(path: Path) -> bool:
    """Whether a process listens; only a refused connection proves that none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(0)
        try:
            client.connect(os.fsencode(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
