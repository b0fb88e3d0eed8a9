"""SyncMaster: collects the slaves' contributions of one group and reduces them.

It is pure: messages, peers and times go in, replies come out. It opens no socket, starts no thread and reads no
clock, so a test can put it through years of faults in seconds.
"""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from server.membership import Membership, Slave
from server.rounds import Event, Round, State, failed
from statsd_bn import limits
from statsd_bn.errors import (
    ContributionConflict,
    LimitExceeded,
    MasterStopped,
    ProtocolError,
    RoundFailed,
    StatsdBNError,
)
from statsd_bn.messages import (
    Aggregate,
    Contribution,
    Failure,
    Pending,
    Register,
    Registered,
    RoundKey,
    Rows,
    missing_members,
)
from statsd_bn.reduction import sum_in_order
from statsd_bn.wire import encode

# How many late members a message names.
TOLD_OF = 8

Reply = tuple[bytes, bytes]
"""(peer, frame): what to send to whom."""


def failure(error: StatsdBNError, key: RoundKey | None = None) -> bytes:
    """Returns the frame that carries an error to a member."""
    text = str(error).encode(errors="replace")[: limits.MAX_TEXT_BYTES].decode(errors="ignore")
    return encode(Failure(error.code, text, error.fields, key))


class SyncMaster:
    """One life (epoch) of one group: its slaves, its open rounds, its latest results.

    Args:
        server: the id of this master's life.
        register: the registration that begins the group; it sets job, group, epoch and world_size.

    Attributes:
        answered: when members were last told that a round has ended, or that the group is open.
    """

    def __init__(self, server: bytes, register: Register) -> None:
        self.epoch = register.epoch
        self.membership = Membership(register.job, register.group, register.world_size)
        self.rounds_done = 0
        self.rounds_failed = 0
        self.answered = -math.inf
        self._server = server
        self._open: dict[RoundKey, Round] = {}
        self._kept: dict[RoundKey, Round] = {}

    @property
    def nr_slaves(self) -> int:
        """How many slaves are registered."""
        return len(self.membership.slaves)

    @property
    def open_rounds(self) -> Collection[Round]:
        """The rounds that have not ended."""
        return self._open.values()

    def register_slave(self, register: Register, peer: bytes) -> tuple[Slave, list[Reply]]:
        """Takes a slave in and tells it whom the group still waits for; tells everybody when it opens.

        Raises:
            RegistrationRefused: with the reason.
            ReplicaLost: the group is broken.
        """
        was_open = self.membership.is_open
        slave = self.membership.admit(register, peer)
        opens = self.membership.is_open and not was_open
        told = self.membership.slaves.values() if opens else [slave]
        return slave, [(slave.peer, self._registered(slave)) for slave in told]

    def contribute(self, now: float, slave: Slave, contribution: Contribution, peer: bytes) -> list[Reply]:
        """Takes a slave's rows for one round.

        Returns:
            Nothing while others are missing; the aggregate for everyone once it is complete; the kept answer if
            the round is over; an error for whom it concerns. Of two different contributions of one slave
            the first counts, and whoever still waits for an answer is told.
        """
        key, rows = contribution.key, contribution.rows
        slave.peer = peer
        if contribution.waits:
            slave.step, slave.replicas = key.step, len(rows.counts)
        else:
            peer = b""
        if key in self._kept:
            return self._answer_again(self._kept[key], slave, rows, peer)
        try:
            round_ = self._open.get(key) or self._begin(now, slave, key)
        except StatsdBNError as error:
            return [(peer, failure(error, key))]
        future = round_.futures[slave.member]
        earlier = future.peer
        if not future.peer:
            future.since = now
            self._count_threads(slave, contribution)
        try:
            round_.put(slave.member, rows, peer)
        except ContributionConflict as conflict:
            return [(told, failure(conflict, key)) for told in dict.fromkeys((earlier, peer)) if told]
        except RoundFailed as error:
            self.answered = now
            return self._break(round_, error, also=[peer])
        if round_.state is not State.WAITING:
            self.answered = now
            return self._finish(round_)
        return [(peer, self._pending(now, round_))] if contribution.attempt and peer else []

    def run_master(self, round_: Round) -> Aggregate:
        """Reduces one complete round: adds all rows in replica order.

        Raises:
            LookupError: a contribution is missing.
        """
        contributions = [future.get() for future in round_.futures.values()]
        counts = [count for rows in contributions for count in rows.counts]
        total = sum_in_order(row for rows in contributions for row in rows.values)
        return Aggregate(round_.key, len(counts), sum(counts), total)

    def remove_slave(self, slave: Slave, cause: str) -> list[Reply]:
        """Takes a slave out; the rounds of an open group fail for everyone, with the cause."""
        self.membership.remove(slave, cause)
        return self._break_if_lost()

    def banish_slave(self, slave: Slave, cause: str) -> list[Reply]:
        """Takes a slave out that is lost without a goodbye; else as `remove_slave`."""
        self.membership.banish(slave, cause)
        return self._break_if_lost()

    def expire(self, now: float) -> list[Reply]:
        """Ends the rounds whose deadline has passed."""
        late = [round_ for round_ in self._open.values() if now >= round_.opened + round_.seconds]
        told = [round_ for round_ in late if round_.peers]
        for round_ in late:
            if not round_.peers:
                del self._open[round_.key]
        self.answered = now if told else self.answered
        return [reply for round_ in told for reply in self._break(round_, round_.timeout())]

    def fail(self, key: RoundKey, error: StatsdBNError) -> list[Reply]:
        """Ends an open round with an error."""
        return self._break(self._open[key], error)

    def stop(self) -> list[Reply]:
        """Ends all open rounds because the master stops."""
        return self.break_all(lambda round_: MasterStopped(f"the master stopped during {round_.key}"))

    def break_all(self, reason: Callable[[Round], StatsdBNError]) -> list[Reply]:
        """Ends all open rounds, each for its own reason."""
        return [reply for round_ in list(self._open.values()) for reply in self._break(round_, reason(round_))]

    def _break_if_lost(self) -> list[Reply]:
        lost = self.membership.lost
        return self.break_all(lambda _: lost) if lost else []

    def report(self, now: float) -> dict[str, Any]:
        """Returns what a status report says of this group."""
        membership = self.membership
        return {
            "job": membership.job,
            "group": membership.group,
            "epoch": self.epoch,
            "world_size": membership.world_size,
            "members": [
                {"member": slave.member, "place": slave.place, "step": slave.step, "replicas": slave.replicas}
                for slave in sorted(membership.slaves.values(), key=lambda slave: slave.member)
            ],
            "missing": membership.missing,
            "lost": str(membership.lost or ""),
            "rounds_done": self.rounds_done,
            "rounds_failed": self.rounds_failed,
            "waiting": [
                {"round": str(round_.key), "seconds": now - round_.opened, "missing": round_.missing}
                for round_ in self._open.values()
            ],
        }

    def _pending(self, now: float, round_: Round) -> bytes:
        """Returns what tells a member that asks again whom its round waits for."""
        seconds = int(now - round_.opened)
        late = ", ".join(str(self.membership.slaves[member]) for member in round_.missing[:TOLD_OF])
        more = f" and {len(round_.missing) - TOLD_OF} more" if len(round_.missing) > TOLD_OF else ""
        text = f"{round_.key}: waiting since {seconds} s for {late}{more}".encode()
        return encode(Pending(round_.key, seconds, text[: limits.MAX_TEXT_BYTES].decode(errors="ignore")))

    def _registered(self, slave: Slave) -> bytes:
        missing = self.membership.missing
        present = tuple(self.membership.present) if missing else ()
        return encode(Registered(slave.session, self._server, self.epoch, 0, missing, present))

    def _begin(self, now: float, slave: Slave, key: RoundKey) -> Round:
        membership = self.membership
        if membership.lost:
            raise membership.lost
        if (key.job, key.group, key.epoch) != (membership.job, membership.group, self.epoch):
            raise ProtocolError(
                f"round key: expected job {membership.job!r}, group {membership.group!r}, epoch {self.epoch}, "
                f"as {slave} registered, got {key}"
            )
        if not membership.is_open:
            awaited = missing_members(membership.group, membership.world_size, membership.present)
            raise failed(key, f"the group is not open, it waits for {awaited}")
        if len(self._open) >= limits.MAX_OPEN_ROUNDS:
            raise LimitExceeded(
                f"group {key.group!r} of job {key.job!r} has {len(self._open)} open rounds already",
                limit=limits.MAX_OPEN_ROUNDS,
                what="open rounds",
            )
        round_ = Round(key, membership.slaves, now, slave.deadline)
        self._open[key] = round_
        return round_

    def _count_threads(self, slave: Slave, contribution: Contribution) -> None:
        # What is sent again may come in a bunch, from one thread.
        if len(self._open) > slave.threads and not contribution.attempt:
            others = sum(round_.futures[slave.member].done for round_ in self._open.values())
            slave.threads = max(slave.threads, others + 1)

    def _answer_again(self, round_: Round, slave: Slave, rows: Rows, peer: bytes) -> list[Reply]:
        future = round_.futures[slave.member]
        told = [peer] if peer else []
        if future.done and not future.put(rows, peer):
            return [(one, failure(round_.conflict(slave.member), round_.key)) for one in told]
        return [(one, round_.answer) for one in told]

    def _finish(self, round_: Round) -> list[Reply]:
        self.rounds_done += 1
        return self._close(round_, encode(self.run_master(round_)))

    def _break(self, round_: Round, error: StatsdBNError, also: Iterable[bytes] = ()) -> list[Reply]:
        round_.advance(Event.BROKEN)
        self.rounds_failed += 1
        return self._close(round_, failure(error, round_.key), also)

    def _close(self, round_: Round, answer: bytes, also: Iterable[bytes] = ()) -> list[Reply]:
        round_.answer = answer
        del self._open[round_.key]
        self._kept[round_.key] = round_
        if len(self._kept) > limits.KEPT_ROUNDS:
            del self._kept[next(iter(self._kept))]
        return [(peer, answer) for peer in dict.fromkeys((*round_.peers, *also))]
