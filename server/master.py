"""SyncMaster: collects the slaves' contributions of one group and reduces them.

It is pure: messages, peers and times go in, replies come out. It opens no socket, starts no thread and reads no
clock, so a test can put it through years of faults in seconds.
"""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from server.archive import Archive, Room
from server.deferral import Deferral
from server.membership import Membership
from server.quota import Budget, size_of
from server.rounds import FutureResult, Round, State, failed, failure
from server.slave import Slave
from statsd_bn import limits
from statsd_bn.errors import (
    ContributionConflict,
    LimitExceeded,
    MasterStopped,
    ProtocolError,
    ReplicaLost,
    RoundFailed,
    RoundTimeout,
    StatsdBNError,
    UnknownSession,
)
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Contribution, Pending, Register, Registered, Stand, missing_members
from statsd_bn.reduction import join_in_order, sum_in_order
from statsd_bn.round_key import GATHER, RoundKey
from statsd_bn.rows import Rows
from statsd_bn.wire import encode

# How many late members a message names.
TOLD_OF = 8

Reply = tuple[bytes, bytes]
"""(peer, frame): what to send to whom."""


class SyncMaster:
    """One life (epoch) of one group: its slaves, its open rounds, its latest results.

    Args:
        server: the id of this master's life.
        register: the registration that begins the group; it sets job, group, epoch and policy.
        budget: what the server agrees to keep.

    Attributes:
        answered: when members were last told that a round has ended, or that the group is open.
        is_mourned: whether all who wait elsewhere for members of the group were told that it is broken.
    """

    def __init__(self, server: bytes, register: Register, budget: Budget | None = None) -> None:
        self.epoch = register.epoch
        self.rounds_done = 0
        self.rounds_failed = 0
        self.answered = -math.inf
        self.is_mourned = False
        self._server = server
        self._budget = budget or Budget()
        self.membership = Membership(register, self._budget.quota.silence_seconds)
        self._room = Room(self._budget, register.job)
        self._archive = Archive(self._room)
        # What all keys of this life begin with.
        self._run = (register.job, register.group, register.epoch)
        self._open: dict[RoundKey, Round] = {}
        self._is_broken = False
        self._is_departure_told = False
        self._deferral = Deferral(self._room)

    @property
    def nr_slaves(self) -> int:
        """How many slaves are registered."""
        return len(self.membership.slaves)

    @property
    def open_rounds(self) -> Collection[Round]:
        """The rounds that have not ended."""
        return self._open.values()

    def register_slave(self, now: float, register: Register, peer: bytes) -> tuple[Slave, list[Reply]]:
        """Takes a slave in and tells it whom the group still waits for; tells everybody when nobody is missing.

        Raises:
            RegistrationRefused: with the reason.
            ReplicaLost: the group is broken, or the slave was taken for lost.
        """
        slave = self.membership.admit(now, register, peer)
        replies = self._withdraw(slave) if slave.stand is not Stand.TAKES_PART else []
        replies += self._settle(now) or [(peer, self._registered(slave))]
        return slave, replies + self._complete()

    def contribute(self, now: float, slave: Slave, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Takes a slave's rows for one round.

        Returns:
            Nothing while others are missing; the aggregate for everyone once it is complete; the kept answer if
            the round is over; an error for whom it concerns. Of two different contributions of one slave
            the first counts, and whoever still waits for an answer is told.
        """
        key, rows = contribution.key, contribution.rows
        slave.peer = peer
        if kept := self._archive.get(key):
            return self._answer_again(kept, slave, rows, peer)
        if self.membership.recovery and not self.membership.lost:
            return self._defer(slave, contribution, peer)
        try:
            round_ = self._open.get(key) or self._begin(now, slave, contribution)
            future = self._future(round_, slave)
            if not future.done:
                self._reserve(round_, size_of(rows))
        except StatsdBNError as error:
            return [(peer, failure(error, key))]
        slave.step, slave.replicas = key.step, len(rows.counts)
        if not future.done:
            future.since = now
            self._count_threads(slave, contribution)
        return self._put(now, round_, slave, contribution, peer)

    def recall(self, now: float, slave: Slave, aggregate: Aggregate, peer: bytes) -> list[Reply]:
        """Takes the aggregate that an earlier life of the server gave a slave for one round.

        Whoever asks for that round will get it. Slaves that were given different ones break the group: nobody can say
        who is right.
        """
        key = aggregate.key
        try:
            self._check_key(slave, key)
        except StatsdBNError as error:
            return [(peer, failure(error, key))]
        self.membership.recall(slave, key, aggregate.members)
        if kept := self._archive.get(key):
            return self._compare(kept, slave, aggregate) + ([] if slave.owes else self._settle(now))
        if self.membership.recovery:
            self._room.check(aggregate.values.nbytes)
            round_ = Round(key, (), now, 0.0)
            round_.end(aggregate)
            self._close(round_)
        # With a thousand members there are thousands of results, and only the last of each can make a difference.
        return [] if slave.owes else self._settle(now)

    def run_master(self, round_: Round) -> Aggregate:
        """Reduces one complete round: adds all rows in replica order, or joins them in that order if it is a gather.

        Raises:
            LookupError: a contribution is missing.
        """
        contributions = [future.get() for future in round_.futures.values()]
        replicas = sum(len(rows.counts) for rows in contributions)
        reduce = join_in_order if round_.key.phase == GATHER else sum_in_order
        total = reduce(row for rows in contributions for row in rows.values)
        return Aggregate(round_.key, replicas, round_.count, Members.of(round_.futures), total)

    def remove_slave(self, now: float, slave: Slave, cause: str) -> tuple[ReplicaLost | None, list[Reply]]:
        """Takes a slave out that says goodbye.

        Returns:
            What it is told if it comes back, and what the others are told: the rounds of a strict group fail, with the
            cause, and those of an elastic one go on.
        """
        return self._without(now, slave, self.membership.remove(slave, cause))

    def banish_slave(self, now: float, slave: Slave, cause: str) -> tuple[ReplicaLost | None, list[Reply]]:
        """Takes a slave out that is lost without a goodbye; else as `remove_slave`."""
        return self._without(now, slave, self.membership.banish(slave, cause))

    def expire(self, now: float) -> list[Reply]:
        """Ends what is over its time: the wait for members after a restart of the server, and rounds."""
        self.membership.give_up_waiting(now)
        replies = self._break_if_lost() + self._settle(now)
        late = [round_ for round_ in self._open.values() if now >= round_.opened + round_.seconds]
        self.answered = now if late else self.answered
        return replies + [reply for round_ in late for reply in self._break(round_, self._timeout(round_))]

    def fail(self, key: RoundKey, error: StatsdBNError) -> list[Reply]:
        """Ends an open round with an error."""
        return self._break(self._open[key], error)

    def stop(self) -> list[Reply]:
        """Ends all open rounds, and the wait of a group that is not open, because the master stops."""
        replies = self.break_all(lambda key: MasterStopped(f"the master stopped during {key}"))
        if self.membership.is_open:
            return replies
        stopped = failure(MasterStopped(f"the master stopped before {self._name} was open"))
        return replies + [(slave.peer, stopped) for slave in self.membership.slaves.values()]

    def break_all(self, reason: Callable[[RoundKey], StatsdBNError]) -> list[Reply]:
        """Ends all open rounds and all deferred contributions, each for its own reason."""
        replies = [reply for round_ in list(self._open.values()) for reply in self._break(round_, reason(round_.key))]
        keys = ((peer, contribution.key) for _, contribution, peer in self._deferral.take())
        return replies + [(peer, failure(reason(key), key)) for peer, key in keys]

    def retire(self) -> None:
        """Gives back all room that it has; to be called when the group has ended."""
        self._room.empty()

    def report(self, now: float) -> dict[str, Any]:
        """Returns what a status report says of this group."""
        membership = self.membership
        return {
            "job": membership.job,
            "group": membership.group,
            "epoch": self.epoch,
            "world_size": membership.world_size,
            "min_members": membership.min_members,
            "members": [slave.report() for slave in sorted(membership.slaves.values(), key=lambda slave: slave.member)],
            "missing": membership.missing,
            "lost": str(membership.lost or ""),
            "rounds_done": self.rounds_done,
            "rounds_failed": self.rounds_failed,
            "kept_bytes": self._room.held,
            "waiting": [
                {"round": str(round_.key), "seconds": now - round_.opened, "missing": round_.missing}
                for round_ in self._open.values()
            ],
        }

    def _reserve(self, round_: Round, size: int) -> None:
        self._room.take(size)
        round_.held += size

    @property
    def _name(self) -> str:
        return f"job {self.membership.job!r}, group {self.membership.group!r}"

    def _settle(self, now: float) -> list[Reply]:
        """Lets the members go on if nobody is missing any more, and tells them."""
        if not self.membership.settle(now):
            return []
        self.answered = now
        replies = [(slave.peer, self._registered(slave)) for slave in self.membership.slaves.values()]
        for slave, contribution, peer in self._deferral.take():
            replies += self.contribute(now, slave, contribution, peer)
        return replies

    def _without(self, now: float, slave: Slave, loss: ReplicaLost | None) -> tuple[ReplicaLost | None, list[Reply]]:
        self._deferral.forget(slave)
        if self.membership.lost:
            return loss, self._break_if_lost()
        return loss, self._tell_departure() + self._withdraw(slave) + self._settle(now)

    def _tell_departure(self) -> list[Reply]:
        """Those who are back for another pass wait in vain for one that has left; whoever comes later is refused."""
        departed = self.membership.departed
        if departed is None or self._is_departure_told:
            return []
        self._is_departure_told = True
        slaves = self.membership.slaves.values()
        return [(slave.peer, failure(departed)) for slave in slaves if slave.stand is Stand.BACK]

    def _withdraw(self, slave: Slave) -> list[Reply]:
        for round_ in self._open.values():
            round_.withdraw(slave.member)
        return self._complete()

    def _complete(self) -> list[Reply]:
        """Ends the rounds that lack nothing any more."""
        ready = [round_ for round_ in self._open.values() if self._is_ready(round_)]
        return [reply for round_ in ready for reply in self._finish(round_)]

    def _is_ready(self, round_: Round) -> bool:
        return round_.is_complete and self.membership.suffices

    def _break_if_lost(self) -> list[Reply]:
        lost = self.membership.lost
        if lost is None or self._is_broken:
            return []
        self._is_broken = True
        with_a_round = self._deferral.members
        waiting = [
            slave
            for slave in self.membership.slaves.values()
            if slave.stand is Stand.BACK or not (self.membership.is_open or slave.member in with_a_round)
        ]
        return self.break_all(lambda _: lost) + [(slave.peer, failure(lost)) for slave in waiting]

    def _awaited(self, round_: Round) -> str:
        """Returns in words whom a round waits for."""
        if not self.membership.suffices:
            return f"enough members ({self.nr_slaves} of min_members {self.membership.min_members} are there)"
        late = ", ".join(str(self.membership.slaves[member]) for member in round_.missing[:TOLD_OF])
        return f"{late} and {len(round_.missing) - TOLD_OF} more" if len(round_.missing) > TOLD_OF else late

    def _timeout(self, round_: Round) -> RoundTimeout:
        # Where too few are left, whoever has not come waits for newcomers as well.
        missing = round_.missing if self.membership.suffices else []
        return round_.timeout(self._awaited(round_), missing)

    def _pending(self, now: float, round_: Round) -> bytes:
        """Returns what tells a member that asks again whom its round waits for."""
        seconds = int(now - round_.opened)
        return _pending(round_.key, seconds, f"waiting since {seconds} s for {self._awaited(round_)}")

    def _registered(self, slave: Slave) -> bytes:
        missing, present = self.membership.missing_for(slave)
        return encode(Registered(slave.session, self._server, self.epoch, slave.first_step, missing, present))

    def _defer(self, slave: Slave, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Keeps a contribution until the members are back after a restart of the server."""
        key = contribution.key
        if slave.owes:
            return [(peer, failure(unknown(slave.session), key))]
        if len(self._deferral) >= self._budget.quota.max_open_rounds * self.nr_slaves:
            return [(peer, failure(self._too_many(key), key))]
        try:
            self._deferral.add(slave, contribution, peer)
        except LimitExceeded as error:
            return [(peer, failure(error, key))]
        absent = self.membership.absent
        whom = f"members {absent}" if absent else "all members"
        text = f"waiting for {whom} to come back to a restarted server"
        return [(peer, _pending(key, 0, text))] if contribution.attempt else []

    def _begin(self, now: float, slave: Slave, contribution: Contribution) -> Round:
        membership, key = self.membership, contribution.key
        if membership.lost:
            raise membership.lost
        self._check_key(slave, key)
        if not membership.is_open:
            missing, present = membership.missing_for(slave)
            awaited = missing_members(membership.group, membership.world_size, present, missing)
            raise failed(key, f"the group is not open, it waits for {awaited}")
        if self._archive.remembers(key):
            raise failed(key, "it ended long ago, and its answer is no longer kept")
        if len(self._open) >= self._budget.quota.max_open_rounds:
            raise self._too_many(key)
        self._room.check(size_of(contribution.rows))
        members = membership.participants(key.step)
        if slave.member not in members:
            raise failed(key, f"{slave} is not one of the members that take part, {Members.of(members)}")
        membership.reach(key.step)
        round_ = Round(key, members, now, slave.deadline)
        self._open[key] = round_
        return round_

    def _put(self, now: float, round_: Round, slave: Slave, contribution: Contribution, peer: bytes) -> list[Reply]:
        earlier = round_.futures[slave.member].peer
        try:
            round_.put(slave.member, contribution.rows, peer)
        except ContributionConflict as conflict:
            return [(told, failure(conflict, round_.key)) for told in dict.fromkeys((earlier, peer)) if told]
        except RoundFailed as error:
            self.answered = now
            return self._break(round_, error, also=[peer])
        if self._is_ready(round_):
            self.answered = now
            return self._finish(round_)
        return [(peer, self._pending(now, round_))] if contribution.attempt else []

    def _future(self, round_: Round, slave: Slave) -> FutureResult:
        if slave.member not in round_.futures:
            raise failed(round_.key, f"{slave} is not one of the members that take part, {Members.of(round_.futures)}")
        return round_.futures[slave.member]

    def _check_key(self, slave: Slave, key: RoundKey) -> None:
        membership = self.membership
        if key[:3] != self._run:
            raise ProtocolError(
                f"round key: expected job {membership.job!r}, group {membership.group!r}, epoch {self.epoch}, "
                f"as {slave} registered, got {key}"
            )

    def _too_many(self, key: RoundKey) -> LimitExceeded:
        most = self._budget.quota.max_open_rounds
        return self._budget.exceeded(
            f"group {key.group!r} of job {key.job!r} has {most} open rounds already", most, "open rounds"
        )

    def _count_threads(self, slave: Slave, contribution: Contribution) -> None:
        # What is sent again may come in a bunch, from one thread.
        if len(self._open) > slave.threads and not contribution.attempt:
            futures = (round_.futures.get(slave.member) for round_ in self._open.values())
            slave.threads = max(slave.threads, 1 + sum(future is not None and future.done for future in futures))

    def _answer_again(self, round_: Round, slave: Slave, rows: Rows, peer: bytes) -> list[Reply]:
        future = round_.futures.get(slave.member)
        if future and future.done and not future.put(rows, peer):
            return [(peer, failure(round_.conflict(slave.member), round_.key))]
        return [(peer, round_.answer)]

    def _compare(self, kept: Round, slave: Slave, aggregate: Aggregate) -> list[Reply]:
        if kept.state is State.FAILED or kept.answer == encode(aggregate):
            return []
        self.membership.lost = self.membership.lost or ContributionConflict(
            f"{kept.key}: {slave} was given another aggregate than others were, before the server was restarted",
            **kept.key.fields,
            member=slave.member,
        )
        return self._break_if_lost()

    def _finish(self, round_: Round) -> list[Reply]:
        self.rounds_done += 1
        round_.end(self.run_master(round_))
        return self._close(round_)

    def _break(self, round_: Round, error: StatsdBNError, also: Iterable[bytes] = ()) -> list[Reply]:
        self.rounds_failed += 1
        round_.fail(error)
        return self._close(round_, also)

    def _close(self, round_: Round, also: Iterable[bytes] = ()) -> list[Reply]:
        self._open.pop(round_.key, None)
        # Members that come back differ in which rounds they tell of, and the latest come first from some of them.
        most = limits.KEPT_ROUNDS * (2 if self.membership.recovery else 1)
        self._archive.add(round_, most)
        return [(peer, round_.answer) for peer in dict.fromkeys((*round_.peers, *also))]


def unknown(session: bytes) -> UnknownSession:
    """Returns the error that asks a member to say who it is, and what it was given."""
    return UnknownSession(f"session {session.hex()} is not registered here", session=session.hex())


def _pending(key: RoundKey, seconds: int, text: str) -> bytes:
    told = f"{key}: {text}".encode()[: limits.MAX_TEXT_BYTES].decode(errors="ignore")
    return encode(Pending(key, seconds, told))
