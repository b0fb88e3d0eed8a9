"""Elastic training: members come and go, and no sample of an epoch is lost or seen twice.

An `ElasticState` holds what a training consists of. Every so often all members *commit*: they meet, tell one another
which samples they have processed, and keep a copy of the state. There it shows who has come and who has gone. If nobody
is lost the commit stands; else all go back to the one before it, and split anew what it leaves unprocessed. Newcomers
are given the state at such a meeting too, which is the only moment at which they can come in.

A meeting is what `client.join` makes of the beginning of a pass: nobody's rounds go on while somebody waits in it. What
its members decide, they decide from one aggregate, the same bytes for all.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from client.connection.connection import Connection
from client.connection.current import current_connection
from client.connection.registration import cause_of
from client.elastic import commit_reports
from client.elastic.commit_reports import Vote, Votes
from client.elastic.sampler import ElasticSampler
from client.serialization import packing
from statsd_bn.checks import shown
from statsd_bn.errors import ConfigurationError, ProtocolError
from statsd_bn.text import told

logger = logging.getLogger("statsd_bn.client")

Result = TypeVar("Result")

# The names of its rounds; no layer of a model is called so, since a place in a model has no brackets.
MEETING = "ElasticState.commit()"
STATE = "ElasticState.sync()"


class MembersChanged(Exception):
    """Members have come or gone at a commit; `run_elastic` catches it, and begins `train` anew.

    Attributes:
        lost: who has gone; what was done since the commit before is undone.
        joined: who has come.
    """

    def __init__(self, lost: Iterable[int], joined: Iterable[int]) -> None:
        self.lost, self.joined = sorted(lost), sorted(joined)
        super().__init__(f"members {self.lost} are lost, and members {self.joined} have come; return to run_elastic()")


class ElasticState:
    """What a training consists of, with copies to go back to; the same on all members after each commit.

    Args:
        model: the model.
        optimizer: its optimizer; None without one.
        sampler: of its data; None where each member's data is its own business.
        values: whatever else belongs to it, as attributes that may be set: plain values (numbers, text, None, tensors,
            and lists, tuples and dicts of these, nested at most 32 deep; a tensor stays on its member's device), or
            objects with `state_dict` and `load_state_dict`, such as learning-rate schedulers.

    Attributes:
        model: as given.
        optimizer: as given.
        sampler: as given.

    Raises:
        ValueError: a value's name is taken.
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

    def commit(self) -> None:
        """Meets the other members, and keeps a copy of the state if nobody is lost; all members call it equally often.

        In an epoch whose batches are uneven the members with one more have the last of the commits for themselves; what
        they have learnt in it the others are given.

        Raises:
            MembersChanged: members have come or gone. The state is what all go on with: that of this commit, or where
                members are lost that of the one before.
            RoundMismatch: the members have committed at different places.
            StatsdBNError: the exchange with the others failed, with the reason.
        """
        if self._is_epoch_committed():
            self._saved = self._copy()
            return
        lost, joined = self._meet()
        if lost or joined:
            raise MembersChanged(lost, joined)

    def restore(self) -> None:
        """Goes back to the last commit, or the beginning; the samples processed since count as unprocessed."""
        self._load(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Meets the other members, takes over the state of those who are furthest, and keeps a copy of it.

        Members that have just begun take over what the lowest of them has.

        Raises:
            ReplicaLost: this member has come to a job of which nobody is left.
            StatsdBNError: the exchange with the others failed, with the reason.
        """
        self._meet()

    def _meet(self) -> tuple[set[int], set[int]]:
        """Meets the others and agrees with them on one state; returns who is lost and who has come."""
        connection = current_connection()
        self._use(connection)
        if connection is None:
            self._keep(self._generation + 1)
            return set(), set()
        while True:
            connection.come_back(None)
            votes = _votes(connection, self._vote(is_latecomer=connection.is_latecomer))
            commit_reports.check_not_too_late(votes, connection.member.job, connection.rank)
            if self._agree(connection, votes):
                return commit_reports.lost(votes), commit_reports.new(votes)
            logger.warning("the member whose state the others were to take over was lost; meeting again")

    def _use(self, connection: Connection | None) -> None:
        """With another connection it is new: the others have gone on without it, or all begin anew at their commits."""
        if connection is not None and connection is not self._connection:
            if self._members:
                self.restore()
            self._connection, self._members = connection, []

    def _agree(self, connection: Connection, votes: Votes) -> bool:
        """Makes one state of all members'; returns False where the member that has it was lost meanwhile."""
        lost, new = commit_reports.lost(votes), commit_reports.new(votes)
        if not lost:
            commit_reports.check_agreement(votes)
            self._record(votes)
        elif self._members:
            self.restore()
        leader = commit_reports.leader(votes)
        is_changed = bool(lost or new)
        if (is_changed or commit_reports.is_uneven(votes)) and not self._take_over(
            connection, leader, with_sampler=is_changed
        ):
            return False
        self._members = list(votes)
        self._keep(votes[leader].generation + 1)
        if is_changed and self.sampler is not None:
            self.sampler.reset(self._members.index(connection.rank), len(votes))
        return True

    def _take_over(self, connection: Connection, leader: int, *, with_sampler: bool) -> bool:
        mine = packing.pack(self._copy()) if leader == connection.rank else b""
        given = connection.all_gather(STATE, mine)
        if leader not in given:
            return False
        state = self._unpacked(leader, given[leader])
        if not with_sampler:
            # A loader is under way with this member's share, and all know already what has been processed.
            del state["sampler"]
        try:
            self._load(state)
        except Exception as error:  # noqa: BLE001 - what a foreign state makes of an optimizer is anybody's guess
            # Not `from error`, whose text may hold whatever the state does.
            cause = told(cause_of(error))
            raise ProtocolError(f"{STATE}: the state of member {leader} does not fit: {cause}") from None
        return True

    def _unpacked(self, member: int, data: bytes) -> dict[str, Any]:
        """Returns a member's state, which has the parts of this one's."""
        try:
            state = packing.unpack(data)
        except ProtocolError as error:
            raise ProtocolError(f"{STATE}: the state of member {member}: {error}") from error
        if type(state) is not dict or state.keys() != set(self._names):
            raise ProtocolError(
                f"{STATE}: expected a state of {', '.join(self._names)} from member {member}, got {shown(state)}"
            )
        return state

    def _vote(self, *, is_latecomer: bool) -> bytes:
        sampler = self.sampler
        batches = [] if sampler is None else sampler.recorded
        indices = [index for batch in batches for index in batch]
        epoch = 0 if sampler is None else sampler.epoch
        return Vote(self._generation, epoch, self._members, is_latecomer, len(batches), indices).packed()

    def _record(self, votes: Votes) -> None:
        if self.sampler is not None:
            try:
                self.sampler.record_indices([index for vote in votes.values() for index in vote.indices])
            except IndexError as error:
                raise ProtocolError(f"{MEETING}: expected samples of the dataset, got {error}") from error

    def _is_epoch_committed(self) -> bool:
        sampler = self.sampler
        # Not `bool(sampler)`: its length is that of a share, which may be empty.
        return sampler is not None and sampler.is_exhausted and not sampler.recorded

    def _keep(self, generation: int) -> None:
        self._generation = generation
        self._saved = self._copy()
        if self.sampler is not None:
            self.sampler.recorded = []

    def _copy(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in self._names}
        return copy.deepcopy({name: part.state_dict() if _has_state(part) else part for name, part in parts.items()})

    def _load(self, state: dict[str, Any]) -> None:
        for name, part in state.items():
            mine = getattr(self, name)
            if _has_state(mine):
                mine.load_state_dict(part)
            else:
                setattr(self, name, packing.placed_like(part, mine))


def run_elastic(train: Callable[[ElasticState], Result], state: ElasticState) -> Result:
    """Trains while members come and go.

    All members call it, newcomers as well, right after `client.connect(policy="elastic")`; until then those that train
    wait for a newcomer. It brings all to one state and calls `train`, which commits now and then, and must go on from
    what the state says (`state.epoch`, the sampler's share), since it is called anew after each change.

    Args:
        train: takes the state, and trains to the end.
        state: what the training consists of.

    Returns:
        What `train` returns.

    Raises:
        ConfigurationError: the connection is not elastic.
        ReplicaLost: this member has come to a job of which nobody is left.
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
            logger.warning("members %s are lost, members %s have come; going on", change.lost, change.joined)


def _votes(connection: Connection, vote: bytes) -> Votes:
    return {member: Vote.unpacked(data) for member, data in connection.all_gather(MEETING, vote).items()}


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
