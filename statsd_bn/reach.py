"""Reach: who can get at an endpoint, as far as its name and the file system say; and why nobody answers there."""

import os
import stat
from contextlib import suppress
from enum import Enum
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from types import ModuleType

from statsd_bn.error_text import error_text
from statsd_bn.errors import ConfigurationError, ServerUnreachable
from statsd_bn.private_folder import OTHERS

WRITABLE_BY_OTHERS = 0o022

MAX_PORT = 65_535
MAX_DIGITS = 5

# ZeroMQ has tried for seconds already, and a network that lets something through does so in milliseconds.
PROBE_SECONDS = 1.0

START = "Is `python -m server` running there? Start it, or correct the endpoint."
LOST_ON_THE_WAY = "A firewall, a wrong address or a wrong port? Nothing came back, not even a refusal."
OTHER_PROGRAM = "Is it a statsd_bn server? One that has too much to do, or is stopped, does not answer either."


class Reach(Enum):
    """Who can connect to an endpoint: this user and root, whoever is on this host, or other machines as well."""

    USER = "user"
    HOST = "host"
    NETWORK = "network"


def reach(endpoint: str) -> Reach:
    """Returns who can connect to a server of this user that listens at `endpoint`.

    A name but "localhost" may mean any address, now or later: 127.example.org is one. What is not known is NETWORK.
    """
    scheme, _, address = endpoint.partition("://")
    if endpoint == "ipc://*":  # for which ZeroMQ makes a folder that only this user can enter
        return Reach.USER
    if scheme == "ipc":
        path = ipc_path(endpoint)
        return Reach.USER if path and is_out_of_reach(path.parent) else Reach.HOST
    host = address.rpartition(":")[0]
    # ZeroMQ has an address of IPv6 in brackets.
    if scheme == "tcp" and is_loopback("::1" if host == "[::1]" else host) and host != "::1":
        return Reach.HOST
    return Reach.NETWORK


def check_endpoint(endpoint: str, name: str = "endpoint") -> None:
    """Raises ConfigurationError for what is no endpoint of ours.

    ZeroMQ would take a port modulo 65,536 and overlook letters behind it, and it has ways that lead to no server.

    Args:
        endpoint: which one.
        name: what it is called where it was given.
    """
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in {"tcp", "ipc"} or not address:
        raise ConfigurationError(f"{name}: expected tcp://HOST:PORT or ipc://PATH, got {endpoint!r}")
    host, _, port = address.rpartition(":")
    if scheme == "tcp" and not (host and _is_port(port)):
        raise ConfigurationError(f"{name}: expected tcp://HOST:PORT with a port of 0 to {MAX_PORT}, got {endpoint!r}")


def _is_port(port: str) -> bool:
    # `*` lets the system choose one.
    return port == "*" or (port.isascii() and port.isdecimal() and len(port) <= MAX_DIGITS and int(port) <= MAX_PORT)


def ipc_path(endpoint: str) -> Path | None:
    """Returns the file of an ipc endpoint; None for one that has no file of its own choice."""
    address = endpoint.removeprefix("ipc://")
    # A name that begins with @ is Linux's: it lies in no folder, and every process of the host can use it.
    return None if address in {endpoint, "", "*"} or address.startswith("@") else Path(address)


def is_out_of_reach(folder: Path) -> bool:
    """Returns whether nobody but this user and root can put something else in place of a file of this user's there.

    Such a file, if it is private itself, is this user's alone. So is everything below a private folder.
    """
    try:
        real = folder.resolve(strict=True)
        for each in (real, *real.parents):
            found = each.stat()
            if found.st_uid == os.getuid() and not found.st_mode & OTHERS:
                return True
            is_open = found.st_mode & WRITABLE_BY_OTHERS and not found.st_mode & stat.S_ISVTX
            if is_open or found.st_uid not in {0, os.getuid()}:
                return False
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        return False
    return True


def check_is_open_to_us(endpoint: str) -> None:
    """Raises ServerUnreachable with the reason if the file system keeps this user from an ipc endpoint."""
    path = ipc_path(endpoint)
    if path is None:
        return
    obstacle = ""
    try:
        found = path.stat()
        if not os.access(path, os.W_OK):
            obstacle = f"{path} belongs to uid {found.st_uid} and lets in nobody else"
    except PermissionError:
        obstacle = _closed_folder(path)
    except OSError:
        return
    if obstacle:
        raise ServerUnreachable(
            f"{endpoint} is closed to this user (uid {os.getuid()}): {obstacle}. A server in a private folder is for "
            "the user who started it; start one of your own, or ask for one that listens with keys",
            endpoint=endpoint,
            seconds=0.0,
        )


def why_silent(endpoint: str, seconds: float, network: ModuleType) -> str:
    """Returns why nobody has answered at an endpoint, as the text of an error; it tries a plain connection.

    Args:
        endpoint: where a client has waited in vain.
        seconds: for how long; the connection is tried for at most `PROBE_SECONDS` more, and the name looked up for as
            long as the system takes.
        network: the module `socket`, which this package does not load.
    """
    try:
        is_there = _is_there(endpoint, network)
    except network.gaierror as error:
        return _unknown_name(endpoint, str(error.strerror))
    except (FileNotFoundError, ConnectionRefusedError) as error:
        how = "connection refused" if isinstance(error, ConnectionRefusedError) else "there is no such file"
        return error_text(f"nobody listens at {endpoint} ({how})", advice=START)
    except TimeoutError:
        return error_text(f"no answer from {endpoint} within {seconds:g} s", advice=LOST_ON_THE_WAY)
    except (OSError, ValueError) as error:
        return error_text(f"no way to {endpoint} ({error})", advice=LOST_ON_THE_WAY)
    if not is_there:
        return silent(endpoint, seconds)
    what = f"no answer from {endpoint} within {seconds:g} s, but a program listens there"
    return error_text(what, advice=OTHER_PROGRAM)


def _is_there(endpoint: str, network: ModuleType) -> bool:
    """Whether a connection to an endpoint could be made; False also where the kind of endpoint is not known."""
    scheme, _, address = endpoint.partition("://")
    path = ipc_path(endpoint)
    if scheme == "tcp":
        host, _, port = address.rpartition(":")
        network.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
    elif path:
        with network.socket(network.AF_UNIX, network.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_SECONDS)
            probe.connect(str(path))
    return scheme == "tcp" or path is not None


def silent(endpoint: str, seconds: float) -> str:
    """Returns the text of the error that nobody has answered, where nothing more is known."""
    return error_text(f"no answer from {endpoint} within {seconds:g} s", advice=START)


def _unknown_name(endpoint: str, reason: str) -> str:
    host = endpoint.partition("://")[2].rpartition(":")[0]
    return error_text(
        f"the name {host!r} is not known here ({reason})",
        where=endpoint,
        advice="Correct the name of the server's host, or use its address.",
    )


def _closed_folder(path: Path) -> str:
    for folder in reversed(path.absolute().parents):
        if not os.access(folder, os.X_OK):
            return f"the folder {folder} belongs to uid {folder.stat().st_uid} and lets in nobody else"
    return "a folder on the way lets in nobody else"


def is_loopback(host: str) -> bool:
    """Returns whether a host is this one by its name or its literal address; any other name may mean anything."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        found: IPv4Address | IPv6Address = ip_address(host)
        return found.is_loopback and (isinstance(found, IPv4Address) or str(found) == "::1")
    return False
