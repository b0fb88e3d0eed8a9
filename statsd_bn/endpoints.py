"""Endpoints: allowed addresses of servers, and the default address for this user.

TCP needs CURVE keys, on loopback too. Without keys a server listens on a Unix socket that only its user can open, in a
folder that not everyone can write to. Server and client both check this. `--insecure` and STATSD_BN_INSECURE=1 allow
TCP without keys, for a closed network.

A client that cannot reach a server explains why. A server that refuses a client's key, or has no keys, sends no
message: ZeroMQ reports the failed handshake only to the monitor of the client's socket, and may or may not retry.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from statsd_bn.errors import AuthenticationRefused, ConfigurationError, ServerUnreachable
from statsd_bn.text import error_text

MAX_PORT, MAX_DIGITS = 65_535, 5
SOCKET = "server"  # file name of the socket in this user's folder, and in the folder of one job
MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107  # of a Unix socket, without the terminating zero

# Contains one runtime folder per user. In a login session XDG_RUNTIME_DIR names this user's folder.
RUNTIME_FOLDERS = Path("/run/user")

# Folder of one job's server, removed together with the socket; in SHORT_FOLDER if its default path is too long.
JOB_PREFIX = "statsd_bn-job-"
SHORT_FOLDER = "/tmp"  # noqa: S108 - a folder with a random name is made in it


def check_endpoint(endpoint: str, name: str = "endpoint") -> None:
    """Raises ConfigurationError unless an endpoint is `tcp://HOST:PORT` or `ipc://PATH`."""
    # ZeroMQ takes a port modulo 65,536 and ignores letters after it. It also accepts `ipc://*`, which means a random
    # path, and Linux's abstract sockets (`ipc://@NAME`), to which every user of the host can connect.
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in {"tcp", "ipc"} or not address:
        raise ConfigurationError(f"{name}: expected tcp://HOST:PORT or ipc://PATH, got {endpoint!r}")
    if scheme == "ipc" and (address == "*" or address.startswith("@")):
        kind = "a random path" if address == "*" else "an abstract socket"
        raise ConfigurationError(
            f"{name}: expected ipc://PATH in a folder that other users cannot write to, got {endpoint!r}, {kind}"
        )
    host, _, port = address.rpartition(":")
    if scheme == "tcp" and not (host and (port == "*" or is_port(port))):  # `*`: the system chooses a free port
        raise ConfigurationError(f"{name}: expected tcp://HOST:PORT with a port of 0 to {MAX_PORT}, got {endpoint!r}")


def is_port(port: str) -> bool:
    """Returns whether a text is a valid port number."""
    return port.isascii() and port.isdecimal() and len(port) <= MAX_DIGITS and int(port) <= MAX_PORT


def ipc_path(endpoint: str) -> Path | None:
    """Returns the path of an ipc endpoint, None for other endpoints."""
    address = endpoint.removeprefix("ipc://")
    return None if address in {endpoint, ""} else Path(address)


def needs_keys(endpoint: str) -> bool:
    """Returns whether an endpoint needs keys if `--insecure` and STATSD_BN_INSECURE are not set."""
    return endpoint.startswith("tcp://")


def check_key(endpoint: str, *, has_key: bool, insecure: bool) -> None:
    """Checks that a client has a key if its endpoint needs one."""
    check_endpoint(endpoint)
    if needs_keys(endpoint) and not (has_key or insecure):
        raise AuthenticationRefused(
            f"not connected to {endpoint}: TCP needs a key, and this client has none; pass connect(curve=...) "
            "or --curve, or set STATSD_BN_CURVE. For a server with --insecure in a closed network set "
            "STATSD_BN_INSECURE=1",
            reason="no key",
        )


def check_server_socket(endpoint: str) -> None:
    """Checks an endpoint before a client connects to it."""
    check_endpoint(endpoint)
    path = ipc_path(endpoint)
    if path is None:
        return
    obstacle = "Permission denied"
    try:
        check_folder(path.parent)
        for status in (path.lstat(), path.stat()):
            _check_owner(path, status)
        if os.access(path, os.W_OK):
            return
    except (FileNotFoundError, NotADirectoryError):
        return  # the server may not have started yet
    except OSError as error:
        obstacle = str(error.strerror)
    raise ServerUnreachable(
        f"this user (uid {os.getuid()}) cannot open {endpoint}: {obstacle}. A server in a private folder serves only "
        "the user who started it; start your own server, or ask for one that listens with keys",
        endpoint=endpoint,
        seconds=0.0,
    )


def check_folder(folder: Path) -> None:
    """Raises ConfigurationError if another user could create a socket in a folder, or replace the folder."""
    # Owners of parent folders are not checked: in a user namespace root's folders seem to belong to user 65534.
    _check_owner(folder, folder.lstat())  # a link's owner may change its target
    real = Path(os.path.realpath(folder, strict=True))
    for each in (real, *real.parents):
        status = each.stat()
        if each == real:
            _check_owner(real, status)
            if not stat.S_ISDIR(status.st_mode):
                raise ConfigurationError(f"endpoint: expected {real} to be a folder; remove it, or name an endpoint")
        # In a sticky folder others may add files, but not replace this user's folder.
        if status.st_mode & stat.S_IWOTH and (each == real or not status.st_mode & stat.S_ISVTX):
            raise ConfigurationError(
                f"endpoint: expected a socket in a folder that other users cannot write to, got {folder}, and "
                f"{each} has mode {stat.S_IMODE(status.st_mode):04o}; give a folder of your own"
            )
        if status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return  # no other user can enter it


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in {0, os.getuid()}:
        raise ConfigurationError(
            f"endpoint: expected {path} to belong to this user (uid {os.getuid()}) or to root, got uid "
            f"{status.st_uid}; a server of another user has to listen on TCP with keys. For your own server name an "
            "endpoint in a folder of yours, or set XDG_RUNTIME_DIR to one"
        )


def user_folders(environ: Mapping[str, str]) -> list[Path]:
    """Returns the possible paths of this user's folder: first in runtime folders, last in the temporary folder."""
    # XDG_RUNTIME_DIR is ignored if it names another user's folder, as after `su`.
    folders = []
    for parent in dict.fromkeys((Path(environ.get("XDG_RUNTIME_DIR", "")), RUNTIME_FOLDERS / str(os.getuid()))):
        with suppress(OSError):
            status = parent.lstat()
            if parent.is_absolute() and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                folders.append(parent / "statsd_bn")
    with suppress(OSError):  # no temporary folder can be written, as in a read-only container
        folders.append(Path(tempfile.gettempdir()) / f"statsd_bn-{os.getuid()}")
    if not folders:
        raise ConfigurationError(
            "expected a folder for this user's socket, and found none that can be written; set XDG_RUNTIME_DIR "
            "or TMPDIR to a folder of yours, or name an endpoint"
        )
    return folders


def default_endpoint(environ: Mapping[str, str]) -> str:
    """Returns the endpoint of a server without `--bind`."""
    path = user_folders(environ)[0] / SOCKET
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigurationError(
            f"endpoint: expected at most {MAX_PATH_BYTES} bytes for the path of a socket, got {path}; "
            "set XDG_RUNTIME_DIR or TMPDIR to a folder with a shorter name, or name an endpoint"
        )
    return f"ipc://{path}"


def find_server(environ: Mapping[str, str]) -> str:
    """Returns the endpoint of this user's server."""
    # A server that was started without a runtime folder listens in the temporary folder, so both are searched.
    first = default_endpoint(environ)
    folders = user_folders(environ)
    with suppress(FileNotFoundError):
        check_folder(folders[0])
    for folder in folders:
        if os.path.lexists(folder / SOCKET):
            # Another user's folder of that name says nothing about this user's server.
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


def make_private_folder(folder: Path) -> None:
    """Makes a folder that only this user can enter; checks an existing one."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        check_folder(folder)
    except OSError as error:
        raise ConfigurationError(f"cannot make the private folder {folder}: {error.strerror}") from error


def make_job_folder() -> Path:
    """Makes a private folder for the server of one job, with a path short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix=JOB_PREFIX))
    if len(os.fsencode(folder / SOCKET)) > MAX_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=JOB_PREFIX, dir=SHORT_FOLDER))
    return folder


def remove_job_folder(folder: Path) -> None:
    """Removes an empty folder of one job's server; leaves any other folder alone."""
    if folder.name.startswith(JOB_PREFIX):
        with suppress(OSError):
            folder.rmdir()


# Clients that do not reach a server.

# Events of a socket's monitor, ZMQ_EVENT_HANDSHAKE_* in zmq.h. A handshake fails without a reason (the server closed
# the connection), because of the protocol, or because the server refused it.
_SUCCEEDED = 0x1000
_FAILED = 0x0800
_FAILED_BY_PROTOCOL = 0x2000
_FAILED_BY_SERVER = 0x4000
HANDSHAKES = _SUCCEEDED | _FAILED | _FAILED_BY_PROTOCOL | _FAILED_BY_SERVER

# zmq.h: ZMQ_PROTOCOL_ERROR_*.
_MECHANISMS_DIFFER = 0x11000002  # only one side has CURVE
_WRONG_KEY = 0x11000001  # the client has another server's key

# One connection that closes in the handshake may mean that the server is stopping, or that a proxy answers. This many
# in a row, over this many seconds, mean a wrong or missing key. ZeroMQ retries every 0.1 to 0.2 s.
MAX_CLOSED = 3
MAX_CLOSED_SECONDS = 2.0

PROBE_SECONDS = 1.0  # ZeroMQ has tried for seconds before the probe; a working network takes milliseconds

START_ADVICE = "Is `python -m server` running there? Start it, or correct the endpoint."
NETWORK_ADVICE = "Check the address, the port and the firewall: not even a refusal came back."
OTHER_PROGRAM_ADVICE = "Check that it is a statsd_bn server; an overloaded or stopped one does not answer."


class HandshakeMonitor:
    """Handshakes of a channel pool's sockets."""

    def __init__(self, endpoint: str, *, has_key: bool) -> None:
        self._endpoint = endpoint
        self._has_key = has_key
        self.has_succeeded = False

    def refusal(self, event: int, value: int, closed: int, seconds: float) -> AuthenticationRefused | None:
        """Returns the error after `closed` failed handshakes in a row, or None if a later attempt may succeed."""
        mechanisms_differ = event == _FAILED_BY_PROTOCOL and value == _MECHANISMS_DIFFER
        if event == _FAILED_BY_SERVER:
            what, reason = "the server does not know this client's key", "unknown key"
        elif mechanisms_differ and self._has_key:
            what, reason = "this client has a key, and the server was started without --curve", "no server key"
        elif mechanisms_differ:
            what = "the server expects a key, and this client has none; pass connect(curve=...) or set STATSD_BN_CURVE"
            reason = "no key"
        elif event == _FAILED_BY_PROTOCOL and value == _WRONG_KEY:
            what, reason = "the server's key is not the one this client expects", "wrong server key"
        # After a successful handshake, the keys cannot be why the server closes a connection.
        elif self.has_succeeded or closed < MAX_CLOSED or seconds < MAX_CLOSED_SECONDS:
            return None
        elif self._has_key:
            # A server without --curve says so in its greeting, but may close the connection before the client reads it.
            likely = "its key is probably not the one this client expects, or it was started without --curve"
            what, reason = f"the server closed {closed} handshakes; {likely}", "wrong server key"
        else:
            likely = "it expects a key, and this client has none, or it is no statsd_bn server"
            what, reason = f"the server closed {closed} handshakes; {likely}", "no key"
        return AuthenticationRefused(f"authentication refused at {self._endpoint}: {what}", reason=reason)


class SocketMonitor:
    """The handshakes of one socket."""

    def __init__(self, of_pool: HandshakeMonitor) -> None:
        self.successes = 0  # number of successful handshakes; each is a new connection
        self._of_pool = of_pool
        self._closed = 0
        self._first = 0.0

    def on_event(self, now: float, event: int, value: int) -> None:
        """Process an event of the socket's monitor."""
        if event == _SUCCEEDED:
            self.successes += 1
            self._closed = 0
            self._of_pool.has_succeeded = True
            return
        if not self._closed:
            self._first = now
        self._closed += 1
        if refusal := self._of_pool.refusal(event, value, self._closed, now - self._first):
            raise refusal


def explain_no_answer(endpoint: str, seconds: float, network: ModuleType) -> str:
    """Tries a plain connection; returns an error text that explains why no server answered for `seconds`."""
    # The attempt takes up to `PROBE_SECONDS`. `network` is the module `socket`, which this package does not load.
    try:
        _connect(endpoint, network)
    except network.gaierror as error:
        host = endpoint.partition("://")[2].rpartition(":")[0]
        what = f"the name {host!r} is not known here ({error.strerror})"
        return error_text(what, where=endpoint, advice="Correct the name of the server's host, or use its address.")
    except (FileNotFoundError, ConnectionRefusedError) as error:
        how = "connection refused" if isinstance(error, ConnectionRefusedError) else "there is no such file"
        return error_text(f"no server listens at {endpoint} ({how})", advice=START_ADVICE)
    except TimeoutError:
        return error_text(f"no answer from {endpoint} within {seconds:g} s", advice=NETWORK_ADVICE)
    except (OSError, ValueError) as error:
        return error_text(f"cannot reach {endpoint} ({error})", advice=NETWORK_ADVICE)
    what = f"no answer from {endpoint} within {seconds:g} s, but a program listens there"
    return error_text(what, advice=OTHER_PROGRAM_ADVICE)


def format_no_answer(endpoint: str, seconds: float) -> str:
    """Returns the error text for a server that did not answer, for an unknown reason."""
    return error_text(f"no answer from {endpoint} within {seconds:g} s", advice=START_ADVICE)


def _connect(endpoint: str, network: ModuleType) -> None:
    if path := ipc_path(endpoint):
        with network.socket(network.AF_UNIX, network.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_SECONDS)
            probe.connect(str(path))
    else:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        network.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
