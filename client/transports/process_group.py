"""ProcessGroupPipe: the transport over a process group of torch's.

Every rank gathers the rows of all and adds them in rank order for itself, to the same bits as over the other
transports. Only the order of the collectives holds the ranks together, so each also says which round it has come for.

Where the members of a job have agreed on the default process group, see `client.transports.agreement`, their server
watches: rounds have the job's keys, and long waits are told to it. Without a server the group tells what else goes
wrong: its errors and its deadline are torch's.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from client.diagnostics.broken_job import CAUSE_SECONDS
from client.native.row import NativeRow
from client.session.connection import Connection
from client.session.current import current_connection, has_been_alone, has_been_connected
from client.session.groups import this_place
from client.session.protocol.all_gather import MAX_BYTES
from client.session.protocol.session import Session, Steps
from client.tracebacks import hide_internal_frames
from client.transports.group_insight import Here, ToServer, insight_of
from client.transports.key_digest import digest_of
from client.transports.named_process_group import NamedProcessGroup
from client.transports.server import SlavePipe
from client.transports.transport import Transport
from client.transports.watched_round import WatchedRound
from statsd_bn import limits
from statsd_bn.error_text import MOST_ROWS, Place, Row, error_text
from statsd_bn.errors import ConfigurationError, ConnectionClosed, ProtocolError, RoundMismatch, StatsdBNError
from statsd_bn.members import NOBODY, Members
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows, bearers, is_finite, sum_in_order
from statsd_bn.round_key import FORWARD, GATHER, RoundKey, advice_for
from statsd_bn.text import readable

logger = logging.getLogger("statsd_bn.client")

Words = npt.NDArray[np.int64]

# Gloo ends the process where ranks bring different sizes, and would not say why. So all messages of layers up to 2,048
# channels have one size; longer ones double it, again and again. On one host this takes no longer.
LEAST_WORDS = 4104

# Words of a message: which round it is about, how many rows of which shape there are, and then the first row.
DIGEST, ROWS, VECTORS, CHANNELS, FIRST_ROW = range(5)

WORD_BYTES = 8

# What the server is told of a wait for anything but rows.
_NOTHING = Rows((0,), np.zeros((1, 1, 1)))

# What a rank says of where it runs, and of the round that it has come for, where they differ; in bytes.
NAME_BYTES = 1024

# What the log adds where this process is not connected either.
WITHOUT_SERVER = (
    ": a rank that hangs or is lost is not reported, and the others wait until torch's timeout; "
    "client.connect() before training reports it"
)


@dataclass(frozen=True, slots=True)
class ProcessGroupPipe:
    """The transport over a process group of torch's.

    Args:
        process_group: whose ranks synchronise.
        layer: the layer's name, the same on every rank.
    """

    process_group: NamedProcessGroup
    layer: str

    def run_slave(self, contribution: Rows, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Gathers the rows of all ranks and adds them.

        Args:
            contribution: as `SlavePipe.run_slave` takes it.
            key: likewise.
            phase: likewise.

        Raises:
            RoundMismatch: on all ranks: they have come for different rounds.
            ProtocolError: on all ranks: one has told numbers that none can have.
            ConfigurationError: the process group is gone.
            ConnectionClosed: it is that of the process which this one was forked from.
            RuntimeError: torch's, for whatever goes wrong in the process group.
            StatsdBNError: the round failed, with the reason, where a server watches.
        """
        if watch := watch_of(self.process_group.name):
            aggregate: Aggregate = watch.exchange(self.layer, contribution, key, None, self._take_part, phase)
            return aggregate
        try:
            group = group_of(self)
            rounds = rounds_of(group)
            with rounds.lock:
                key = key or self.key(*rounds.steps.next(self.layer), phase)
                rounds.steps.begins(key.phase)
                return _sum(group, contribution, key)
        except StatsdBNError as error:
            hide_internal_frames(error)
            raise

    def run_row(self, row: NativeRow, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Gathers the row as any other."""
        return self.run_slave(row.measured(), key, phase)

    def _take_part(self, session: Session, key: RoundKey, rows: Rows) -> Aggregate:
        group, began = group_of(self), time.monotonic()
        rounds = rounds_of(group)
        with rounds.lock, rounds.watched(key, rows) as round_:
            aggregate = _sum(group, rows, key)
        session.transport.rounds_in_memory += not (round_ and round_.is_counted)
        session.transport.seconds_in_memory += time.monotonic() - began
        return aggregate

    @property
    def rank(self) -> int:
        """This process's number among the members that an aggregate names: torch's, in the default process group."""
        return distributed.get_rank()

    def places(self) -> Mapping[int, str]:
        """Those that the ranks have told one another before their first round."""
        try:
            return rounds_of(group_of(self)).places
        except ConfigurationError:  # what is told late may be of a group that is gone
            return {}

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Returns the key of a round of an earlier call."""
        return _key(watch_of(self.process_group.name), step, self.layer, call, phase)


def _key(watch: Connection | None, step: int, name: str, call: int, phase: str) -> RoundKey:
    job = ("torch", "process group", 0) if watch is None else (watch.member.job, watch.member.group, watch.member.epoch)
    return RoundKey(*job, step, name, call, phase)


def watch_of(name: str) -> Connection | None:
    """Returns the connection whose members have agreed on the process group of this name for their rows."""
    connection = current_connection()
    agreed = connection.of_all.process_group if connection else None
    return connection if agreed is not None and agreed.name == name else None


def follows(transport: Transport, earlier: Transport) -> bool:
    """Whether a layer goes over a process group on which its job agreed after an earlier round over the server."""
    return isinstance(transport, ProcessGroupPipe) and isinstance(earlier, SlavePipe) and earlier.group is None


def group_of(pipe: ProcessGroupPipe) -> Any:
    """Returns the process group of a transport.

    Raises:
        ConfigurationError: this process has no such group, or is not in it.
    """
    if not pipe.process_group.size:
        raise ConfigurationError(
            f"layer {pipe.layer!r}: expected a process group that this process is in, where it trains, got another"
        )
    return pipe.process_group.find()


def tell(pipe: ProcessGroupPipe, aggregate: Aggregate) -> None:
    """Tells of an aggregate that is not finite, and has not come over the host, whoever takes the group's rounds."""
    with suppress(ConfigurationError):  # as above
        if insight := rounds_of(group_of(pipe)).insight:
            insight.tell(aggregate)


def all_gather(process_group: NamedProcessGroup, name: str, message: bytes) -> dict[int, bytes]:
    """Returns every rank's bytes, of any length, by rank in the process group.

    Args:
        process_group: whose ranks gather.
        name: of what is gathered, the same on every rank; chosen like the name of a layer.
        message: this rank's.

    Raises:
        RoundMismatch: on all ranks: they have come for different things.
        ProtocolError: on all ranks: one has told a length that none can have.
    """
    group = process_group.find()
    rounds = rounds_of(group)
    with rounds.lock:
        step, call = rounds.steps.next(name)
        key = _key(rounds.watch, step, name, call, GATHER)
        # What others send is never unpickled, as torch's `all_gather_object` would.
        with rounds.watched(key):
            lengths = met(group, key, (1, 1), 1, np.array([len(message)], np.int64))[:, FIRST_ROW]
            _check(group, key, "bytes", lengths, 0, MAX_BYTES)
            words = np.frombuffer(message.ljust(_up_to_words(max(lengths)), b"\0"), np.int64)
            messages = _gathered(group, words)
    return {rank: messages[rank].tobytes()[:length] for rank, length in enumerate(lengths)}


def _up_to_words(size: int) -> int:
    return -(-size // WORD_BYTES) * WORD_BYTES


class Rounds:
    """The rounds of this process in one process group.

    Attributes:
        lock: held while a round is under way: collectives have no names, so two rounds must not mix.
        watch: the connection whose server watches them; None without one.
        steps: counts them, as for a server.
        insight: takes rows of them; None on all ranks but one.
        places: where the ranks run, by their number; nobody's before the first round over the host.
        on_device: of the layers whose ranks have agreed on it, how many rows each brings on its device; 0 where they go
            over the host.
        device: where messages of the host travel in a group that takes none there: that of the newest input of a layer.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.watch: Connection | None = None
        self.steps = Steps()
        self.places: dict[int, str] = {}
        self.insight: ToServer | Here | None = None
        self._round: WatchedRound | None = None
        self._latest: RoundKey | None = None
        self.on_device: dict[str, int] = {}
        self.device: torch.device | None = None

    def look_on(self, group: Any, watch: Connection | None = None) -> None:
        """Has a connection's server watch from now on, or this process itself."""
        self.watch = watch
        ranks = distributed.get_process_group_ranks(group)
        self.insight = insight_of(group.group_name, ranks, group.rank(), self.places)
        if watch:
            self.steps, self._latest = watch.session(None).steps, None
            watch.at_end.append(self._come_through)

    @contextmanager
    def watched(self, key: RoundKey, rows: Rows = _NOTHING) -> Iterator[WatchedRound | None]:
        """Has the server hear of a round that takes long on the host; the lock is held."""
        if self.watch:
            self.watch.check_whole()
            self._round = WatchedRound(self.watch, key, rows, self._latest)
        try:
            yield self._round
            self._latest = key
        finally:
            self._round = None

    def begin_on_devices(self, pipe: ProcessGroupPipe, key: RoundKey | None, phase: str) -> RoundKey:
        """Returns the key of a round on devices that begins now; the lock is held."""
        if self.watch:
            self.watch.check_whole()
            self.watch.rounds += 1
            self.watch.of_all.rounds_in_memory += 1
        key = key or pipe.key(*self.steps.next(pipe.layer), phase)
        self.steps.begins(key.phase)
        return key

    def wait(self, work: Any, device: torch.device) -> None:
        """Waits for a collective; one on a device is waited for by that, and `BrokenJob` sees to it."""
        if self._round and device.type == "cpu":
            self._round.wait(work)
        else:
            work.wait()

    def _come_through(self) -> None:
        """Waits until the device has done the rounds that were begun, for a while: others may not have begun them.

        Else they would hear that this rank has left, and take it for missing in a round that it has brought rows to.
        """
        if self.device is None or self.watch is None:
            return
        module, until = torch.get_device_module(self.device), time.monotonic() + CAUSE_SECONDS
        event = module.current_stream(self.device).record_event()
        while not (event.query() or self.watch.is_broken) and time.monotonic() < until:
            time.sleep(0.001)


_rounds: "WeakKeyDictionary[Any, Rounds]" = WeakKeyDictionary()


class _Inherited:
    """The default process group that a forked child has of its parent; its threads and sockets stay with the parent.

    Attributes:
        world: the group; None in a process that has inherited none.
        process: which process joined it.
    """

    world: Any = None
    process = os.getpid()

    def note(self) -> None:
        """Notes what this process, a child that was just forked, has inherited."""
        world = distributed.group.WORLD if distributed.is_available() else None
        if world is None or world is not self.world:
            self.world, self.process = world, os.getppid()

    def check(self) -> None:
        """Raises ConnectionClosed while this process has no other default process group than that of its parent."""
        if self.world is not None and self.world is distributed.group.WORLD:
            raise ConnectionClosed(
                f"torch's process group of {distributed.get_world_size()} ranks was joined by process {self.process} "
                f"and cannot be used by its forked child {os.getpid()}; evaluate there, or call "
                "client.connect(rank=0, world_size=1) to train alone there"
            )


_inherited = _Inherited()
os.register_at_fork(after_in_child=_inherited.note)


def rounds_of(group: Any) -> Rounds:
    """Returns the rounds of this process in a group; the log says when they begin, and when another server watches.

    Raises:
        ConnectionClosed: the group is that of the process which this one was forked from.
    """
    _inherited.check()
    rounds, watch = _rounds.get(group), watch_of(group.group_name)
    if rounds is None or rounds.watch is not watch:
        rounds = _rounds.setdefault(group, Rounds())
        rounds.look_on(group, watch)
        # Whoever was connected to others may mean to be alone now, and the others may still be connected.
        has_had_others = has_been_connected() and not has_been_alone()
        connection = current_connection()
        is_after_connection = has_had_others and connection is None
        logger.log(
            logging.WARNING if is_after_connection else logging.INFO,
            "%sthis process synchronises over torch's process group %r of %d ranks (%s), %s%s",
            "the connection is closed: " if is_after_connection else "",
            group.group_name,
            group.size(),
            distributed.get_backend(group),
            "watched by the server" if watch else "without a server",
            WITHOUT_SERVER if connection is None or connection.is_in_process else "",
        )
    return rounds


def _sum(group: Any, contribution: Rows, key: RoundKey) -> Aggregate:
    """Returns the sum over all ranks."""
    shape = contribution.values.shape[1:]
    first, *others = _as_words(contribution)
    messages = met(group, key, shape, 1 + len(others), first)
    firsts = messages[:, FIRST_ROW : FIRST_ROW + len(first)]
    rows = _with_others(group, firsts, others, messages[:, ROWS])
    counts = [int(row[0]) for row in rows]
    if min(counts) < 0:
        raise ProtocolError(f"{key}: expected counts from 0, got {min(counts)}")
    values = [np.ascontiguousarray(row[1:]).view(np.float64).reshape(shape) for row in rows]
    total = sum_in_order(values)
    ranks = distributed.get_process_group_ranks(group)
    whose = NOBODY if is_finite(total) else bearers(zip(_of_rows(ranks, messages[:, ROWS]), values, strict=True))
    aggregate = Aggregate(key, len(rows), sum(counts), Members.of(ranks), total, non_finite=whose)
    if insight := rounds_of(group).insight:
        now = time.monotonic()
        if whose.runs:
            insight.tell(aggregate)
        elif insight.samples.is_due(now, key):
            insight.samples.look(now, key, counts, messages[:, ROWS].tolist(), np.stack(values))
    return aggregate


def _of_rows(ranks: list[int], numbers: Words) -> list[int]:
    """Returns the rank that each row is of, where each has brought so many."""
    return [int(rank) for rank in np.repeat(ranks, numbers)]


def met(group: Any, key: RoundKey, shape: tuple[int, ...], nr_rows: int, first: Words) -> Words:
    """Returns the messages of all ranks, which have come to the same round with rows of the same shape.

    Raises:
        RoundMismatch: on all ranks: they have not.
        ProtocolError: on all ranks: one has told numbers that none can have.
    """
    rounds = rounds_of(group)
    if not rounds.places:  # nobody waits longer for it than for the first round
        ranks = distributed.get_process_group_ranks(group)
        rounds.places.update(zip(ranks, _texts(group, this_place()), strict=True))
    head = np.array([np.uint64(digest_of(key)).view(np.int64), nr_rows, *shape], np.int64)
    messages = _gathered(group, np.concatenate((head, first)))
    if (messages[:, (DIGEST, VECTORS, CHANNELS)] != head[[DIGEST, VECTORS, CHANNELS]]).any():
        raise _mismatch(group, key, shape)
    _check(group, key, "rows", messages[:, ROWS], 1, limits.MAX_REPLICAS)
    return messages


def _check(group: Any, key: RoundKey, what: str, numbers: Words, least: int, most: int) -> None:
    """Raises ProtocolError, on all ranks alike, if one of them has told a number that none can have."""
    if least <= numbers.min() and numbers.max() <= most:
        return
    place = int(((numbers < least) | (numbers > most)).argmax())
    rank = distributed.get_process_group_ranks(group)[place]
    raise ProtocolError(f"{key}: expected {least} to {most} {what} from rank {rank}, got {numbers[place]}")


def _as_words(contribution: Rows) -> list[Words]:
    """Returns the rows as they travel: the count, then the bits of the values."""
    words = contribution.values.view(np.int64).reshape(len(contribution.counts), -1)
    counts = np.array(contribution.counts, np.int64).reshape(-1, 1)
    return list(np.concatenate((counts, words), axis=1))


def _with_others(group: Any, firsts: Words, others: list[Words], numbers: Words) -> list[Words]:
    """Returns all rows in rank order; where a rank has more than one, the others come in a message of their own."""
    most = int(numbers.max()) - 1
    if not most:
        return list(firsts)
    rest = np.zeros((most, firsts.shape[1]), np.int64)
    rest[: len(others)] = np.array(others).reshape(-1, firsts.shape[1])
    gathered = _gathered(group, rest.ravel())[:, : rest.size].reshape(len(firsts), *rest.shape)
    return [row for rank, first in enumerate(firsts) for row in (first, *gathered[rank, : numbers[rank] - 1])]


def _mismatch(group: Any, key: RoundKey, shape: tuple[int, ...]) -> RoundMismatch:
    """Asks all what they have come for; all know by now that they differ."""
    vectors, channels = shape
    names = _texts(group, f"{key.in_words()}, {channels} channels, {vectors} vectors")
    ranks = distributed.get_process_group_ranks(group)
    places = []
    for told in dict.fromkeys(names):
        there = [rank for rank, each in zip(ranks, names, strict=True) if each == told]
        place = f"in {told}"
        places.append(Place([Row((f"rank {rank}", place)) for rank in there[:MOST_ROWS]], len(there), place))
    places.sort(key=lambda place: -place.size)
    what = "deadlock: the ranks wait in different rounds"
    text = error_text(what, table=places, where="torch's process group", advice=advice_for(names))
    return RoundMismatch(text, **key.fields)


def _texts(group: Any, text: str) -> list[str]:
    """Returns what all ranks say, in their order; `NAME_BYTES` of each."""
    words = np.frombuffer(bytearray(text.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")), np.int64)
    said = (bytes(one.view(np.uint8)).rstrip(b"\0") for one in _gathered(group, words))
    return [readable(one.decode(errors="replace")) for one in said]


def _gathered(group: Any, words: Words) -> Words:
    """Returns the messages of all ranks, shape (ranks, words and more)."""
    size = LEAST_WORDS
    while size < len(words):
        size *= 2
    device = _device_of(group)
    message = torch.zeros(size, dtype=torch.int64, device="cpu")
    message[: len(words)] = torch.from_numpy(words)
    message = message.to(device)
    messages = torch.empty(group.size(), size, dtype=torch.int64, device=device)
    work = distributed.all_gather(list(messages.unbind()), message, group=group, async_op=True)
    rounds_of(group).wait(work, device)
    return messages.cpu().numpy()


def use_device(group: Any, device: torch.device) -> None:
    """Has later messages of the host travel by the device of a layer's input, if the group can use that device."""
    if device.type != "cpu" and any(device.type == kind.type for kind in group._device_types):  # noqa: SLF001 - has no public name
        rounds_of(group).device = device


def _device_of(group: Any) -> torch.device:
    """Returns where the group takes messages of the host; on the host, if it can.

    A group of NCCL's alone says "cuda" without a number, which would be the current device: the first one for all ranks
    whose script does not call `torch.cuda.set_device`.
    """
    devices = group._device_types  # noqa: SLF001 - has no public name
    host = torch.device("cpu")
    if host in devices:
        return host
    known: torch.device | None = rounds_of(group).device or group.bound_device_id
    return known or torch.device(devices[0].type, torch.get_device_module(devices[0]).current_device())
