"""Endpoints: where servers may listen and clients may connect, and where this user's own server is.

TCP needs CURVE keys, on loopback too. Without keys a server listens on a Unix socket that only its user can open, in a
folder that no other user can write to. Server and client both check this. `--insecure` and STATSD_BN_INSECURE=1 admit
TCP without keys, for a network that is closed to strangers.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from statsd_bn.error_text import error_text
from statsd_bn.errors import AuthenticationRefused, ConfigurationError, ServerUnreachable

MAX_PORT = 65_535
MAX_DIGITS = 5

PRIVATE_MODE = 0o700
OTHERS = 0o077

# The name of the socket in this user's own folder, and in that of one job.
SOCKET = "server"

# What the address of a Unix socket holds, without the zero at its end.
MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107

# Where systems keep the runtime folders of their users, which a session's XDG_RUNTIME_DIR names.
RUNTIME_FOLDERS = Path("/run/user")

# Where a name of this length is too long, folders for one job are made here instead.
SHORT_FOLDER = "/tmp"  # noqa: S108 - a folder with a random name is made in it

# How the folder for one job's server begins; it is removed together with the socket.
JOB_PREFIX = "statsd_bn-job-"

# ZeroMQ has tried for seconds already, and a network that lets something through does so in milliseconds.
PROBE_SECONDS = 1.0

START = "Is `python -m server` running there? Start it, or correct the endpoint."
LOST_ON_THE_WAY = "A firewall, a wrong address or a wrong port? Nothing came back, not even a refusal."
OTHER_PROGRAM = "Is it a statsd_bn server? One that has too much to do, or is stopped, does not answer either."


def check_endpoint(endpoint: str, name: str = "endpoint") -> None:
    """Raises ConfigurationError unless an endpoint is `tcp://HOST:PORT` or `ipc://PATH`.

    ZeroMQ would take a port modulo 65,536 and overlook letters behind it. It also takes `ipc://*` and Linux's names
    that begin with @, but no folder protects such a socket: every user of the host can connect to it.
    """
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in {"tcp", "ipc"} or not address:
        raise ConfigurationError(f"{name}: expected tcp://HOST:PORT or ipc://PATH, got {endpoint!r}")
    if scheme == "ipc" and (address == "*" or address.startswith("@")):
        raise ConfigurationError(
            f"{name}: expected ipc://PATH in a folder that other users cannot write to, got {endpoint!r}, which is in "
            "no folder"
        )
    host, _, port = address.rpartition(":")
    if scheme == "tcp" and not (host and _is_port(port)):
        raise ConfigurationError(f"{name}: expected tcp://HOST:PORT with a port of 0 to {MAX_PORT}, got {endpoint!r}")


def _is_port(port: str) -> bool:
    # `*` lets the system choose one.
    return port == "*" or (port.isascii() and port.isdecimal() and len(port) <= MAX_DIGITS and int(port) <= MAX_PORT)


def ipc_path(endpoint: str) -> Path | None:
    """Returns the file of an ipc endpoint, and None for other endpoints."""
    address = endpoint.removeprefix("ipc://")
    return None if address in {endpoint, ""} else Path(address)


def needs_keys(endpoint: str) -> bool:
    """Returns whether server and client need keys at an endpoint, unless both are told that the network is closed."""
    return endpoint.startswith("tcp://")


def check_key(endpoint: str, *, has_key: bool, insecure: bool) -> None:
    """Checks that a client has a key if its endpoint needs one.

    Raises:
        AuthenticationRefused: the client needs a key.
        ConfigurationError: the endpoint is malformed.
    """
    check_endpoint(endpoint)
    if needs_keys(endpoint) and not (has_key or insecure):
        raise AuthenticationRefused(
            f"not connected to {endpoint}: TCP needs a key, and this client has none; pass connect(curve=...) "
            "or --curve, or set STATSD_BN_CURVE. For a server with --insecure in a closed network set "
            "STATSD_BN_INSECURE=1",
            reason="no key",
        )


def check_server(endpoint: str) -> None:
    """Checks an endpoint before a client connects to it.

    Raises:
        ConfigurationError: the endpoint is malformed, or its socket may be another user's.
        ServerUnreachable: the file system keeps this user from the socket.
    """
    check_endpoint(endpoint)
    path = ipc_path(endpoint)
    if path is None:
        return
    obstacle = "Permission denied"
    try:
        check_folder(path.parent)
        for found in (path.lstat(), path.stat()):
            _check_owner(path, found)
        if os.access(path, os.W_OK):
            return
    except (FileNotFoundError, NotADirectoryError):
        return  # the server may not have started yet
    except OSError as error:
        obstacle = str(error.strerror)
    raise ServerUnreachable(
        f"{endpoint} is closed to this user (uid {os.getuid()}): {obstacle}. A server in a private folder is for the "
        "user who started it; start one of your own, or ask for one that listens with keys",
        endpoint=endpoint,
        seconds=0.0,
    )


def check_folder(folder: Path) -> None:
    """Raises ConfigurationError if another user could put a socket into a folder, or the folder in place of another.

    The owners of the folders above are not checked: in a user namespace root's folders seem to belong to nobody.

    Raises:
        OSError: there is no such folder, or this user cannot look at it.
    """
    _check_owner(folder, folder.lstat())  # a link's owner may change where it leads
    real = Path(os.path.realpath(folder, strict=True))
    for each in (real, *real.parents):
        found = each.stat()
        if each == real:
            _check_owner(real, found)
            if not stat.S_ISDIR(found.st_mode):
                raise ConfigurationError(f"endpoint: expected {real} to be a folder; remove it, or name an endpoint")
        # With a sticky bit others may add files, but not replace a folder of this user's.
        if found.st_mode & stat.S_IWOTH and (each == real or not found.st_mode & stat.S_ISVTX):
            raise ConfigurationError(
                f"endpoint: expected a socket in a folder that other users cannot write to, got {folder}, and "
                f"{each} has mode {stat.S_IMODE(found.st_mode):04o}; give a folder of your own"
            )
        if found.st_uid == os.getuid() and not found.st_mode & OTHERS:
            return  # nobody else can enter it


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in {0, os.getuid()}:
        raise ConfigurationError(
            f"endpoint: expected {path} to belong to this user (uid {os.getuid()}) or to root, got uid {found.st_uid}; "
            "a server of another user has to listen on TCP with keys. For a server of your own name an endpoint in a "
            "folder of yours, or set XDG_RUNTIME_DIR to one"
        )


def private_folder(environ: Mapping[str, str]) -> Path:
    """Returns the path of this user's own folder: in the user's runtime folder, else in that for temporary files.

    Raises:
        ConfigurationError: there is neither.
    """
    return _candidates(environ)[0]


def default_endpoint(environ: Mapping[str, str]) -> str:
    """Returns the endpoint of a server without `--bind`.

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

    A server that was started without a runtime folder listens among the temporary files, so all folders are searched.

    Raises:
        ServerUnreachable: no server of this user is running.
        ConfigurationError: another user can write to the folder of a new server.
    """
    first = default_endpoint(environ)
    folders = _candidates(environ)
    with suppress(FileNotFoundError):
        check_folder(folders[0])
    for folder in folders:
        if os.path.lexists(folder / SOCKET):
            # Another user's folder among the temporary files says nothing about this user's server.
            with suppress(ConfigurationError, OSError):
                check_folder(folder)
                return f"ipc://{folder / SOCKET}"
    places = " or ".join(f"ipc://{folder / SOCKET}" for folder in folders)
    raise ServerUnreachable(
        f"no server of this user (uid {os.getuid()}) listens at {places}; start `python -m server`, or name the "
        "endpoint of another one",
        endpoint=first,
        seconds=0.0,
    )


def make_private(folder: Path) -> None:
    """Makes a folder that only this user can enter; checks an existing one.

    Raises:
        ConfigurationError: the folder cannot be made, or another user can write to it.
    """
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=PRIVATE_MODE)
        check_folder(folder)
    except OSError as error:
        raise ConfigurationError(f"cannot make the private folder {folder}: {error.strerror}") from error


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
            "expected a folder for this user's socket, and found none that can be written; set XDG_RUNTIME_DIR "
            "or TMPDIR to a folder of yours, or name an endpoint"
        )
    return found


def _is_ours(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def why_silent(endpoint: str, seconds: float, network: ModuleType) -> str:
    """Returns why no server has answered at an endpoint, as the text of an error; tries a plain connection.

    Args:
        endpoint: where a client has waited.
        seconds: for how long. The connection takes `PROBE_SECONDS` more at most, and the look-up of the name as long as
            the system takes.
        network: the module `socket`, which this package does not load.
    """
    try:
        _connect(endpoint, network)
    except network.gaierror as error:
        return _unknown_name(endpoint, str(error.strerror))
    except (FileNotFoundError, ConnectionRefusedError) as error:
        how = "connection refused" if isinstance(error, ConnectionRefusedError) else "there is no such file"
        return error_text(f"nobody listens at {endpoint} ({how})", advice=START)
    except TimeoutError:
        return error_text(f"no answer from {endpoint} within {seconds:g} s", advice=LOST_ON_THE_WAY)
    except (OSError, ValueError) as error:
        return error_text(f"no way to {endpoint} ({error})", advice=LOST_ON_THE_WAY)
    what = f"no answer from {endpoint} within {seconds:g} s, but a program listens there"
    return error_text(what, advice=OTHER_PROGRAM)


def _connect(endpoint: str, network: ModuleType) -> None:
    if path := ipc_path(endpoint):
        with network.socket(network.AF_UNIX, network.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_SECONDS)
            probe.connect(str(path))
    else:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        network.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()


def silent(endpoint: str, seconds: float) -> str:
    """Returns the text of the error that no server has answered, for an unknown reason."""
    return error_text(f"no answer from {endpoint} within {seconds:g} s", advice=START)


def _unknown_name(endpoint: str, reason: str) -> str:
    host = endpoint.partition("://")[2].rpartition(":")[0]
    return error_text(
        f"the name {host!r} is not known here ({reason})",
        where=endpoint,
        advice="Correct the name of the server's host, or use its address.",
    )
