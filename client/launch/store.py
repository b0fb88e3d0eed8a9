"""The meeting: member 0 tells the others where its master is, through the store in which torch's processes meet.

It is the store of `torch.distributed.init_process_group("env://")`: torchrun keeps it; without torchrun member 0's
process does, for a later process group as well. Whoever reaches the store can read and change what is told, so no
secret is told unless that is asked for.
"""

import itertools
import json
import logging
import math
import os
import time
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import distributed

from client.launch.bounded import within
from client.launch.launchers import StoreAddress
from statsd_bn.errors import ConfigurationError, ProtocolError, ServerUnreachable
from statsd_bn.text import plain, readable

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger("statsd_bn.client")

PREFIX = "statsd_bn"

# Between two looks into the store, growing: member 0 needs half a second, and a thousand others ask one store.
FIRST_PAUSE_SECONDS = 0.01
PAUSE_SECONDS = 0.25

# A store answers in milliseconds, but torch waits without a limit for one whose process is frozen. Beyond the time that
# the others may take it has this much.
ANSWER_SECONDS = 5.0

# From when on, and then in growing intervals, a wait is worth a warning.
WARN_SECONDS = 10.0

# The stores that this process has opened: one that were forgotten would be closed, and member 0's for everybody. A
# forked child must not use its parent's.
_stores: dict[tuple[int, StoreAddress], "Store"] = {}

# A process may connect again when it has disconnected, to another master.
_meetings = itertools.count()


@dataclass(frozen=True, slots=True)
class News:
    """What member 0 tells.

    Attributes:
        endpoint: where its master listens.
        epoch: this life of the job as member 0 counts it.
        secret: from which all make their keys; empty where they have it already, or there are no keys.
        problem: why there is no master; empty if there is one.
    """

    endpoint: str = ""
    epoch: int = 0
    secret: str = field(default="", repr=False)
    problem: str = ""

    @classmethod
    def parse(cls, text: bytes) -> "News":
        """Returns what was told.

        Raises:
            ProtocolError: it is none.
        """
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            # The reason may quote a secret.
            raise ProtocolError("expected the news of member 0 in torch's store, got something else") from None
        if any(type(getattr(found, each.name)) is not type(each.default) for each in fields(cls)):
            raise ProtocolError(
                "expected the news of member 0 in torch's store, with a text for each text and an epoch"
            )
        # Both end in errors, and the store takes what anybody tells it.
        return replace(found, endpoint=plain(found.endpoint), problem=readable(found.problem))


class Meeting:
    """One connect of this process, the same one by number of each of the others.

    Args:
        place: where the store is.
        member: this process's number.
        world_size: how many processes there are.
        life: what tells this life of the processes from the ones before, in the store that torchrun keeps for all.
        patience: how long the others may take, in seconds.

    Raises:
        ServerUnreachable: there is no store, or it did not become one in time.
    """

    def __init__(self, place: StoreAddress, member: int, world_size: int, life: str, patience: float) -> None:
        self._place = place
        self._key = f"{life}/{next(_meetings)}"
        self._expiry = time.monotonic() + patience
        self._store = _open(place, member, world_size, patience)

    def tell(self, news: News) -> None:
        """Tells the others; they find it until the store is closed.

        Raises:
            ServerUnreachable: the store is gone.
        """
        try:
            self._store.set(self._key, json.dumps(asdict(news)))
        except RuntimeError as error:
            raise _no_store(self._place, error) from error

    def hear(self, known: News | None = None, seconds: float = math.inf) -> News:
        """Waits for the news of member 0.

        Args:
            known: what is no news.
            seconds: how long it may take, where that is less than the others may take.

        Raises:
            ServerUnreachable: none came in time, or the store is gone.
            ProtocolError: what came is none.
        """
        started = time.monotonic()
        expiry = min(self._expiry, started + seconds)
        next_warning, pause = WARN_SECONDS, FIRST_PAUSE_SECONDS
        while (news := self._look(expiry)) in {None, known}:
            waited = time.monotonic() - started
            if started + waited >= expiry:
                raise self._unheard(waited)
            if waited >= next_warning:
                next_warning = waited * 2
                logger.warning("waiting since %.0f s for member 0 to start a master, at %s:%d", waited, *self._place)
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS)
        return news

    def _look(self, expiry: float) -> News | None:
        left = max(0.0, expiry - time.monotonic())
        try:
            told = within(left + ANSWER_SECONDS, self._told)
        except (RuntimeError, TimeoutError) as error:
            raise _no_store(self._place, error) from error
        return None if told is None else News.parse(told)

    def _told(self) -> bytes | None:
        # Not `wait`: torch writes several lines to the error output for each that runs out.
        return self._store.get(self._key) if self._store.check([self._key]) else None

    def _unheard(self, waited: float) -> ServerUnreachable:
        return ServerUnreachable(
            f"member 0 has told nobody of a master, in the store at {self._place.host}:{self._place.port}, within "
            f"{waited:.1f} s; does it call client.connect() as often as this process, for the same job, and without an "
            "endpoint too?",
            endpoint="",
            seconds=waited,
        )


def _open(place: StoreAddress, member: int, world_size: int, patience: float) -> "Store":
    if not distributed.is_available():
        raise ConfigurationError("endpoint: expected one, since this torch was built without torch.distributed")
    from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - where there is one
    from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415 - as above

    identity = (os.getpid(), place)
    if identity not in _stores:
        host = f"[{place.host}]" if ":" in place.host else place.host
        try:
            _stores[identity], _, _ = within(
                patience + ANSWER_SECONDS,
                lambda: next(
                    rendezvous(f"tcp://{host}:{place.port}", member, world_size, timeout=timedelta(seconds=patience))
                ),
            )
        except (RuntimeError, TimeoutError) as error:
            raise _no_store(place, error) from error
    return PrefixStore(PREFIX, _stores[identity])


def _no_store(place: StoreAddress, error: RuntimeError | TimeoutError) -> ServerUnreachable:
    # torch adds the frames of its own code.
    reason = str(error).partition("\n")[0] or "it does not answer; its process may be frozen, or its host cut off"
    return ServerUnreachable(
        f"torch's rendezvous store at MASTER_ADDR {place.host}, MASTER_PORT {place.port}, through which member 0 "
        f"tells where its master is: {reason}",
        endpoint=f"tcp://{place.host}:{place.port}",
    )
