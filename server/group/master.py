"""SyncMaster: collects the members' contributions of one group and reduces them.

It is pure: messages, peers and times go in, replies come out. It opens no socket, starts no thread and reads no
clock, so a test can put it through years of faults in seconds.
"""

import logging
import math
from collections.abc import Callable

from server.group.contributor import Contributor
from server.group.health import Insight
from server.group.lifecycle import GroupState, MemberState, Told
from server.group.membership import Membership
from server.group.open_rounds import Deferral, OpenRounds, pending
from server.group.results import Archive, Claims, reduce_round
from server.group.rounds import Reply, Round, failure, unknown
from server.security.quota import GROUP_BYTES, MEMBER_BYTES, NAMED_BYTES, RUN_BYTES, Budget, Room
from statsd_bn.error_text import error_text
from statsd_bn.errors import (
    ContributionConflict,
    LimitExceeded,
    MasterStopped,
    ReplicaLost,
    StatsdBNError,
)
from statsd_bn.members import Members, ranks_in_words
from statsd_bn.messages import (
    Aggregate,
    Contribution,
    Heartbeat,
    NonFiniteRound,
    Register,
    Registered,
)
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.tokens import digest
from statsd_bn.wire import encode

logger = logging.getLogger("statsd_bn.server")

# Each contribution asks, and in Python 3.11 a member of an enum takes long to look up.
_RECOVERING = GroupState.RECOVERING


class SyncMaster:
    """One life (epoch) of one group: its members, its open rounds, its latest results.

    Args:
        server: the id of this server's life.
        register: the registration that begins the group; it sets job, group, epoch and policy.
        budget: what the server agrees to keep.
        owner: in whose account that is; default: the job's own.

    Raises:
        LimitExceeded: there is no room for another group.

    Attributes:
        epoch: which life it is.
        membership: who belongs to the group.
        open_rounds: the rounds that have not ended.
        insight: what is noticed of the members.
        owner: as given.
        logged_cause: why a member has left, as the log has told it last.
        loss_is_told: whether all who wait in other groups for a member of this one were told why it is broken.
        news_told_at: when its own members were told that, where their heartbeats come from; None: they were not.
    """

    # The seed's name, for whoever reduces a round by hand; `OpenRounds` calls the function.
    run_master = staticmethod(reduce_round)

    def __init__(
        self,
        server: bytes,
        register: Register,
        budget: Budget | None = None,
        owner: str = "",
    ) -> None:
        self.epoch = register.epoch
        self.logged_cause = ""
        self.loss_is_told = False
        self.news_told_at: float | None = None
        self.why_not_faster = ""
        self._rounds_without = 0
        self._moved = -math.inf
        self._server = server
        self._budget = budget or Budget()
        self.membership = Membership(register, self._budget.quota.silence_seconds)
        self.owner = owner or f"job {register.job!r}"
        self._room = Room(self._budget, self.owner)
        self._room.take(GROUP_BYTES)
        self._weighed = self._told_bytes = 0
        self._archive = Archive(self._room)
        self._claims = Claims(self._room)
        self.open_rounds = OpenRounds(self.epoch, self.membership, self._budget, self._archive, self._claims)
        self._deferral = Deferral(self._room)
        self.insight = Insight(self.membership, self.open_rounds, self._room)

    @property
    def rounds_done(self) -> int:
        """How many rounds have succeeded, with those that the members say they have had among themselves."""
        return self.open_rounds.done + self._rounds_without

    @property
    def active(self) -> float:
        """When a round has ended last, or a member has said that it has got on without the server."""
        return max(self.open_rounds.answered, self._moved)

    @property
    def nr_slaves(self) -> int:
        """How many members are registered."""
        return len(self.membership.contributors)

    def register_slave(self, now: float, register: Register, peer: bytes) -> tuple[Contributor, list[Reply]]:
        """Register a member and tell it whom the group still waits for; if nobody is missing, tell everybody to go on.

        Raises:
            RegistrationRefused: with the reason.
            ReplicaLost: the group is broken, or the member was taken for lost.
            LimitExceeded: there is no room for another member.
        """
        # One that is there already may ask again, however full the account is.
        if more := self._more_for(register):
            self._room.check(more)
        contributor = self.membership.admit(now, register, peer)
        self._weigh()
        takes_part = contributor.state is MemberState.TAKES_PART
        replies = [] if takes_part else self.open_rounds.withdraw(contributor)
        replies += self._settle(now) or [(peer, self._registered(contributor))]
        return contributor, replies + self.open_rounds.complete() + self._tell_news()

    def contribute(self, now: float, contributor: Contributor, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Take a member's rows for one round.

        Returns:
            Nothing while others are missing; the aggregate for everyone once it is complete; the kept answer if
            the round is over; an error for whom it concerns. Of two different contributions of one member
            the first counts, and whoever still waits for an answer is told.
        """
        if kept := self._archive.get(contribution.key):
            return self._answer_again(kept, contributor, contribution.rows, peer)
        if self.membership.state is _RECOVERING:
            return self._defer(contributor, contribution, peer)
        replies = self.open_rounds.contribute(now, contributor, contribution, peer)
        return replies + self._tell_news() if self.membership.news else replies

    def hear(self, now: float, contributor: Contributor, said: Heartbeat) -> None:
        """Take what a member says of itself."""
        if said.rounds > self._rounds_without or said.step != contributor.told_step:
            self._moved = now
        contributor.told_step, contributor.transport = said.step, said.transport
        self.membership.hear_of(said.step)
        self.why_not_faster = said.why
        # A round that one of them has told the server of is not counted by all.
        self._rounds_without = max(self._rounds_without, said.rounds)
        contributor.waited = said.waited / 1e3

    def note(self, contributor: Contributor, told: NonFiniteRound) -> None:
        """Take whose NaN or infinity came to a round that the members have had among themselves.

        Raises:
            ProtocolError: the round is not of the group that the member has registered in.
        """
        self.open_rounds.check_key(contributor, told.key)
        self.open_rounds.non_finite.note(told.key, told.members, told.what, self.membership.contributors)

    def settle(self, now: float, contributor: Contributor, key: RoundKey) -> None:
        """Forget a round that the members have had among themselves; those of an elastic group have none such.

        Raises:
            ProtocolError: the round is not of the group that the member has registered in.
        """
        self.open_rounds.check_key(contributor, key)
        if self.membership.is_elastic:
            return
        self.open_rounds.settle(now, key)
        self._deferral.forget_round(key)

    def recall(self, now: float, contributor: Contributor, aggregate: Aggregate, peer: bytes) -> list[Reply]:
        """Take an aggregate that an earlier life of the server gave the member, as the member says.

        See `server.group.results` for what becomes of it.
        """
        key = aggregate.key
        try:
            self.open_rounds.check_key(contributor, key)
        except StatsdBNError as error:
            return [(peer, failure(error, key))]
        membership = self.membership
        if not (membership.recovery and (contributor.owes or key in contributor.recalled)):
            return []  # nobody waits for it, or it is more than the member has announced
        told_bytes = 0 if key in contributor.recalled else RUN_BYTES * len(aggregate.members.runs)
        self._room.check(told_bytes)
        self._told_bytes += told_bytes
        self._weigh()
        contributor.recalled.add(key)
        membership.recall(key.step, aggregate.members)
        self._claims.add(contributor, aggregate)
        # With a thousand members there are thousands of results, and only the last of each can make a difference.
        return [] if contributor.owes else self._settle(now)

    def remove_contributor(
        self, now: float, contributor: Contributor, cause: str
    ) -> tuple[ReplicaLost | None, list[Reply]]:
        """Remove a member that says goodbye.

        Returns:
            The error that it gets if it comes back, and the answers to the others: the rounds of a strict group fail
            with the cause, those of an elastic group go on.
        """
        return self._without(now, contributor, self.membership.remove(contributor, cause))

    def lose_contributor(
        self, now: float, contributor: Contributor, cause: str
    ) -> tuple[ReplicaLost | None, list[Reply]]:
        """Remove a member that is lost; else as `remove_contributor`."""
        return self._without(now, contributor, self.membership.lose(contributor, cause))

    def expire(self, now: float) -> list[Reply]:
        """End what is over its time: rounds, and the wait for members after a restart of the server."""
        self.membership.give_up_waiting(now)
        self._weigh()
        self.insight.look_at_pace(now, self.rounds_done)
        return self._tell_news() + self._settle(now) + self.open_rounds.expire(now)

    def stop(self) -> list[Reply]:
        """End all open rounds, and the wait for the group to open, because the server ends for good."""
        replies = self.break_all(
            lambda key: MasterStopped(
                error_text("the server has ended with the process that had started it", where=str(key))
            )
        )
        if self.membership.state not in {GroupState.FILLING, GroupState.RECOVERING}:
            return replies
        stopped = failure(
            MasterStopped(error_text("the server has ended before the group was open", where=self.membership.name))
        )
        return replies + [(contributor.peer, stopped) for contributor in self.membership.contributors.values()]

    def turn_back(self, error: StatsdBNError) -> list[Reply]:
        """Tell those who wait for all others to come back from a pass that these will not; they are away again."""
        returning = self.membership.returning
        for contributor in returning:
            self.membership.turn_back(contributor)
        return [(contributor.peer, failure(error)) for contributor in returning]

    def break_all(self, reason: Callable[[RoundKey], StatsdBNError]) -> list[Reply]:
        """End all open rounds and refuse all parked contributions, each with its own error."""
        replies = self.open_rounds.break_all(reason)
        keys = ((peer, contribution.key) for _, contribution, peer in self._deferral.take())
        return replies + [(peer, failure(reason(key), key)) for peer, key in keys]

    def retire(self) -> None:
        """Give back all room that the group takes. Call it when the group has ended."""
        self._room.empty()

    def _more_for(self, register: Register) -> int:
        """Number of bytes that a registration adds at most."""
        member = 0 if register.member in self.membership.contributors else MEMBER_BYTES
        return member + (
            NAMED_BYTES * len(register.known) if register.has_past and not self.membership.has_opened else 0
        )

    def _weigh(self) -> None:
        """Account for the room that the members take, and for what they tell after a restart until all are back."""
        size = MEMBER_BYTES * self.nr_slaves + self.insight.kept
        if (recovery := self.membership.recovery) is not None:
            size += NAMED_BYTES * recovery.nr_named + self._told_bytes
        self._room.keep(size - self._weighed)
        self._weighed = size

    @property
    def kept(self) -> int:
        """How many bytes the group keeps."""
        return self._room.held

    def _settle(self, now: float) -> list[Reply]:
        """Tell the members to go on if nobody is missing any more."""
        if not self.membership.settle(now):
            return []
        self.open_rounds.answered = now
        replies = [
            (contributor.peer, self._registered(contributor)) for contributor in self.membership.contributors.values()
        ]
        if contradiction := self._claims.contradiction():
            self.membership.find_contradiction(contradiction)
            return replies + self._tell_news()
        # All rows that have come go before any claim: where they suffice, no member has to be believed.
        for contributor, contribution, peer in self._deferral.take():
            replies += self.contribute(now, contributor, contribution, peer)
        self._claims.count = True
        return replies + (self.open_rounds.complete() + self._tell_news() if self._claims.of else [])

    def _without(
        self, now: float, contributor: Contributor, loss: ReplicaLost | None
    ) -> tuple[ReplicaLost | None, list[Reply]]:
        self._deferral.forget(contributor)
        self.insight.forget(contributor)
        self._weigh()
        replies = self._tell_news()
        if self.membership.state is not GroupState.BROKEN:
            replies += self.open_rounds.withdraw(contributor) + self._settle(now) + self._tell_news()
        return loss, replies

    def _tell_news(self) -> list[Reply]:
        """Tell the members concerned what has happened to the group."""
        news, self.membership.news = self.membership.news, []
        return [reply for told in news for reply in self._tell(told)]

    def _tell(self, told: Told) -> list[Reply]:
        if told is Told.DEPARTED:
            departed = self.membership.why_incomplete
            contributors = self.membership.contributors.values()
            return [
                (contributor.peer, failure(departed))
                for contributor in contributors
                if contributor.state is MemberState.REJOINING
            ]
        lost, waiting = self.membership.why_broken, self._waiting()
        return self.break_all(lambda _: lost) + [(contributor.peer, failure(lost)) for contributor in waiting]

    def _waiting(self) -> list[Contributor]:
        """Members that wait for the group to open, or for all to be back, and have no round that could tell them."""
        has_opened, with_a_round = self.membership.has_opened, self._deferral.members
        return [
            contributor
            for contributor in self.membership.contributors.values()
            if contributor.state is MemberState.REJOINING or not (has_opened or contributor.member in with_a_round)
        ]

    def _registered(self, contributor: Contributor) -> bytes:
        missing, present = self.membership.missing_for(contributor)
        return encode(
            Registered(digest(contributor.session), self._server, self.epoch, contributor.first_step, missing, present)
        )

    def _defer(self, contributor: Contributor, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Keep a contribution until the members are back after a restart of the server."""
        key = contribution.key
        if contributor.owes:
            return [(peer, failure(unknown(contributor.session), key))]
        if self._deferral.would_exceed(self._budget.quota.max_open_rounds, contributor, key):
            return [(peer, failure(self.open_rounds.too_many(key), key))]
        try:
            self._deferral.add(contributor, contribution, peer)
        except (LimitExceeded, ContributionConflict) as error:
            return [(peer, failure(error, key))]
        absent = self.membership.absent
        whom = ranks_in_words(Members.of(absent)) if absent else "all ranks"
        text = f"waiting for {whom} to come back to a restarted server"
        return [(peer, pending(key, 0, text))] if contribution.attempt else []

    def _answer_again(self, round_: Round, contributor: Contributor, rows: Rows, peer: bytes) -> list[Reply]:
        future = round_.futures.get(contributor.member)
        if future and future.done and not future.put(rows, peer):
            return [(peer, failure(round_.conflict(contributor.member), round_.key))]
        return [(peer, round_.answer)]
