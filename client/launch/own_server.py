"""Joining a job without an endpoint: rank 0 starts a server and announces it in torch's store."""

import logging
import math
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address

from client.launch import job_secret
from client.launch.server_process import ServerProcess
from client.launch.settings import Settings
from client.launch.store import Announcement, StoreEntry
from client.session.channel_pool import ZmqChannelPool
from client.session.connection import Connection
from client.session.protocol.member import Member
from statsd_bn.endpoints import check_key, check_server_socket, ipc_path
from statsd_bn.errors import AuthenticationRefused, ConfigurationError, GroupIncomplete, ServerUnreachable
from statsd_bn.keys import ClientKeys
from statsd_bn.text import log_line

logger = logging.getLogger("statsd_bn.client")

# After a restart of all processes, rank 0 may call connect() this much later than another one. Until then the store
# still names the previous server, which is gone.
RESTART_SECONDS = 30.0


def open_connection(endpoint: str, keys: ClientKeys | None, member: Member, *, insecure: bool = False) -> Connection:
    """Connects a member to the server at an endpoint, which must be this user's or use keys, unless `insecure`."""
    check_server_socket(endpoint)
    check_key(endpoint, has_key=keys is not None, insecure=insecure)
    return Connection(ZmqChannelPool(endpoint, keys), member)


class Rendezvous:
    """The search for the server that rank 0 starts for this job, over the launcher's store or the process group's."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        connect: Callable[[str, ClientKeys | None, Member], Connection] = open_connection,
    ) -> None:
        self._settings = settings
        self._member = settings.member
        self._environ = environ
        self._connect = connect

    def join(self) -> Connection:
        """Connects to rank 0's server; rank 0 starts it."""
        store = self._settings.store
        is_one_node = self._settings.is_one_node if store else self._entry.is_one_host()
        # Before rank 0 announces a server: a missing secret is an error on all processes.
        secret = None if is_one_node else job_secret.read(self._environ)
        if self._member.rank != 0:
            return self._join_on_several(secret) if secret else self._join_on_one_node()
        if secret is None:
            return self._start_server()
        address = store.host if store else self._environ.get("MASTER_ADDR") or socket.gethostname()
        return self._start_server(address, secret)

    @cached_property
    def _entry(self) -> StoreEntry:
        # The name of this life of the job, since the store may contain announcements of earlier lives. Only torchrun's
        # store outlives the processes, and on one node all of them have the same count of restarts.
        is_counted = self._settings.is_one_node and self._settings.source("epoch") == "TORCHELASTIC_RESTART_COUNT"
        member = self._member
        life = f"job {member.job}/{f'life {member.epoch}' if is_counted else 'latest life'}"
        return StoreEntry(self._settings.store, member.rank, member.world_size, life, member.seconds_to_join)

    def _start_server(self, address: str = "", secret: str = "") -> Connection:
        """Starts a server and announces it; other hosts connect to `address`, without which only this host can."""
        member = self._member
        try:
            server = ServerProcess(
                bind_endpoint(address) if address else None,
                keys=job_secret.server_keys(secret, member.job) if secret else None,
                leave_timeout=member.round_timeout,
            )
        except (ServerUnreachable, ConfigurationError) as error:
            self._entry.write(Announcement(problem=f"{member.host_and_pid}: {error.message}"))
            raise
        try:
            endpoint = public_endpoint(address, server.endpoint) if address else server.endpoint
            self._entry.write(Announcement(endpoint, member.epoch))
            return self._connect(endpoint, job_secret.member_keys(secret, member.job) if secret else None, member)
        except GroupIncomplete:
            # The other ranks have timed out as well, and get the same error from the server, which ends after them.
            raise
        except BaseException:
            server.stop()
            raise

    def _join_on_one_node(self) -> Connection:
        announcement = self._announced()
        path = ipc_path(announcement.endpoint)
        if path is None:
            raise self._contradiction(announcement, "one host", "several hosts")
        try:
            path.parent.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigurationError(
                f"endpoint: rank 0's server listens at {announcement.endpoint}, which does not exist for this process; "
                "are they in different containers? Start `python -m server` at an endpoint that all ranks reach"
            ) from error
        except OSError:
            # `check_server_socket` reports why this process cannot enter it, or that another user owns it.
            pass
        return self._connect(announcement.endpoint, None, replace(self._member, epoch=announcement.epoch))

    def _join_on_several(self, secret: str) -> Connection:
        announcement = self._announced()
        keys = job_secret.member_keys(secret, self._member.job)
        while True:
            if ipc_path(announcement.endpoint):
                # Some launchers give rank 0 the address "localhost".
                raise self._contradiction(announcement, "several hosts", "one host")
            try:
                # torchrun counts restarts on each node separately, so all use the count of rank 0.
                return self._connect(announcement.endpoint, keys, replace(self._member, epoch=announcement.epoch))
            except (ServerUnreachable, AuthenticationRefused) as error:
                logger.warning("%s; waiting in case rank 0 was restarted and announces another server", log_line(error))
                try:
                    announcement = self._announced(announcement, RESTART_SECONDS)
                except ServerUnreachable:
                    hint = "Do all processes have the same STATSD_BN_SECRET?"
                    raise type(error)(f"{error.message}. {hint}", **error.fields) from None

    def _announced(self, known: Announcement | None = None, seconds: float = math.inf) -> Announcement:
        """Returns the announcement of a server other than `known`."""
        announcement = self._entry.read(known, seconds)
        if announcement.problem:
            raise ServerUnreachable(f"rank 0 could not start a server: {announcement.problem}", endpoint="")
        return announcement

    @staticmethod
    def _contradiction(announcement: Announcement, here: str, there: str) -> ConfigurationError:
        return ConfigurationError(
            f"MASTER_ADDR: expected the same on all processes; it means {here} on this process, and {there} on rank 0. "
            f"The server of rank 0 listens at {announcement.endpoint}. Give rank 0 its name or address in the network"
        )


def bind_endpoint(address: str) -> str:
    """Returns the endpoint to bind so that other hosts reach the server at `address`: that address, if it is local.

    Otherwise all interfaces: the name may resolve differently here, as to 127.0.1.1, or there is address translation.
    """
    for candidate in _resolved(address):
        if not candidate.is_loopback and _is_local(candidate):
            return f"tcp://{_bracketed(str(candidate))}:*"
    return f"tcp://{_bracketed('::' if ':' in address else '0.0.0.0')}:*"  # noqa: S104 - with keys only


def public_endpoint(address: str, endpoint: str) -> str:
    """Returns the endpoint for other hosts of a server that is bound to `endpoint`."""
    return f"tcp://{_bracketed(address)}:{endpoint.rpartition(':')[2]}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _resolved(name: str) -> list[IPv4Address | IPv6Address]:
    """Returns the addresses of a host name, only IPv4 as in ZeroMQ, or the address in the text."""
    with suppress(ValueError):
        return [ip_address(name)]
    try:
        return [ip_address(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except (OSError, UnicodeError):  # UnicodeError: not a host name, such as "a..b"
        return []


def _is_local(address: IPv4Address | IPv6Address) -> bool:
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET  # noqa: PLR2004 - the versions of IP
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
