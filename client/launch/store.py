"""torch's store: rank 0 announces its server there, and the other processes of the job look for it.

It is the store of `torch.distributed.init_process_group("env://")`. torchrun keeps it; without torchrun rank 0
keeps it, and a later process group uses it too. Where no launcher says where it is, it is the store of the process
group that the script has initialised. Whoever reaches the store can read and change an announcement, so it holds no
secret unless the user asks for that.
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
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from torch import distributed

from client.launch.launchers import StoreAddress
from client.session.groups import this_machine
from statsd_bn.errors import ConfigurationError, ProtocolError, ServerUnreachable
from statsd_bn.text import plain, readable

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger("statsd_bn.client")

T = TypeVar("T")

PREFIX = "statsd_bn"

# Pauses between two looks into the store, growing: rank 0 needs half a second, and a thousand others ask one store.
FIRST_PAUSE_SECONDS = 0.01
PAUSE_SECONDS = 0.25

# A store answers in milliseconds, but torch waits for ever for one whose process is frozen. It gets this much time on
# top of the timeout.
ANSWER_SECONDS = 5.0

# Warn after this long, then at doubling intervals.
WARN_SECONDS = 10.0

# Keep references: a store that is collected closes, and rank 0's closes for all. The process id is part of the key
# because a forked child must not use its parent's store.
_stores: dict[tuple[int, StoreAddress], "Store"] = {}

# A process may connect again after it has disconnected, to another server: the n-th time all use the n-th entry.
_entries = itertools.count()


@dataclass(frozen=True, slots=True)
class Announcement:
    """What rank 0 writes into the store.

    Attributes:
        endpoint: where its server listens.
        epoch: how often the job was restarted, as rank 0 counts it.
        secret: from which all make their keys; empty where they have it already, or use no keys.
        problem: why there is no server; empty if there is one.
    """

    endpoint: str = ""
    epoch: int = 0
    secret: str = field(default="", repr=False)
    problem: str = ""

    @classmethod
    def parse(cls, text: bytes) -> "Announcement":
        """Reads an announcement.

        Raises:
            ProtocolError: the text is not an announcement.
        """
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            # The reason may quote a secret.
            raise ProtocolError("expected the announcement of rank 0 in torch's store, got something else") from None
        if any(type(getattr(found, each.name)) is not type(each.default) for each in fields(cls)):
            raise ProtocolError(
                "expected the announcement of rank 0 in torch's store, with a text for each text and an epoch"
            )
        # Both texts appear in errors, and anybody can write to the store.
        return replace(found, endpoint=plain(found.endpoint), problem=readable(found.problem))


class StoreEntry:
    """The place in torch's store for one connect of the job.

    Args:
        address: where the store listens; None: it is that of torch's process group.
        life: tells this life of the job from earlier ones; torchrun's store outlives the processes.
        timeout: how long the other processes may take, in seconds.

    Raises:
        ServerUnreachable: there is no store, or it did not start in time.
    """

    def __init__(self, address: StoreAddress | None, rank: int, world_size: int, life: str, timeout: float) -> None:
        self._address = address
        self._rank = rank
        self._world_size = world_size
        self._key = f"{life}/{next(_entries)}"
        self._expiry = time.monotonic() + timeout
        self._store = _open(address, rank, world_size, timeout) if address else of_process_group()

    def is_one_host(self) -> bool:
        """Returns whether all processes are on one host. Rank 0 waits until each has said where it is.

        Raises:
            ServerUnreachable: not all did in time, or the store is gone.
        """
        verdict = f"{self._key}/hosts"
        self._set(f"{verdict}/{self._rank}", self._host())
        if self._rank == 0:
            ranks = range(self._world_size)
            hosts = {self._wait_for(f"{verdict}/{rank}", f"rank {rank} to call client.connect()") for rank in ranks}
            self._set(verdict, "one" if len(hosts) == 1 else "several")
        return self._wait_for(verdict, "rank 0 to hear from all ranks where they are") == b"one"

    def write(self, announcement: Announcement) -> None:
        """Writes the announcement; it stays there until the store closes.

        Raises:
            ServerUnreachable: the store is gone.
        """
        self._set(self._key, json.dumps(asdict(announcement)))

    def read(self, known: Announcement | None = None, seconds: float = math.inf) -> Announcement:
        """Waits for an announcement of rank 0.

        Args:
            known: an announcement to ignore.
            seconds: give up after this long, if that is sooner than the timeout.

        Raises:
            ServerUnreachable: no announcement came in time, or the store is gone.
            ProtocolError: what came is not an announcement.
        """

        def look(expiry: float) -> Announcement | None:
            text = self._look(self._key, expiry)
            announcement = None if text is None else Announcement.parse(text)
            return None if announcement == known else announcement

        found = self._wait(look, "rank 0 to announce a server", seconds)
        if isinstance(found, float):
            raise self._nothing_came(found)
        return found

    def _host(self) -> str:
        # No other host has the same.
        return f"{socket.gethostname()} {this_machine()}"

    def _wait_for(self, name: str, what: str) -> bytes:
        found = self._wait(lambda expiry: self._look(name, expiry), what)
        if isinstance(found, float):
            raise ServerUnreachable(
                f"waited {found:.1f} s for {what}, in {self._where}; do all ranks of the job call client.connect() as "
                "often as this process?",
                endpoint="",
                seconds=found,
            )
        return found

    def _wait(self, look: Callable[[float], T | None], what: str, seconds: float = math.inf) -> T | float:
        """Returns what `look` finds; the seconds that were waited if it finds nothing in time."""
        started = time.monotonic()
        expiry = min(self._expiry, started + seconds)
        next_warning, pause = WARN_SECONDS, FIRST_PAUSE_SECONDS
        while (found := look(expiry)) is None:
            waited = time.monotonic() - started
            if started + waited >= expiry:
                return waited
            if waited >= next_warning:
                next_warning = waited * 2
                logger.warning("has waited %.0f s for %s in %s", waited, what, self._where)
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS)
        return found

    def _look(self, name: str, expiry: float) -> bytes | None:
        left = max(0.0, expiry - time.monotonic())
        try:
            return with_timeout(left + ANSWER_SECONDS, lambda: self._text(name))
        except (RuntimeError, TimeoutError) as error:
            raise _no_store(self._address, error) from error

    def _text(self, name: str) -> bytes | None:
        # Not `wait`: when it times out torch prints several lines to stderr.
        return self._store.get(name) if self._store.check([name]) else None

    def _set(self, name: str, text: str) -> None:
        try:
            self._store.set(name, text)
        except RuntimeError as error:
            raise _no_store(self._address, error) from error

    @property
    def _where(self) -> str:
        if self._address is None:
            return "the store of the process group"
        return f"the store at {self._address.host}:{self._address.port}"

    def _nothing_came(self, waited: float) -> ServerUnreachable:
        return ServerUnreachable(
            f"rank 0 has announced no server in {self._where} within {waited:.1f} s; does it call client.connect() as "
            "often as this process, for the same job, and without an endpoint too?",
            endpoint="",
            seconds=waited,
        )


def of_process_group() -> "Store":
    """Returns the store that torch's process group has met in, for what is ours."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # noqa: PLC0415 - where there is one

    return PrefixStore(PREFIX, _get_default_store())


def _open(address: StoreAddress, rank: int, world_size: int, timeout: float) -> "Store":
    if not distributed.is_available():
        raise ConfigurationError("endpoint: expected one, since this torch was built without torch.distributed")
    from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - where there is one
    from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415 - as above

    identity = (os.getpid(), address)
    if identity not in _stores:
        host = f"[{address.host}]" if ":" in address.host else address.host
        url = f"tcp://{host}:{address.port}"
        try:
            _stores[identity], _, _ = with_timeout(
                timeout + ANSWER_SECONDS,
                lambda: next(rendezvous(url, rank, world_size, timeout=timedelta(seconds=timeout))),
            )
        except (RuntimeError, TimeoutError) as error:
            raise _no_store(address, error) from error
    return PrefixStore(PREFIX, _stores[identity])


def _no_store(address: StoreAddress | None, error: RuntimeError | TimeoutError) -> ServerUnreachable:
    # torch adds the frames of its own code.
    reason = str(error).partition("\n")[0] or "it does not answer; its process may be frozen, or its host cut off"
    if address is None:
        text = f"the store of torch's process group, where rank 0 announces its server: {reason}"
        return ServerUnreachable(text, endpoint="")
    return ServerUnreachable(
        f"torch's rendezvous store at MASTER_ADDR {address.host}, MASTER_PORT {address.port}, where rank 0 announces "
        f"its server: {reason}",
        endpoint=f"tcp://{address.host}:{address.port}",
    )


def with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Makes a call in a thread of its own and returns its result; a call that takes longer is left behind.

    torch's store needs this: whatever its timeout says, it waits for ever for a process that is frozen.

    Raises:
        TimeoutError: the call took longer.
    """
    result: Future[T] = Future()
    threading.Thread(target=_make, args=[call, result], name="statsd_bn call", daemon=True).start()
    return result.result(seconds)


def _make(call: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is raised where the call was asked for
        result.set_exception(error)
