"""Private folders: places on this host that only one user can enter.

A socket in such a folder is closed to every other user but root, without a key. Whoever makes one and whoever looks
for something in it both check that it is what it should be: its name may be in a folder that others can write to.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from statsd_bn.errors import ConfigurationError, ServerUnreachable

PRIVATE_MODE = 0o700
OTHERS = 0o077

# The name of the socket in it.
SOCKET = "server"

# What the address of a Unix socket holds, without the zero at its end.
MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107

# Where systems keep the runtime folders of their users, which a session's XDG_RUNTIME_DIR names.
RUNTIME_FOLDERS = Path("/run/user")

# Where a name of this length is too long, folders for one job are made here instead.
SHORT_FOLDER = "/tmp"  # noqa: S108 - a folder with a random name is made in it

# How the folder for one job's server begins; it is removed together with the socket.
JOB_PREFIX = "statsd_bn-job-"


def private_folder(environ: Mapping[str, str]) -> Path:
    """Returns where this user's own folder is to be: in the user's runtime folder, else in that for temporary files.

    Raises:
        ConfigurationError: there is neither.
    """
    return _candidates(environ)[0]


def default_endpoint(environ: Mapping[str, str]) -> str:
    """Returns where a server listens that is told nothing.

    Raises:
        ConfigurationError: the path is too long for a socket, or there is no folder for it.
    """
    path = private_folder(environ) / SOCKET
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigurationError(
            f"endpoint: expected at most {MAX_PATH_BYTES} bytes for the path of a socket, got {path}; "
            "set XDG_RUNTIME_DIR or TMPDIR to a folder with a shorter name, or name an endpoint"
        )
    return f"ipc://{path}"


def find_server(environ: Mapping[str, str]) -> str:
    """Returns the endpoint of this user's server.

    It may have been started where there was no runtime folder, so all folders are looked into.

    Raises:
        ServerUnreachable: no server of this user is running.
        ConfigurationError: the folder where one would be started is not private to this user.
    """
    first = default_endpoint(environ)
    folders = _candidates(environ)
    if os.path.lexists(folders[0]):
        check_private(folders[0])
    for folder in folders:
        if os.path.lexists(folder / SOCKET):
            # Another user's folder among the temporary files says nothing about this user's server.
            with suppress(ConfigurationError):
                check_private(folder)
                return f"ipc://{folder / SOCKET}"
    places = " or ".join(f"ipc://{folder / SOCKET}" for folder in folders)
    raise ServerUnreachable(
        f"no server of this user (uid {os.getuid()}) listens at {places}; start `python -m server`, or name the "
        "endpoint of another one",
        endpoint=first,
        seconds=0.0,
    )


def make_private(folder: Path) -> None:
    """Makes a folder that only this user can enter, or checks that it is one.

    Raises:
        ConfigurationError: there is something else, or it cannot be made.
    """
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=PRIVATE_MODE)
    except OSError as error:
        raise ConfigurationError(f"cannot make the private folder {folder}: {error.strerror}") from error
    check_private(folder)


def check_private(folder: Path) -> None:
    """Raises ConfigurationError unless this is a folder of this user's that nobody else can enter.

    What lies above it is not looked at: who can write there without a sticky bit can put another in its place.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        raise ConfigurationError(f"cannot look at the private folder {folder}: {error.strerror}") from error
    uid, mode = os.getuid(), stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "something else"
        raise ConfigurationError(f"expected {folder} to be a folder, got {kind}; remove it, or name an endpoint")
    if found.st_uid != uid:
        raise ConfigurationError(
            f"expected the folder {folder} to belong to this user (uid {uid}), got uid {found.st_uid}; have it "
            "removed, or set XDG_RUNTIME_DIR to a folder of yours, or name an endpoint"
        )
    if mode & OTHERS:
        raise ConfigurationError(
            f"expected the folder {folder} to be closed to other users, got mode {mode:04o}; chmod 700 {folder}"
        )


def make_job_folder() -> Path:
    """Makes a private folder for the server of one job, with a name that is short enough for a socket in it.

    Raises:
        OSError: it cannot be made.
    """
    folder = Path(tempfile.mkdtemp(prefix=JOB_PREFIX))
    if len(os.fsencode(folder / SOCKET)) > MAX_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=JOB_PREFIX, dir=SHORT_FOLDER))
    return folder


def remove_job_folder(folder: Path) -> None:
    """Removes the folder of one job's server if it is one and empty, and else does nothing."""
    if folder.name.startswith(JOB_PREFIX):
        with suppress(OSError):
            folder.rmdir()


def _candidates(environ: Mapping[str, str]) -> list[Path]:
    """Returns where this user's own folder may be, the best place first.

    A variable that names another user's folder, as `su` leaves it behind, does not count.

    Raises:
        ConfigurationError: there is no such place.
    """
    runtime = (Path(environ.get("XDG_RUNTIME_DIR", "")), RUNTIME_FOLDERS / str(os.getuid()))
    found = [parent / "statsd_bn" for parent in dict.fromkeys(runtime) if parent.is_absolute() and _is_ours(parent)]
    with suppress(OSError):  # where nothing can be written, as in a container that is read-only
        found.append(Path(tempfile.gettempdir()) / f"statsd_bn-{os.getuid()}")
    if not found:
        raise ConfigurationError(
            "expected a folder for this user's socket and key, and found none that can be written; set XDG_RUNTIME_DIR "
            "or TMPDIR to a folder of yours, or name an endpoint"
        )
    return found


def _is_ours(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
