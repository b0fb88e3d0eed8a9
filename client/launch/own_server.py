"""Joining a job without an endpoint: rank 0 starts a server and announces it in torch's store.

torchrun or rank 0 hosts the store, which `torch.distributed.init_process_group("env://")` uses too; without a
launcher, it is the store of the script's process group. Every client of the store can read and change an announcement.

On several nodes all processes derive the same keys from the job's secret, so no secret is sent. The user passes the
secret in a file or in the environment; standard input would not do, as the first process of a host would consume it.
"""

import itertools
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from hashlib import blake2b
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import zmq
from torch import distributed
from zmq.utils import z85

from client.launch.launchers import StoreAddress
from client.launch.server_process import ServerProcess
from client.launch.settings import Settings
from client.session.channel_pool import ZmqChannelPool
from client.session.connection import Connection
from client.session.groups import machine_id
from client.session.protocol.member import Member
from statsd_bn import keys
from statsd_bn.endpoints import check_key, check_server_socket, ipc_path
from statsd_bn.errors import (
    AuthenticationRefused,
    ConfigurationError,
    GroupIncomplete,
    ProtocolError,
    ServerUnreachable,
)
from statsd_bn.keys import ClientKeys, KeyPair, ServerKeys
from statsd_bn.text import escape, escape_lines, log_line

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger("statsd_bn.client")

T = TypeVar("T")

PREFIX = "statsd_bn"

# Growing pauses between two reads: rank 0 needs half a second, and a thousand processes may read from one store.
FIRST_PAUSE_SECONDS, PAUSE_SECONDS = 0.01, 0.25
ANSWER_SECONDS = 5.0  # a call may exceed its timeout by this; a store answers in milliseconds
WARN_SECONDS = 10.0  # first warning; further ones at doubling intervals

# Keep references: a store that is garbage-collected closes, and rank 0's closes for all. The process id is part of the
# key because a forked child must not use its parent's store.
_stores: dict[tuple[int, StoreAddress], "Store"] = {}

# A process may disconnect and connect to another server: the n-th connect of each process uses the n-th entry.
_entries = itertools.count()

# After a restart of all processes, rank 0 may call connect() this much later than another one. Until then the store
# still names the previous server, which is gone.
RESTART_SECONDS = 30.0

# 32 hexadecimal digits are 128 bits. Random ones have about 14 distinct letters; "changeme" four times has 7.
MIN_LETTERS, MIN_DISTINCT_LETTERS = 32, 8

KEY_BYTES = 32
MEMBER = "member"


class Announcement(NamedTuple):
    """The endpoint of rank 0's server, and rank 0's count of the job's restarts; or why rank 0 could not start it."""

    endpoint: str = ""
    epoch: int = 0
    problem: str = ""

    @classmethod
    def parse(cls, text: bytes) -> "Announcement":
        """Parses an announcement; raises ProtocolError for other text."""
        with suppress(ValueError, RecursionError):
            match json.loads(text):
                case [str(endpoint), int(epoch), str(problem)] if type(epoch) is int:
                    # Both texts appear in errors, and any client of the store may have written them.
                    return cls(escape(endpoint), epoch, escape_lines(problem))
        raise ProtocolError("expected the announcement of rank 0 in torch's store, got something else")


class StoreEntry:
    """The entry in torch's store for one connect of the job; each method raises ServerUnreachable without an answer.

    Its key names this life of the job, because torchrun's store outlives the processes.
    """

    def __init__(self, address: StoreAddress | None, rank: int, world_size: int, life: str, timeout: float) -> None:
        self._address = address
        self._rank = rank
        self._world_size = world_size
        self._key = f"{life}/{next(_entries)}"
        self._expiry = time.monotonic() + timeout
        self._store = _open(address, rank, world_size, timeout) if address else process_group_store()

    def is_one_host(self) -> bool:
        """Returns whether all processes are on one host; rank 0 waits until each has written its host."""
        key = f"{self._key}/hosts"
        advice = "check that every rank calls client.connect() equally often"
        self._set(f"{key}/{self._rank}", self._host())
        if self._rank == 0:
            events = ((rank, f"rank {rank} to call client.connect()") for rank in range(self._world_size))
            hosts = {self._poll(f"{key}/{rank}", event, advice, bytes) for rank, event in events}
            self._set(key, "one" if len(hosts) == 1 else "several")
        return self._poll(key, "rank 0 to collect the hosts of all ranks", advice, bytes) == b"one"

    def write(self, announcement: Announcement) -> None:
        """Writes the announcement; it stays there until the store closes."""
        self._set(self._key, json.dumps(announcement))

    def read(self, known: Announcement | None = None, seconds: float = math.inf) -> Announcement:
        """Waits for an announcement of rank 0 other than `known`, up to the entry's timeout or `seconds`."""

        def parse(text: bytes) -> Announcement | None:
            announcement = Announcement.parse(text)
            return None if announcement == known else announcement

        advice = "check that it calls client.connect() equally often, for the same job, without an endpoint"
        return self._poll(self._key, "rank 0 to announce a server", advice, parse, seconds)

    def _host(self) -> str:
        return f"{socket.gethostname()} {machine_id()}"

    def _poll(
        self, key: str, event: str, advice: str, parse: Callable[[bytes], T | None], seconds: float = math.inf
    ) -> T:
        """Reads a key until `parse` has a result; warnings, and ServerUnreachable at the timeout, name the `event`."""
        address = self._address
        where = f"the store at {address.host}:{address.port}" if address else "the store of the process group"
        started = time.monotonic()
        expiry = min(self._expiry, started + seconds)
        next_warning, pause = WARN_SECONDS, FIRST_PAUSE_SECONDS
        while (text := self._get(key, expiry)) is None or (result := parse(text)) is None:
            waited = time.monotonic() - started
            if started + waited >= expiry:
                timeout = f"timed out after {waited:.1f} s waiting for {event} in {where}: {advice}"
                raise ServerUnreachable(timeout, endpoint="", seconds=waited)
            if waited >= next_warning:
                next_warning = waited * 2
                logger.warning("waited %.0f s for %s in %s", waited, event, where)
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS)
        return result

    def _get(self, key: str, expiry: float) -> bytes | None:
        # Not `wait`: when it times out torch prints several lines to stderr.
        return _call(
            self._address, expiry - time.monotonic(), lambda: self._store.get(key) if self._store.check([key]) else None
        )

    def _set(self, key: str, text: str) -> None:
        _call(self._address, self._expiry - time.monotonic(), lambda: self._store.set(key, text))


def process_group_store() -> "Store":
    """Returns the store of torch's process group, with a prefix for keys of this package."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # noqa: PLC0415 - if available

    return PrefixStore(PREFIX, _get_default_store())


def _open(address: StoreAddress, rank: int, world_size: int, timeout: float) -> "Store":
    if not distributed.is_available():
        raise ConfigurationError("endpoint: expected one, since this torch was built without torch.distributed")
    from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - if available
    from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415

    identity = (os.getpid(), address)
    if identity not in _stores:
        host = f"[{address.host}]" if ":" in address.host else address.host
        meeting = rendezvous(f"tcp://{host}:{address.port}", rank, world_size, timeout=timedelta(seconds=timeout))
        _stores[identity], _, _ = _call(address, timeout, lambda: next(meeting))
    return PrefixStore(PREFIX, _stores[identity])


def _call(address: StoreAddress | None, seconds: float, call: Callable[[], T]) -> T:
    """Calls torch's store in a new thread, since a call waits for ever if the store's process is frozen."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            result.set_exception(error)

    threading.Thread(target=run, name="statsd_bn call", daemon=True).start()
    try:
        return result.result(max(0.0, seconds) + ANSWER_SECONDS)
    except (RuntimeError, TimeoutError) as error:
        # torch appends the frames of its C++ code.
        reason = str(error).partition("\n")[0] or "it does not answer; its process may be frozen, or its host cut off"
        store, endpoint = "the store of torch's process group", ""
        if address:
            store = f"torch's rendezvous store at MASTER_ADDR {address.host}, MASTER_PORT {address.port}"
            endpoint = f"tcp://{address.host}:{address.port}"
        text = f"{store}, where rank 0 announces its server: {reason}"
        raise ServerUnreachable(text, endpoint=endpoint) from error


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
        # torchrun's store outlives the processes, and may contain announcements of earlier lives of the job. The count
        # of restarts names a life on one node only, where all processes agree on it.
        is_counted = self.settings.is_one_node and self.settings.source("epoch") == "TORCHELASTIC_RESTART_COUNT"
        member = self.settings.member
        life = f"job {member.job}/{f'life {member.epoch}' if is_counted else 'latest life'}"
        return StoreEntry(self.settings.store, member.rank, member.world_size, life, member.seconds_to_join)

    def _start_server(self, secret: str | None, host: str | None) -> Connection:
        """Starts a server and announces it; with a secret, other nodes connect to `host` (None: this host's name)."""
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
        """Connects to the server that rank 0 announces; on several nodes, if that fails, to one announced later."""
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
        # `check_server_socket` reports why this process cannot enter the folder, or that another user owns it.
        pass


def bind_endpoint(address: str) -> str:
    """Returns the endpoint to bind so that other hosts reach the server at `address`: that address, if it is local.

    Otherwise all interfaces: on this host the name may resolve to a loopback address, or a NAT may translate it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET  # a name means IPv4, as in ZeroMQ
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
