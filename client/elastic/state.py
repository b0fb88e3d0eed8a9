"""Elastic training: members come and go, and no sample of an epoch is lost or seen twice.

An `ElasticState` holds what a training consists of. Every so often all members *commit*: they tell one another which
samples they have processed, and keep a copy of the state. A commit also shows who has joined and who is lost. If nobody
is lost the commit stands. Otherwise all go back to the previous commit, and split the samples again that it leaves
unprocessed. New members get the state at a commit too, and only there.

A commit waits for all members, like the beginning of a pass in `client.join`. They decide from one aggregate, the same
bytes for all, so they decide alike.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from client import serialization
from client.elastic import commit_reports
from client.elastic.commit_reports import Report, Reports
from client.elastic.sampler import ElasticSampler
from client.session.connection import Connection
from client.session.current import current_connection
from client.session.protocol.registration import cause_of
from client.tracebacks import api_boundary
from statsd_bn.checks import shown
from statsd_bn.errors import ConfigurationError, ProtocolError
from statsd_bn.members import Members, ranks_in_words
from statsd_bn.text import told

logger = logging.getLogger("statsd_bn.client")

Result = TypeVar("Result")

# The names of its rounds. No layer has such a name: the name of a module contains no brackets.
COMMIT = "ElasticState.commit()"
STATE = "ElasticState.sync()"


class MembersChanged(Exception):
    """Members joined or were lost at a commit; `run_elastic` catches this and calls `train` again.

    Attributes:
        lost: the ranks that are lost; the work since the previous commit is undone.
        joined: the ranks that have joined.
    """

    def __init__(self, lost: Iterable[int], joined: Iterable[int]) -> None:
        self.lost, self.joined = sorted(lost), sorted(joined)
        super().__init__(f"{_in_words(self)}; return to run_elastic()")


class ElasticState:
    """What a training consists of, with copies to go back to; the same on all members after each commit.

    Args:
        model: the model.
        optimizer: its optimizer; None without one.
        sampler: of its data; None where each member chooses its own data.
        values: everything else that belongs to the training, as attributes that may be set: plain values (numbers,
            text, None, tensors, and lists, tuples and dicts of these, nested at most 32 deep; a tensor stays on its
            member's device), or objects with `state_dict` and `load_state_dict`, such as learning-rate schedulers.

    Attributes:
        model: as given.
        optimizer: as given.
        sampler: as given.

    Raises:
        TypeError: a value, or what a `state_dict` gives, is of another kind.
        ValueError: a value nests deeper, or its name is taken.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The values."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        sampler: ElasticSampler | None = None,
        **values: Any,
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
        """Commits with the other members, and keeps a copy of the state if nobody is lost; all call it equally often.

        If some members have one batch more than others in an epoch, only they take part in its last commit. The others
        get the result.

        Raises:
            MembersChanged: members have joined or are lost. The state is then the one to go on with: that of this
                commit, or if members are lost that of the previous one.
            RoundMismatch: the members have committed at different points of the training.
            TypeError, ValueError: a value has become one that cannot travel to another member.
            StatsdBNError: the exchange with the others failed, with the reason.
        """
        if self._is_epoch_committed():
            self._saved = self._copy()
            return
        lost, joined = self._agree_with_others()
        if lost or joined:
            raise MembersChanged(lost, joined)

    def restore(self) -> None:
        """Goes back to the last commit, or the beginning; the samples processed since count as unprocessed."""
        self._load(copy.deepcopy(self._saved))

    @api_boundary
    def sync(self) -> None:
        """Commits with the other members, loads the state of the most advanced one, and keeps a copy of it.

        If all have just begun they load the state of the lowest rank.

        Raises:
            ReplicaLost: this member has joined a job that nobody is left of.
            StatsdBNError: the exchange with the others failed, with the reason.
        """
        self._agree_with_others()

    def _agree_with_others(self) -> tuple[set[int], set[int]]:
        """Agrees with the others on one state; returns who is lost and who has joined."""
        connection = current_connection()
        self._use(connection)
        if connection is None:
            self._keep(self._generation + 1)
            return set(), set()
        while True:
            connection.come_back(None)
            reports = _reports(connection, self._report(is_latecomer=connection.is_latecomer))
            commit_reports.check_not_too_late(reports, connection.member.job, connection.rank)
            if self._unite(connection, reports):
                return commit_reports.lost(reports), commit_reports.new(reports)
            logger.warning("the member whose state the others were about to load was lost; committing again")

    def _use(self, connection: Connection | None) -> None:
        """With a new connection this member is new: the others have gone on without it, or all start from a commit."""
        if connection is not None and connection is not self._connection:
            if self._members:
                self.restore()
            self._connection, self._members = connection, []

    def _unite(self, connection: Connection, reports: Reports) -> bool:
        """Gives all members one state; returns False if the member that has it was lost meanwhile."""
        lost, new = commit_reports.lost(reports), commit_reports.new(reports)
        if not lost:
            commit_reports.check_agreement(reports)
            self._record(reports)
        elif self._members:
            self.restore()
        leader = commit_reports.leader(reports)
        is_changed = bool(lost or new)
        if (is_changed or commit_reports.is_uneven(reports)) and not self._load_from(
            connection, leader, with_sampler=is_changed
        ):
            return False
        self._members = list(reports)
        self._keep(reports[leader].generation + 1)
        if is_changed and self.sampler is not None:
            self.sampler.reset(self._members.index(connection.rank), len(reports))
        return True

    def _load_from(self, connection: Connection, leader: int, *, with_sampler: bool) -> bool:
        mine = serialization.pack(self._copy()) if leader == connection.rank else b""
        given = connection.all_gather(STATE, mine)
        if leader not in given:
            return False
        state = self._unpacked(leader, given[leader])
        if not with_sampler:
            # A loader is already reading this member's share, and everyone knows what has been processed.
            del state["sampler"]
        try:
            self._load(state)
        except Exception as error:  # noqa: BLE001 - what a foreign state makes of an optimizer is anybody's guess
            # Not `from error`, whose text may hold whatever the state does.
            cause = told(cause_of(error))
            raise ProtocolError(f"{STATE}: the state of rank {leader} does not fit: {cause}") from None
        return True

    def _unpacked(self, member: int, data: bytes) -> dict[str, Any]:
        """Reads a member's state, and checks that it has the same parts as this one's."""
        try:
            state = serialization.unpack(data)
        except ProtocolError as error:
            raise ProtocolError(f"{STATE}: the state of rank {member}: {error.message}") from error
        if type(state) is not dict or state.keys() != set(self._names):
            raise ProtocolError(
                f"{STATE}: expected a state of {', '.join(self._names)} from rank {member}, got {shown(state)}"
            )
        return state

    def _report(self, *, is_latecomer: bool) -> bytes:
        sampler = self.sampler
        batches = [] if sampler is None else sampler.recorded
        indices = [index for batch in batches for index in batch]
        epoch = 0 if sampler is None else sampler.epoch
        return Report(self._generation, epoch, self._members, is_latecomer, len(batches), indices).packed()

    def _record(self, reports: Reports) -> None:
        if self.sampler is not None:
            try:
                self.sampler.record_indices([index for report in reports.values() for index in report.indices])
            except IndexError as error:
                raise ProtocolError(f"{COMMIT}: expected samples of the dataset, got {error}") from error

    def _is_epoch_committed(self) -> bool:
        sampler = self.sampler
        # Not `bool(sampler)`: that is its length, the size of a share, which may be 0.
        return sampler is not None and sampler.is_exhausted and not sampler.recorded

    def _keep(self, generation: int) -> None:
        self._generation = generation
        self._saved = self._copy()
        if self.sampler is not None:
            self.sampler.recorded = []

    def _copy(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in self._names}
        parts = {name: part.state_dict() if _has_state(part) else part for name, part in given.items()}
        serialization.check(parts)  # here, and not where others need it
        return copy.deepcopy(parts)

    def _load(self, state: dict[str, Any]) -> None:
        for name, part in state.items():
            mine = getattr(self, name)
            if _has_state(mine):
                mine.load_state_dict(part)
            else:
                setattr(self, name, serialization.placed_like(part, mine))


@api_boundary
def run_elastic(train: Callable[[ElasticState], Result], state: ElasticState) -> Result:
    """Trains while members come and go.

    All members call it right after `client.connect(policy="elastic")`, also those that join later; the others wait for
    that call. It gives all members one state and calls `train`. `train` commits now and then. It is called again after
    each change, so it must go on from what the state says (`state.epoch`, the sampler's share).

    Args:
        train: takes the state, and trains to the end.
        state: what the training consists of.

    Returns:
        What `train` returns.

    Raises:
        ConfigurationError: the connection is not elastic.
        ReplicaLost: this member has joined a job that nobody is left of.
        StatsdBNError: the exchange with the others failed, with the reason.
    """
    connection = current_connection()
    if connection and not connection.member.is_elastic:
        raise ConfigurationError(
            "run_elastic: expected an elastic connection, got a strict one, whose members fail when one is lost; "
            'connect with client.connect(policy="elastic")'
        )
    state.sync()
    while True:
        try:
            return train(state)
        except MembersChanged as change:
            logger.warning("%s; going on", _in_words(change))


def _in_words(change: MembersChanged) -> str:
    lost, joined = (ranks_in_words(Members.of(ranks)) for ranks in (change.lost, change.joined))
    return f"{lost} lost, {joined} joined"


def _reports(connection: Connection, report: bytes) -> Reports:
    return {member: Report.unpacked(data) for member, data in connection.all_gather(COMMIT, report).items()}


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
