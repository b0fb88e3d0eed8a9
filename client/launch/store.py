"""torch's store: rank 0 announces its server there to the other processes of the job.

It is the store of `torch.distributed.init_process_group("env://")`, which torchrun or rank 0 hosts; without a launcher,
that of the script's process group. Every client of the store can read and change an announcement.
"""

import itertools
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from torch import distributed

from client.launch.launchers import StoreAddress
from client.session.groups import machine_id
from statsd_bn.errors import ConfigurationError, ProtocolError, ServerUnreachable
from statsd_bn.text import escape, escape_lines

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger("statsd_bn.client")

T = TypeVar("T")

PREFIX = "statsd_bn"

# Growing pauses between two reads: rank 0 needs half a second, and a thousand processes may read from one store.
FIRST_PAUSE_SECONDS, PAUSE_SECONDS = 0.01, 0.25
ANSWER_SECONDS = 5.0  # a call may exceed its timeout by this; a store answers in milliseconds
WARN_SECONDS = 10.0  # then at doubling intervals

# Keep references: a store that is garbage-collected closes, and rank 0's closes for all. The process id is part of the
# key because a forked child must not use its parent's store.
_stores: dict[tuple[int, StoreAddress], "Store"] = {}

# A process may disconnect and connect to another server: the n-th connect of each process uses the n-th entry.
_entries = itertools.count()


class Announcement(NamedTuple):
    """Rank 0's server, with its count of restarts of the job, or the problem because of which it has none."""

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

    The name of this life of the job distinguishes it from earlier ones: torchrun's store outlives the processes.
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
        """Reads a key until `parse` has a result; warns and raises ServerUnreachable with the event it waits for."""
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
    """Makes a call of torch's store in a new thread, since it waits for ever for a frozen process."""
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
