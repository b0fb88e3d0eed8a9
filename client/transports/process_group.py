"""ProcessGroupPipe: the transport over a torch process group: every rank adds the rows of all ranks.

Collectives match only by order, so each message carries the digest of its round's key. Where the members of a job have
negotiated the default process group, rounds have the job's keys and the server reports long waits. Without a
connection torch's timeout applies, and torch raises all errors but mismatches.
"""

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ctypes import c_int64
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from client.session.connection import Connection, current_connection, latest_connection
from client.session.groups import host_and_pid
from client.session.protocol.all_gather import MAX_BYTES
from client.tracebacks import hide_internal_frames
from client.transports.process_group_monitor import Rounds
from client.transports.server import SlavePipe
from client.transports.transport import Transport, key_digest
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError, ConnectionClosed, ProtocolError, RoundMismatch, StatsdBNError
from statsd_bn.members import NO_MEMBERS, Members
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows, is_finite, non_finite_members, sum_in_order
from statsd_bn.round_key import ADVICE, FORWARD, GATHER, RoundKey, advice_for
from statsd_bn.text import MAX_ROWS, Row, TableSection, error_text, escape_lines

logger = logging.getLogger("statsd_bn.client")

Words = npt.NDArray[np.int64]

# Gloo ends the process without a reason if ranks gather different sizes. So all messages of layers with up to 2,048
# channels have one size; longer messages double it as often as needed. On one host padding costs no time.
MIN_WORDS = 4104

# Words of a message: digest of the round, number and shape of the rows, then the first row.
DIGEST, ROWS, VECTORS, CHANNELS, FIRST_ROW = range(5)

WORD_BYTES = 8
TEXT_BYTES = 1024  # size of a rank's text in a gather of texts

_IS_AVAILABLE = distributed.is_available()  # in this build of torch

# End of the log line in a process without a connection.
WITHOUT_SERVER = (
    ": a rank that hangs or is lost is not reported, and the others wait until torch's timeout; "
    "client.connect() before training reports it"
)


@dataclass(frozen=True)
class NamedProcessGroup:
    """A process group of torch; name empty and size 0 for a group that this process is not in."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"process group {self.name!r} of {self.size} ranks"

    def find(self) -> Any:
        """The group itself, or torch's placeholder for a group that this process is not in."""
        if not self.size:
            return distributed.GroupMember.NON_GROUP_MEMBER
        found: Any = None
        if _IS_AVAILABLE:
            from torch._C import _distributed_c10d  # noqa: PLC0415 - missing where torch was built without it

            with suppress(RuntimeError, ValueError):
                name: Any = self.name  # torch declares a separate type for group names
                found = _distributed_c10d._resolve_process_group(name)  # noqa: SLF001 - has no public name
        if found is None:
            raise ConfigurationError(
                f"process_group: process group {self.name!r} does not exist in this process, or was destroyed"
            )
        # Torch may have given a destroyed group's name to another group. WORLD has all ranks, whatever their number.
        if found is not distributed.group.WORLD and found.size() != self.size:
            raise ConfigurationError(
                f"process_group: process group {self.name!r} has {found.size()} ranks now, {self.size} when the layer "
                "was converted; revert the model and convert it with the new group"
            )
        return found


def default_group() -> NamedProcessGroup | None:
    """Torch's default process group; None without one, or if this process is its only rank."""
    # In a traced call torch.compile guards WORLD, but not `is_initialized`. The compiler of torch 2.6 takes WORLD for a
    # group even if it is None.
    if not _IS_AVAILABLE:
        return None
    world = distributed.group.WORLD
    if world is None or not distributed.is_initialized() or world.size() == 1:
        return None
    return NamedProcessGroup(world.group_name, world.size())


def named(process_group: Any) -> NamedProcessGroup:
    """Convert a process group of torch, of any size."""
    if _IS_AVAILABLE:
        if process_group is distributed.GroupMember.NON_GROUP_MEMBER:
            return NamedProcessGroup("", 0)
        if isinstance(process_group, distributed.ProcessGroup):
            return NamedProcessGroup(process_group.group_name, process_group.size())
    raise ConfigurationError(
        f"process_group: expected a torch process group, as new_group() returns it, got {process_group!r:.80}"
    )


@dataclass(frozen=True, slots=True)
class ProcessGroupPipe(Transport):
    """The transport over a torch process group."""

    process_group: NamedProcessGroup
    layer: str

    def run_slave(self, contribution: Rows, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Gather the rows of all ranks and add them; arguments as for `SlavePipe.run_slave`."""
        if connection := connection_over(self.process_group.name):
            with connection.round(self.layer, key, None, phase) as round_:
                group, started = group_of(self), time.monotonic()
                rounds = rounds_of(group)
                with rounds.lock, rounds.watched(round_.key, contribution):
                    aggregate = _sum(group, contribution, round_.key)
                    is_counted = rounds.is_counted
                transport = round_.session.transport
                transport.bypassed_rounds += not is_counted
                transport.bypassed_seconds += time.monotonic() - started
                return aggregate
        try:
            group = group_of(self)
            rounds = rounds_of(group)
            with rounds.lock:
                return _sum(group, contribution, self.begin(rounds, key, phase))
        except StatsdBNError as error:
            hide_internal_frames(error)
            raise

    def begin(self, rounds: Rounds, key: RoundKey | None, phase: str) -> RoundKey:
        """Begin a round that `Connection.round` does not run, and return its key; the caller holds `rounds.lock`."""
        if connection := rounds.connection:
            connection.raise_if_broken()
            connection.rounds += 1
            connection.world_transport.bypassed_rounds += 1
        key = key or self.key(*rounds.steps.next(self.layer), phase)
        rounds.steps.record_phase(key.phase)
        return key

    @property
    def rank(self) -> int:
        """This process's number among the ranks that an aggregate lists: its rank in torch's default process group."""
        return distributed.get_rank()

    def places(self) -> Mapping[int, str]:
        """Places of the ranks, which they gathered before their first round."""
        with suppress(ConfigurationError):  # a late report may be of a group that no longer exists
            return rounds_of(group_of(self)).places
        return {}

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Key of a round of a call."""
        if (connection := connection_over(self.process_group.name)) is None:
            return RoundKey("torch", "process group", 0, step, self.layer, call, phase)
        member = connection.member
        return RoundKey(member.job, member.group, member.epoch, step, self.layer, call, phase)


def connection_over(name: str) -> Connection | None:
    """The current connection, if its members have negotiated the process group of this name."""
    connection = current_connection()
    negotiated = connection.world_transport.process_group if connection else None
    return connection if negotiated is not None and negotiated.name == name else None


def switched_from_server(transport: Transport, earlier: Transport) -> bool:
    """Whether a layer now uses the process group of its job, and its earlier round went over the server."""
    return isinstance(transport, ProcessGroupPipe) and isinstance(earlier, SlavePipe) and earlier.group is None


def group_of(pipe: ProcessGroupPipe) -> Any:
    """The process group of a transport."""
    if not pipe.process_group.size:
        raise ConfigurationError(
            f"layer {pipe.layer!r}: this process is not a member of the layer's process group; train the layer on its "
            "members only"
        )
    return pipe.process_group.find()


def report_non_finite(pipe: ProcessGroupPipe, aggregate: Aggregate) -> None:
    """Report an aggregate that is not finite and was computed on devices."""
    with suppress(ConfigurationError):  # the group may no longer exist
        rounds_of(group_of(pipe)).report_non_finite(aggregate)


def all_gather(process_group: NamedProcessGroup, name: str, message: bytes) -> dict[int, bytes]:
    """Gather the ranks' bytes, of any length, by rank in the process group; no layer may have this name."""
    group = process_group.find()
    rounds = rounds_of(group)
    with rounds.lock:
        key = ProcessGroupPipe(process_group, name).key(*rounds.steps.next(name), GATHER)
        # torch's `all_gather_object` would unpickle data of other ranks.
        with rounds.watched(key):
            lengths = gather_numbers(group, key, (1, 1), len(message))
            _check(group, key, "bytes", lengths, 0, MAX_BYTES)
            padded = -(-max(lengths) // WORD_BYTES) * WORD_BYTES
            messages = _gather(group, np.frombuffer(message.ljust(padded, b"\0"), np.int64))
    return {rank: messages[rank].tobytes()[:length] for rank, length in enumerate(lengths)}


_rounds: "WeakKeyDictionary[Any, Rounds]" = WeakKeyDictionary()


# Default process groups that this forked child has inherited, and the ID of the process that owns each one's sockets.
_inherited: dict[Any, int] = {}


def _record_inherited_group() -> None:
    if _IS_AVAILABLE and distributed.group.WORLD is not None:
        _inherited.setdefault(distributed.group.WORLD, os.getppid())


os.register_at_fork(after_in_child=_record_inherited_group)


def rounds_of(group: Any) -> Rounds:
    """Rounds of this process in a group; log their beginning, and each change of the connection."""
    if (process := _inherited.get(distributed.group.WORLD)) is not None:
        raise ConnectionClosed(
            f"process {os.getpid()} was forked from process {process} and cannot use its process group of "
            f"{distributed.get_world_size()} ranks; use the model in eval mode there, or call "
            "client.connect(rank=0, world_size=1) to train alone there"
        )
    rounds, over = _rounds.get(group), connection_over(group.group_name)
    if rounds is None or rounds.connection is not over:
        rounds = _rounds.setdefault(group, Rounds())
        rounds.attach(group, over)
        # After closing its connection this process may synchronise by mistake, while the others still use theirs.
        connection, latest = current_connection(), latest_connection()
        is_disconnected = connection is None and latest is not None and not latest.is_in_process
        logger.log(
            logging.WARNING if is_disconnected else logging.INFO,
            "%sthis process synchronises over torch's process group %r of %d ranks (%s), %s%s",
            "the connection is closed: " if is_disconnected else "",
            group.group_name,
            group.size(),
            distributed.get_backend(group),
            "watched by the server" if over else "without a server",
            WITHOUT_SERVER if connection is None or connection.is_in_process else "",
        )
    return rounds


def _sum(group: Any, contribution: Rows, key: RoundKey) -> Aggregate:
    """Sum of the rows of all ranks."""
    shape = contribution.values.shape[1:]
    # Words of a row: the count, then the bits of the values.
    bits = contribution.values.view(np.int64).reshape(len(contribution.counts), -1)
    own = np.column_stack((np.array(contribution.counts, np.int64), bits))
    messages = _gather_messages(group, key, shape, len(own), own[0])
    replicas, words = messages[:, ROWS], messages[:, FIRST_ROW:]
    most, size = int(replicas.max()), own.shape[1]
    if most > 1:  # a rank has several rows: all ranks gather all their rows in a second message
        padded = np.zeros((most, size), np.int64)
        padded[: len(own)] = own
        words = _gather(group, padded.ravel())
    rows = words[:, : most * size].reshape(-1, most, size)[np.arange(most) < replicas[:, np.newaxis]]
    counts = rows[:, 0].tolist()
    if min(counts) < 0:
        raise ProtocolError(f"{key}: expected counts from 0, got {min(counts)}")
    values = rows.view(np.float64)[:, 1:].reshape(-1, *shape)
    total = sum_in_order(values)
    ranks = distributed.get_process_group_ranks(group)
    non_finite = NO_MEMBERS
    if not is_finite(total):
        non_finite = non_finite_members(zip(np.repeat(ranks, replicas).tolist(), values, strict=True))
    aggregate = Aggregate(key, len(rows), sum(counts), Members.of(ranks), total, non_finite=non_finite)
    rounds = rounds_of(group)
    if sampler := rounds.sampler:
        now = time.monotonic()
        is_due = sampler.is_due(now, key)
        if non_finite.runs:
            rounds.report_non_finite(aggregate)
        elif is_due:
            sampler.observe(now, key, counts, replicas.tolist(), values)
    return aggregate


def gather_numbers(group: Any, key: RoundKey, shape: tuple[int, ...], number: int) -> Words:
    """Gather a number of each rank, with the rounds and shapes compared as in `_gather_messages`."""
    return _gather_messages(group, key, shape, 1, np.array([number], np.int64))[:, FIRST_ROW]


def _gather_messages(group: Any, key: RoundKey, shape: tuple[int, ...], nr_rows: int, first: Words) -> Words:
    """Gather the messages of all ranks; raise RoundMismatch, on all ranks, unless their rounds and shapes are equal."""
    rounds = rounds_of(group)
    if not rounds.places:  # the first round waits for all ranks in any case
        ranks = distributed.get_process_group_ranks(group)
        rounds.places.update(zip(ranks, _gather_texts(group, host_and_pid()), strict=True))
    head = np.array([c_int64(key_digest(key)).value, nr_rows, *shape], np.int64)
    messages = _gather(group, np.concatenate((head, first)))
    if (messages[:, (DIGEST, VECTORS, CHANNELS)] != head[[DIGEST, VECTORS, CHANNELS]]).any():
        raise _mismatch(group, key, shape)
    _check(group, key, "rows", messages[:, ROWS], 1, limits.MAX_REPLICAS)
    return messages


def _check(group: Any, key: RoundKey, what: str, numbers: Words, least: int, most: int) -> None:
    """Raise ProtocolError, on all ranks alike, if one of them sent a number outside of the bounds."""
    if least <= numbers.min() and numbers.max() <= most:
        return
    index = int(((numbers < least) | (numbers > most)).argmax())
    rank = distributed.get_process_group_ranks(group)[index]
    raise ProtocolError(f"{key}: expected {least} to {most} {what} from rank {rank}, got {numbers[index]}")


def _mismatch(group: Any, key: RoundKey, shape: tuple[int, ...]) -> RoundMismatch:
    """Error that lists the rounds of all ranks, which gather them here: each rank has noticed the difference."""
    vectors, channels = shape
    names = _gather_texts(group, f"{key.describe()}, {channels} channels, {vectors} vectors")
    ranks_in: dict[str, list[int]] = {}
    for rank, name in zip(distributed.get_process_group_ranks(group), names, strict=True):
        ranks_in.setdefault(f"in {name}", []).append(rank)
    largest_first = sorted(ranks_in.items(), key=lambda item: -len(item[1]))
    return mismatch(key, largest_first, "torch's process group", advice_for(names))


def mismatch(
    key: RoundKey, ranks_in: Iterable[tuple[str, Sequence[int]]], where: str, advice: str = ADVICE
) -> RoundMismatch:
    """Error of ranks in different rounds; `ranks_in` has each round, as a text, and the ranks in it."""
    table = [
        TableSection([Row((f"rank {rank}", place)) for rank in ranks[:MAX_ROWS]], len(ranks), place)
        for place, ranks in ranks_in
    ]
    text = error_text("deadlock: the ranks wait in different rounds", table=table, where=where, advice=advice)
    return RoundMismatch(text, **key.fields)


def _gather_texts(group: Any, text: str) -> list[str]:
    """Gather a text of each rank, in order; only its first `TEXT_BYTES` bytes are sent."""
    words = np.frombuffer(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"), np.int64)
    texts = (each.tobytes().rstrip(b"\0").decode(errors="replace") for each in _gather(group, words))
    return list(map(escape_lines, texts))


def _gather(group: Any, words: Words) -> Words:
    """Gather the ranks' messages, shape (ranks, n), padded to n >= len(words)."""
    size = MIN_WORDS
    while size < len(words):
        size *= 2
    device = _message_device(group)
    message = torch.zeros(size, dtype=torch.int64, device="cpu")
    message.numpy()[: len(words)] = words
    message = message.to(device)
    messages = torch.empty(group.size(), size, dtype=torch.int64, device=device)
    work = distributed.all_gather(list(messages.unbind()), message, group=group, async_op=True)
    rounds_of(group).wait(work, device)
    return messages.cpu().numpy()


def use_device(group: Any, device: torch.device) -> None:
    """Send later host messages over the device of a layer's input, if the group supports that device."""
    if device.type != "cpu" and any(device.type == kind.type for kind in group._device_types):  # noqa: SLF001 - has no public name
        rounds_of(group).device = device


def _message_device(group: Any) -> torch.device:
    """Device over which the group gathers host messages; the CPU if the group can gather there."""
    # An NCCL-only group says "cuda" without an index, which means the current device: device 0 on every rank whose
    # script does not call `torch.cuda.set_device`.
    devices = group._device_types  # noqa: SLF001 - has no public name
    host = torch.device("cpu")
    if host in devices:
        return host
    known: torch.device | None = rounds_of(group).device or group.bound_device_id
    return known or torch.device(devices[0].type, torch.get_device_module(devices[0]).current_device())
