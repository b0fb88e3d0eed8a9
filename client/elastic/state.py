"""Elastic training: members may join and be lost, and each sample of an epoch is processed once.

From time to time all members *commit*: they exchange reports of the samples that they have processed, and copy the
state of an `ElasticState`. If no member is lost, the commit is valid. Otherwise all restore the previous commit, and
split its unprocessed samples again. New members receive the state at a commit. A commit waits for all members,
which decide from the same bytes.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from torch import nn
from torch.optim import Optimizer

from client import serialization
from client.elastic.sampler import ElasticSampler
from client.session.connection import Connection, current_connection
from client.session.protocol.registration import cause_of
from client.tracebacks import api_boundary
from statsd_bn import limits
from statsd_bn.checks import short_repr
from statsd_bn.errors import ConfigurationError, ProtocolError, ReplicaLost, RoundMismatch
from statsd_bn.members import Members, format_ranks
from statsd_bn.text import wire_text

logger = logging.getLogger("statsd_bn.client")

Result = TypeVar("Result")

# The names of the rounds. No layer has such a name: the name of a module contains no brackets.
COMMIT = "ElasticState.commit()"
STATE = "ElasticState.sync()"


class MembersChanged(Exception):
    """Members joined or were lost at a commit; `run_elastic` catches this and calls `train` again.

    Attributes:
        lost: the lost ranks; the work since the previous commit is undone.
        joined: the new ranks.
    """

    def __init__(self, lost: Iterable[int], joined: Iterable[int]) -> None:
        self.lost, self.joined = sorted(lost), sorted(joined)
        super().__init__(f"{_in_words(self)}; return to run_elastic()")


class Report(NamedTuple):
    """A member's report at a commit."""

    generation: int  # how many commits its state has had
    epoch: int
    members: list[int]  # at the previous commit; empty for a new member
    is_latecomer: bool  # whether it has connected to a running job
    batches: int  # the number of batches recorded since the previous commit
    indices: list[int]  # the samples of these batches

    def pack(self) -> bytes:
        """Serializes the report."""
        return serialization.pack([*self[:-1], np.array(self.indices, np.int64)])

    @classmethod
    def unpack(cls, data: bytes) -> "Report":
        """Deserializes a report; raises ProtocolError for other bytes."""
        match serialization.unpack(data):
            case [int(generation), int(epoch), list(members), bool(is_late), int(batches), np.ndarray() as indices] if (
                max(generation, batches) <= limits.MAX_COUNTER
                and all(type(number) is int and 0 <= number < limits.MAX_MEMBERS for number in members)
                and (indices.dtype == np.int64 and indices.ndim == 1 and (indices >= 0).all())
            ):
                return cls(generation, epoch, members, is_late, batches, indices.tolist())
            case other:
                raise ProtocolError(f"expected a report of a member, got {short_repr(other)}")

    @property
    def is_new(self) -> bool:
        """Whether this is the member's first commit with its connection."""
        return not self.members


class _Reports(dict[int, Report]):
    """The reports of all members at a commit, by rank; equal on all members, so they reach the same conclusions."""

    def __init__(self, packed: Mapping[int, bytes]) -> None:
        super().__init__({member: Report.unpack(data) for member, data in packed.items()})
        self.new = {member for member, report in self.items() if report.is_new}
        # Members of the previous commit that are absent now. A new process may have the rank of a lost one.
        seen = {member for report in self.values() for member in report.members}
        self.lost = seen.difference(self) | seen & self.new
        # The member that sends its state: existing before new, then the most advanced, then the lowest rank.
        self.leader = max(
            self, key=lambda rank: (not self[rank].is_new, self[rank].generation, self[rank].batches, -rank)
        )

    def check_not_too_late(self, job: str, member: int) -> None:
        """Raises ReplicaLost if all members are new to a running job, so that no member has its state."""
        if all(report.is_new and report.is_latecomer for report in self.values()):
            raise ReplicaLost(
                f"job {job!r}: no member with the state is left: all have left or were lost before "
                f"{format_ranks(Members.of(self))} could load it; unless the job has finished, start a new one from "
                "a checkpoint",
                job=job,
                member=member,
                cause="joined too late",
            )

    def check_agreement(self) -> None:
        """Raises RoundMismatch if existing members commit at different points of the training."""
        points = {member: (report.epoch, report.generation) for member, report in self.items() if not report.is_new}
        if len(set(points.values())) > 1:
            texts = (f"rank {rank} in epoch {epoch} after {count} commits" for rank, (epoch, count) in points.items())
            raise RoundMismatch(f"{COMMIT}: expected all ranks at the same point, got {', '.join(texts)}")


class ElasticState:
    """The state of a training, with a copy to restore; equal on all members after each commit.

    Args:
        model: the model, also an attribute.
        optimizer: its optimizer, also an attribute; None without one.
        sampler: the sampler of its data, also an attribute; None if each member chooses its own data.
        values: the rest of the training's state, as attributes that may be set: plain values (numbers, text, None,
            tensors, and lists, tuples and dicts of these, nested at most 32 deep; a tensor stays on its member's
            device), or objects with `state_dict` and `load_state_dict`, such as learning-rate schedulers.

    Raises:
        TypeError: a value, or a value of a `state_dict`, is of another kind.
        ValueError: a value nests deeper, or its name is used by ElasticState.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The values."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None = None, sampler: ElasticSampler | None = None, **values: Any
    ) -> None:
        self.model, self.optimizer, self.sampler = model, optimizer, sampler
        self._names = ("model", "optimizer", "sampler", *values)
        self._generation = 0
        self._connection: Connection | None = None
        self._members: list[int] = []
        self._saved: dict[str, Any] = {}
        for name, value in values.items():
            if hasattr(self, name):
                raise ValueError(f"values: expected a name that ElasticState does not use itself, got {name!r}")
            setattr(self, name, value)
        self._saved = self._copy()

    @api_boundary
    def commit(self) -> None:
        """Commits with the other members, and copies the state unless a member is lost.

        If some members have one batch more in an epoch, only they process it, and the others receive their state at
        the next commit. Once all samples of the epoch are committed, a further call sends nothing and does not wait.

        Raises:
            MembersChanged: members have joined or are lost. The state is the one to continue with: of this commit, or
                of the previous commit if members are lost.
            RoundMismatch: the members have committed at different points of the training.
            TypeError, ValueError: a value can no longer be serialized.
            StatsdBNError: the exchange with the other members failed, with the reason.
        """
        # Not `bool(sampler)`: its length is the size of a share, which may be 0.
        if (sampler := self.sampler) is not None and sampler.is_exhausted and not sampler.recorded:
            self._saved = self._copy()  # this epoch has been committed
            return
        lost, joined = self._agree_with_others()
        if lost or joined:
            raise MembersChanged(lost, joined)

    def restore(self) -> None:
        """Restores the last commit, or the initial state; samples processed since then count as unprocessed."""
        self._load(copy.deepcopy(self._saved))

    @api_boundary
    def sync(self) -> None:
        """Commits with the other members, loads the state of the most advanced one, and copies it.

        At the start of the job that is the state of the lowest rank.

        Raises:
            ReplicaLost: this member has joined a job of which no member with the state is left.
            StatsdBNError: the exchange with the other members failed, with the reason.
        """
        self._agree_with_others()

    def _agree_with_others(self) -> tuple[set[int], set[int]]:
        """Agrees with the other members on one state; returns the lost and the new members."""
        connection = current_connection()
        if connection is not None and connection is not self._connection:
            # With a new connection this member is new, since the others may have continued without it.
            if self._members:
                self.restore()
            self._connection, self._members = connection, []
        if connection is None:
            self._save(self._generation + 1)
            return set(), set()
        while True:
            connection.rejoin(None)
            reports = _Reports(connection.all_gather(COMMIT, self._report(connection).pack()))
            reports.check_not_too_late(connection.member.job, connection.rank)
            if self._synchronize(connection, reports):
                return reports.lost, reports.new
            logger.warning("the rank that sends its state was lost; committing again, with the state of another rank")

    def _synchronize(self, connection: Connection, reports: _Reports) -> bool:
        """Gives all members the state of one; returns False if that member was lost before it sent its state."""
        if not reports.lost:
            reports.check_agreement()
            try:
                if self.sampler is not None:
                    self.sampler.record_indices([index for report in reports.values() for index in report.indices])
            except IndexError as error:
                raise ProtocolError(f"{COMMIT}: expected samples of the dataset, got {error}") from error
        elif self._members:
            self.restore()
        leader = reports.leader
        is_changed = bool(reports.lost or reports.new)
        is_uneven = len({report.batches for report in reports.values()}) > 1
        if (is_changed or is_uneven) and not self._load_from(connection, leader, with_sampler=is_changed):
            return False
        self._members = list(reports)
        self._save(reports[leader].generation + 1)
        if is_changed and self.sampler is not None:
            self.sampler.reset(self._members.index(connection.rank), len(reports))
        return True

    def _load_from(self, connection: Connection, leader: int, *, with_sampler: bool) -> bool:
        """Loads the leader's state, which must have the same parts; returns False if the leader was lost before."""
        own = serialization.pack(self._copy()) if leader == connection.rank else b""
        packed = connection.all_gather(STATE, own)
        if leader not in packed:
            return False
        try:
            state = serialization.unpack(packed[leader])
        except ProtocolError as error:
            raise ProtocolError(f"{STATE}: the state of rank {leader}: {error.message}") from error
        if type(state) is not dict or state.keys() != set(self._names):
            raise ProtocolError(
                f"{STATE}: expected a state of {', '.join(self._names)} from rank {leader}, got {short_repr(state)}"
            )
        if not with_sampler:
            # A loader is already reading this member's share, and the processed samples are known to all.
            del state["sampler"]
        try:
            self._load(state)
        except Exception as error:  # noqa: BLE001 - a received state may raise anything in an optimizer
            # Not `from error`: its text, which may contain parts of the state, is neither cut nor escaped.
            cause = wire_text(cause_of(error))
            raise ProtocolError(f"{STATE}: the state of rank {leader} does not fit: {cause}") from None
        return True

    def _report(self, connection: Connection) -> Report:
        epoch, batches = (self.sampler.epoch, self.sampler.recorded) if self.sampler is not None else (0, [])
        indices = [index for batch in batches for index in batch]
        return Report(self._generation, epoch, self._members, connection.is_latecomer, len(batches), indices)

    def _save(self, generation: int) -> None:
        self._generation = generation
        self._saved = self._copy()
        if self.sampler is not None:
            self.sampler.recorded = []

    def _copy(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._names}
        parts = {name: part.state_dict() if _has_state(part) else part for name, part in values.items()}
        serialization.check(parts)  # before other members need the state
        return copy.deepcopy(parts)

    def _load(self, state: dict[str, Any]) -> None:
        for name, part in state.items():
            if _has_state(own := getattr(self, name)):
                own.load_state_dict(part)
            else:
                setattr(self, name, serialization.to_devices_of(part, own))


@api_boundary
def run_elastic(train: Callable[[ElasticState], Result], state: ElasticState) -> Result:
    """Runs a training in which members may join and be lost.

    All members, also new ones, call it right after `client.connect(policy="elastic")`; the other members wait for
    that call. It gives all members one state and calls `train`, which commits from time to time. After each change of
    members `train` is called again, so it must continue at the position of the state (`state.epoch`, the sampler's
    share).

    Args:
        train: takes the state, and trains to the end.
        state: the state of the training.

    Returns:
        The result of `train`.

    Raises:
        ConfigurationError: the connection is not elastic.
        ReplicaLost: this member has joined a job of which no member with the state is left.
        StatsdBNError: the exchange with the other members failed, with the reason.
    """
    connection = current_connection()
    if connection and not connection.member.is_elastic:
        raise ConfigurationError(
            'run_elastic: expected an elastic connection, got a strict one; call client.connect(policy="elastic")'
        )
    state.sync()
    while True:
        try:
            return train(state)
        except MembersChanged as change:
            logger.warning("%s; continuing", _in_words(change))


def _in_words(change: MembersChanged) -> str:
    lost, joined = (format_ranks(Members.of(ranks)) for ranks in (change.lost, change.joined))
    return f"{lost} lost, {joined} joined"


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
