"""Joining a job without an endpoint: rank 0 starts a server and announces it in torch's store."""

import logging
import math
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING

from client.launch import job_secret
from client.launch.launchers import StoreAddress
from client.launch.server_process import ServerProcess
from client.launch.settings import Settings
from client.launch.store import Announcement, StoreEntry
from client.session.protocol.member import Member
from statsd_bn.endpoints import ipc_path
from statsd_bn.error_text import in_log
from statsd_bn.errors import AuthenticationRefused, ConfigurationError, GroupIncomplete, ServerUnreachable
from statsd_bn.keys import ClientKeys

if TYPE_CHECKING:
    from client.session.connection import Connection

logger = logging.getLogger("statsd_bn.client")

# When all processes are restarted, rank 0 may reach connect() this much later than another one. Until then the store
# still names the previous server, which is gone.
RESTART_SECONDS = 30.0

# A client whose keys come from another secret is refused like a stranger.
OTHER_SECRET_HINT = "Do all processes have the same STATSD_BN_SECRET?"  # noqa: S105 - a question

Join = Callable[[str, ClientKeys | None, Member], "Connection"]
"""Joins a job: where its server listens, the keys for it, and who this process is."""


def join(settings: Settings, store: StoreAddress | None, environ: Mapping[str, str], join_at: Join) -> "Connection":
    """Connects to the server that rank 0 starts for this job.

    `store` is the launcher's; without one the processes meet in that of torch's process group.

    Raises:
        ConfigurationError: this process is set up differently from rank 0, or the job runs on several nodes and has no
            secret.
        ServerUnreachable: there is no server, with the reason.
    """
    who = settings.member()
    life = _life(settings)

    def entry() -> StoreEntry:
        return StoreEntry(store, who.rank, who.world_size, f"job {who.job}/{life}", who.seconds_to_join)

    is_one_node = settings.is_one_node
    if store is None:
        shared = entry()
        entry, is_one_node = (lambda: shared), shared.is_one_host()
    # Before rank 0 announces anything: without a secret all processes say so at once.
    secret = None if is_one_node else job_secret.given(environ)
    if who.rank != 0:
        return _on_one_node(who, entry, join_at) if is_one_node else _on_many(who, secret, entry, join_at)
    if is_one_node:
        return _with_own_server(who, "", Announcement(), entry, join_at)
    made = "" if secret else job_secret.make()
    address = store.host if store else environ.get("MASTER_ADDR") or socket.gethostname()
    return _with_own_server(who, address, Announcement(secret=made), entry, join_at, secret or made)


def _with_own_server(
    who: Member,
    address: str,
    announcement: Announcement,
    entry: Callable[[], StoreEntry],
    join_at: Join,
    secret: str = "",
) -> "Connection":
    """Starts a server and announces it; other hosts reach it at `address`, without one only this host does."""
    keys = job_secret.member_keys(secret, who.job) if secret else None
    try:
        server = ServerProcess(
            binding(address) if address else None,
            keys=job_secret.server_keys(secret, who.job) if secret else None,
            leave_timeout=who.round_timeout,
        )
    except (ServerUnreachable, ConfigurationError) as error:
        entry().write(Announcement(problem=f"{who.host_and_pid}: {error.message}"))
        raise
    try:
        endpoint = reached_by(address, server.endpoint) if address else server.endpoint
        entry().write(replace(announcement, endpoint=endpoint, epoch=who.epoch))
        return join_at(endpoint, keys, who)
    except GroupIncomplete:
        # The others have timed out as well. Each is told for whom it waited; the server ends when they have left.
        raise
    except BaseException:
        server.stop()
        raise


def _on_one_node(who: Member, entry: Callable[[], StoreEntry], join_at: Join) -> "Connection":
    announcement = _read(entry())
    path = ipc_path(announcement.endpoint)
    if path is None:
        raise _not_the_same(announcement, "all processes are on its host", "they are on several")
    try:
        path.parent.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigurationError(
            f"endpoint: expected one, since rank 0's server listens at {announcement.endpoint}, and this process sees "
            "no such folder. They may be in different containers: start `python -m server` where all reach it"
        ) from error
    except OSError:
        # `join_at` says why this process cannot enter it, or that it is another user's.
        pass
    return join_at(announcement.endpoint, None, replace(who, epoch=announcement.epoch))


def _on_many(who: Member, secret: str | None, entry: Callable[[], StoreEntry], join_at: Join) -> "Connection":
    own_entry = entry()
    announcement = _read(own_entry)
    while True:
        if ipc_path(announcement.endpoint):
            # Some launchers tell rank 0 that its own address is "localhost".
            raise _not_the_same(announcement, "they are on several hosts", "all are on its own")
        if bool(secret) == bool(announcement.secret):
            has, announces = ("a", "one too") if secret else ("no", "none either")
            raise ConfigurationError(
                "STATSD_BN_SECRET_FILE, STATSD_BN_SECRET, STATSD_BN_SECRET_IN_STORE: expected the same on all "
                f"processes, but this one has {has} secret, and rank 0 announces {announces}"
            )
        try:
            # torchrun counts restarts on each node separately, so all use the count of rank 0.
            keys = job_secret.member_keys(secret or announcement.secret, who.job)
            return join_at(announcement.endpoint, keys, replace(who, epoch=announcement.epoch))
        except (ServerUnreachable, AuthenticationRefused) as error:
            logger.warning("%s; waiting in case rank 0 was restarted and announces another server", in_log(error))
            try:
                announcement = _read(own_entry, announcement, RESTART_SECONDS)
            except ServerUnreachable:
                text = f"{error.message}. {OTHER_SECRET_HINT}" if secret else error.message
                raise type(error)(text, **error.fields) from None


def _read(entry: StoreEntry, known: Announcement | None = None, seconds: float = math.inf) -> Announcement:
    """Returns the announcement of a server, another one than `known`."""
    announcement = entry.read(known, seconds)
    if announcement.problem:
        raise ServerUnreachable(f"rank 0 could not start a server: {announcement.problem}", endpoint="")
    return announcement


def _not_the_same(announcement: Announcement, here: str, there: str) -> ConfigurationError:
    return ConfigurationError(
        f"MASTER_ADDR: expected the same on all processes; by this one's {here}, but by rank 0's {there}, and its "
        f"server listens at {announcement.endpoint}. Give rank 0 the name or address by which the others reach it"
    )


def _life(settings: Settings) -> str:
    """Returns a name for this life of the job, in a store that may hold announcements of earlier lives.

    Only torchrun's store outlives the processes, and on one node its count of restarts is the same for all of them.
    """
    is_counted = settings.is_one_node and settings.epoch.source == "TORCHELASTIC_RESTART_COUNT"
    return f"life {settings.epoch.value}" if is_counted else "latest life"


def binding(address: str) -> str:
    """Returns where a server has to listen so that other hosts reach it at `address`: there, if it is this host's.

    Otherwise all interfaces: the name may mean another address here, such as 127.0.1.1, or addresses are translated.
    """
    for candidate in _addresses(address):
        if not candidate.is_loopback and _is_of_this_host(candidate):
            return f"tcp://{_quoted(str(candidate))}:*"
    return f"tcp://{_quoted('::' if ':' in address else '0.0.0.0')}:*"  # noqa: S104 - with keys only


def reached_by(address: str, endpoint: str) -> str:
    """Returns the endpoint by which other hosts reach a server that listens at `endpoint`."""
    return f"tcp://{_quoted(address)}:{endpoint.rpartition(':')[2]}"


def _quoted(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _addresses(name: str) -> list[IPv4Address | IPv6Address]:
    """Returns the addresses of a host name, only IPv4 as in ZeroMQ; an address stands for itself."""
    with suppress(ValueError):
        return [ip_address(name)]
    try:
        return [ip_address(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except (OSError, UnicodeError):  # that of a name that cannot be one, such as "a..b"
        return []


def _is_of_this_host(address: IPv4Address | IPv6Address) -> bool:
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET  # noqa: PLR2004 - the versions of IP
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((str(address), 0))
    except OSError:
        return False
    return True
