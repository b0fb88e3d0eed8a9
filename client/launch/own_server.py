"""Joining a job without an endpoint: rank 0 starts a server and announces it in torch's store.

On several nodes all processes derive the same keys from the job's secret, so no secret is sent. The user passes the
secret in a file or in the environment; standard input would not do, as the first process of a host would consume it.
"""

import logging
import math
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from ipaddress import ip_address

import zmq
from zmq.utils import z85

from client.launch.server_process import ServerProcess
from client.launch.settings import Settings
from client.launch.store import Announcement, StoreEntry
from client.session.channel_pool import ZmqChannelPool
from client.session.connection import Connection
from client.session.protocol.member import Member
from statsd_bn import keys
from statsd_bn.endpoints import check_key, check_server_socket, ipc_path
from statsd_bn.errors import AuthenticationRefused, ConfigurationError, GroupIncomplete, ServerUnreachable
from statsd_bn.keys import ClientKeys, KeyPair, ServerKeys
from statsd_bn.text import log_line

logger = logging.getLogger("statsd_bn.client")

# After a restart of all processes, rank 0 may call connect() this much later than another one. Until then the store
# still names the previous server, which is gone.
RESTART_SECONDS = 30.0

# 32 hexadecimal digits are 128 bits. Random ones have about 14 distinct letters; "changeme" four times has 7.
MIN_LETTERS, MIN_DISTINCT_LETTERS = 32, 8

KEY_BYTES = 32
MEMBER = "member"


def open_connection(endpoint: str, keys: ClientKeys | None, member: Member, *, insecure: bool = False) -> Connection:
    """Connects a member to the server at an endpoint, which must be this user's or use keys, unless `insecure`."""
    check_server_socket(endpoint)
    check_key(endpoint, has_key=keys is not None, insecure=insecure)
    return Connection(ZmqChannelPool(endpoint, keys), member)


@dataclass(frozen=True, eq=False)
class Rendezvous:
    """The search for the server that rank 0 starts for this job, over the launcher's store or the process group's."""

    settings: Settings
    environ: Mapping[str, str]
    connect: Callable[[str, ClientKeys | None, Member], Connection] = open_connection

    def join(self) -> Connection:
        """Connects to rank 0's server; rank 0 starts it."""
        store = self.settings.store
        is_one_node = self.settings.is_one_node if store else self._entry.is_one_host()
        # Read before rank 0 announces a server, so that a missing secret is an error on all processes.
        secret = None if is_one_node else read_secret(self.environ)
        if self.settings.member.rank != 0:
            return self._join_announced(secret)
        return self._start_server(secret, store.host if store else self.environ.get("MASTER_ADDR"))

    @cached_property
    def _entry(self) -> StoreEntry:
        # The name of this life of the job, since the store may contain earlier announcements. Only torchrun's store
        # outlives the processes, and on one node they agree on the count of restarts.
        is_counted = self.settings.is_one_node and self.settings.source("epoch") == "TORCHELASTIC_RESTART_COUNT"
        member = self.settings.member
        life = f"job {member.job}/{f'life {member.epoch}' if is_counted else 'latest life'}"
        return StoreEntry(self.settings.store, member.rank, member.world_size, life, member.seconds_to_join)

    def _start_server(self, secret: str | None, host: str | None) -> Connection:
        """Starts a server and announces it; with a secret, other nodes connect at `host`, or at this host's name."""
        member = self.settings.member
        address = host or socket.gethostname()
        try:
            server = ServerProcess(
                bind_endpoint(address) if secret else None,
                keys=server_keys(secret, member.job) if secret else None,
                leave_timeout=member.round_timeout,
            )
        except (ServerUnreachable, ConfigurationError) as error:
            self._entry.write(Announcement(problem=f"{member.host_and_pid}: {error.message}"))
            raise
        try:
            endpoint = public_endpoint(address, server.endpoint) if secret else server.endpoint
            self._entry.write(Announcement(endpoint, member.epoch))
            return self.connect(endpoint, member_keys(secret, member.job) if secret else None, member)
        except GroupIncomplete:
            # The other ranks have timed out as well, and get the same error from the server, which ends after them.
            raise
        except BaseException:
            server.stop()
            raise

    def _join_announced(self, secret: str | None) -> Connection:
        """Connects to the server that rank 0 announces, on several nodes also to a later one."""
        member = self.settings.member
        announcement = self._announced()
        while True:
            _check_endpoint(announcement.endpoint, is_one_node=secret is None)
            try:
                # torchrun counts restarts on each node separately, so all use the count of rank 0.
                found = replace(member, epoch=announcement.epoch)
                return self.connect(announcement.endpoint, member_keys(secret, member.job) if secret else None, found)
            except (ServerUnreachable, AuthenticationRefused) as error:
                if secret is None:
                    raise
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


def _check_endpoint(endpoint: str, *, is_one_node: bool) -> None:
    """Raises ConfigurationError unless the endpoint fits the job's nodes: a Unix socket on one, TCP for several."""
    path = ipc_path(endpoint)
    if (path is not None) != is_one_node:
        # Some launchers give rank 0 the address "localhost".
        here, there = ("one host", "several hosts") if is_one_node else ("several hosts", "one host")
        raise ConfigurationError(
            f"MASTER_ADDR: expected the same on all processes; it means {here} on this process, and {there} on rank 0. "
            f"The server of rank 0 listens at {endpoint}. Give rank 0 its name or address in the network"
        )
    try:
        if path:
            path.parent.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigurationError(
            f"endpoint: rank 0's server listens at {endpoint}, which does not exist for this process; are they in "
            "different containers? Start `python -m server` at an endpoint that all ranks reach"
        ) from error
    except OSError:
        # `check_server_socket` reports why this process cannot enter it, or that another user owns it.
        pass


def bind_endpoint(address: str) -> str:
    """Returns the endpoint to bind so that other hosts reach the server at `address`: that address, if it is local.

    Otherwise it is all interfaces: here the name may resolve to another address, as 127.0.1.1, or be translated.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET  # of a name only IPv4, as in ZeroMQ
    with suppress(OSError, UnicodeError):  # UnicodeError: not a host name, such as "a..b"
        for *_, (candidate, *_) in socket.getaddrinfo(address, None, family, socket.SOCK_STREAM):
            if not ip_address(candidate).is_loopback and _is_local(family, str(candidate)):
                return f"tcp://{_bracketed(str(candidate))}:*"
    return f"tcp://{_bracketed('::' if ':' in address else '0.0.0.0')}:*"  # noqa: S104 - with keys only


def public_endpoint(address: str, endpoint: str) -> str:
    """Returns the endpoint for other hosts of a server that is bound to `endpoint`."""
    return f"tcp://{_bracketed(address)}:{endpoint.rpartition(':')[2]}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _is_local(family: socket.AddressFamily, address: str) -> bool:
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def read_secret(environ: Mapping[str, str]) -> str:
    """Returns the job's secret; a missing, ambiguous or weak one is a ConfigurationError."""
    path, text = environ.get("STATSD_BN_SECRET_FILE", ""), environ.get("STATSD_BN_SECRET", "")
    if path and text:
        raise ConfigurationError("expected one of STATSD_BN_SECRET_FILE and STATSD_BN_SECRET, got both")
    if not (path or text):
        raise ConfigurationError(
            "endpoint: none given, and the processes may be on several nodes according to the launcher. If all are on "
            "this host, set MASTER_ADDR=127.0.0.1, or LOCAL_WORLD_SIZE to their number. Give all processes the same "
            "secret, in a file that STATSD_BN_SECRET_FILE names (`python -m server secret FILE` makes one) or in "
            "STATSD_BN_SECRET; or start `python -m server --curve DIR` yourself, and give them its endpoint and keys"
        )
    secret = (keys.read_secret(path, "STATSD_BN_SECRET_FILE") if path else text).strip()
    if len(secret) < MIN_LETTERS or len(set(secret)) < MIN_DISTINCT_LETTERS:
        raise ConfigurationError(
            f"{'STATSD_BN_SECRET_FILE' if path else 'STATSD_BN_SECRET'}: expected at least {MIN_LETTERS} random "
            f"letters, as `python -m server secret FILE` makes them, got {len(secret)} letters, {len(set(secret))} "
            "different ones"
        )
    return secret


def server_keys(secret: str, job: str) -> ServerKeys:
    """Returns the keys of a job's server, which admits only the members of the job."""
    return ServerKeys(_pair(secret, job, "server"), MEMBER, _pair(secret, job, MEMBER).public)


def member_keys(secret: str, job: str) -> ClientKeys:
    """Returns the keys that all members of a job share."""
    return ClientKeys(_pair(secret, job, MEMBER), _pair(secret, job, "server").public)


def _pair(secret: str, job: str, label: str) -> KeyPair:
    if not zmq.has("curve"):
        raise ConfigurationError(f"curve: libzmq {zmq.zmq_version()} was built without it; install pyzmq from a wheel")
    key = blake2b(secret.encode()).digest()
    digest = blake2b(f"{label}\0{job}".encode(), key=key, digest_size=KEY_BYTES, person=b"statsd_bn").digest()
    private = z85.encode(digest)
    return KeyPair(zmq.curve_public(private).decode(), private.decode())
