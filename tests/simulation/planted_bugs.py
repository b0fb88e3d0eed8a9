"""Bugs to plant into the real code, one at a time, each as a context manager: the simulator must find them."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

import client.session.protocol.session
from client.session.protocol.registration import Registration
from client.session.protocol.round_trip import GRACE_SECONDS, RoundTrip
from client.session.protocol.session import Session
from client.transports.group_memory import GroupMemory
from client.transports.shared_memory import MemoryRound
from server.core import deadlock, hang_probe
from server.core.dispatcher import Dispatcher, Received
from server.core.liveness import Sessions
from server.group import master
from server.group.lifecycle import GroupState, MemberState
from server.group.master import SyncMaster
from server.group.membership import Membership
from server.group.recovery import RecoveredResults
from server.group.rounds import Round
from statsd_bn import limits
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, StackReport
from statsd_bn.reduction import Rows, join_in_order
from statsd_bn.round_key import GATHER
from statsd_bn.wire import decode, encode

BUGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {}

# For each bug the seed of a short world that found it. If this world no longer finds it, all seeds are searched.
FOUND_LAST: dict[str, int] = {}


def bug(found_last: int) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a bug under its function's name, with the seed of a world that found it."""

    def register(plant: Callable[[], Any]) -> Callable[[], Any]:
        name = plant.__name__.replace("_", "-")
        BUGS[name], FOUND_LAST[name] = plant, found_last
        return plant

    return register


def instead(owner: Any, name: str, wrong: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replaces a method by `wrong`, whose first argument, `right`, is the original method."""
    right = getattr(owner, name)
    put: Any = functools.wraps(right)(lambda *args, **named: wrong(right, *args, **named))
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    return mock.patch.object(owner, name, staticmethod(put) if is_static else put)


@bug(13)
@contextmanager
def no_duplicate_check() -> Iterator[None]:
    """A contribution that comes again counts as another member's."""

    def put(right: Any, self: Round, member: int, rows: Rows, peer: bytes) -> None:
        was_done = self.futures[member].done
        right(self, member, rows, peer)
        if was_done and self.nr_missing > 1:
            self.nr_missing -= 1

    def reduce_round(_right: Any, round_: Round) -> Aggregate:
        there = [member for member, future in round_.futures.items() if future.done]
        return _reduced(round_, [round_.futures[member].get() for member in there])

    with instead(Round, "put", put), instead(master, "reduce_round", reduce_round):
        yield


@bug(0)
def arrival_order_sum() -> Any:
    """Rows are added in the order of their arrival."""

    def reduce_round(_right: Any, round_: Round) -> Aggregate:
        futures = sorted(round_.futures.values(), key=lambda future: future.since)
        return _reduced(round_, [future.get() for future in futures])

    return instead(master, "reduce_round", reduce_round)


@bug(19)
def reply_lost_on_restart() -> Any:
    """A member sends a new server none of its latest results."""
    return mock.patch.object(Session, "resync_frames", lambda self: [self.register()])


@bug(86)
def ring_too_short() -> Any:
    """A member resends all its results except the latest to a new server."""
    return instead(Session, "resync_frames", lambda right, self: [self.register(), *right(self)[1:][:-1]])


@bug(5)
def kept_too_few() -> Any:
    """The server keeps no answers of ended rounds, so a member that asks again gets none."""

    def close(right: Any, self: SyncMaster, round_: Round, *args: Any) -> Any:
        replies = right(self, round_, *args)
        self._cached_results.clear()
        self._cached_failures.clear()
        return replies

    return instead(SyncMaster, "_close", close)


@bug(11)
def death_not_announced() -> Any:
    """A lost member is removed without notice to the others."""

    def remove(right: Any, *args: Any, is_lost: bool = False) -> Any:
        loss, replies = right(*args, is_lost=is_lost)
        return loss, [] if is_lost else replies

    return instead(SyncMaster, "remove_contributor", remove)


@bug(5)
def cause_not_carried() -> Any:
    """The cause of a member's death is dropped."""

    def remove(right: Any, self: Membership, contributor: Any, cause: str, *, is_lost: bool) -> Any:
        return right(self, contributor, cause if is_lost else "", is_lost=is_lost)

    return instead(Membership, "remove", remove)


@bug(2)
def retry_with_other_rows() -> Any:
    """A contribution that is sent again has other rows."""

    def contribution(right: Any, self: Session, key: Any, rows: Rows, attempt: int = 0) -> bytes:
        return right(self, key, Rows(rows.counts, rows.values + attempt), attempt)

    return instead(Session, "contribution", contribution)


@bug(19)
def second_write_wins() -> Any:
    """A late contribution to an ended round is added to the cached answer."""

    def answer_again(right: Any, self: SyncMaster, round_: Round, contributor: Any, rows: Rows, peer: bytes) -> Any:
        message = decode(round_.answer)
        if isinstance(message, Aggregate) and message.values.shape == rows.values.shape[1:]:
            with np.errstate(all="ignore"):
                late = replace(message, values=message.values + rows.values.sum(axis=0))
            round_.answer = encode(late)
        return right(self, round_, contributor, rows, peer)

    return instead(SyncMaster, "_answer_again", answer_again)


@bug(61)
def deadlock_unseen() -> Any:
    """Deadlocks are not searched for."""
    return mock.patch.object(deadlock, "find_deadlocks", return_value=[])


@bug(11)
def late_is_held() -> Any:
    """Each member that gets a stack request counts as waiting for all others in a collective."""

    def blocked_members(masters: Any, _silence: float) -> list[deadlock.Wait]:
        members = [(one, member) for one in masters for member in one.membership.contributors.values()]
        pairs = [(one, member) for one, member in members if member.stack_sample]
        everybody = frozenset(member.member for _, member in pairs)
        return [
            deadlock.Wait(one, None, {member.member: 0.0}, everybody - {member.member}, member) for one, member in pairs
        ]

    return mock.patch.object(deadlock, "blocked_members", blocked_members)


@bug(60)
def answers_mixed_up() -> Any:
    """A stack report is recorded for the member that was asked first."""

    def answer(_right: Any, self: hang_probe.HangProbe, now: float, answer: StackReport) -> None:
        for contributor in list(self._sampled.values())[:1]:
            contributor.stack_sample.record_report(now, replace(answer, number=contributor.stack_sample.number))

    return instead(hang_probe.HangProbe, "record_report", answer)


@bug(25)
def deadlock_too_quick() -> Any:
    """Each waiting member counts as stuck."""
    return mock.patch.object(deadlock, "stuck", lambda waits, _running: {one for who, _ in waits for one in who})


@bug(224)
def never_expires() -> Any:
    """Rounds have no deadline."""
    return mock.patch.object(SyncMaster, "expire", return_value=[])


@bug(33)
def timeout_blames_waiting() -> Any:
    """A timeout names the waiting members."""
    return mock.patch.object(Round, "missing", property(lambda self: self.waiting))


@bug(2)
def one_is_not_answered() -> Any:
    """The aggregate is sent to all members but the last, which gets no answer when it asks again either."""

    def close(right: Any, self: SyncMaster, round_: Round, *args: Any) -> Any:
        return right(self, round_, *args)[:-1]

    def again(_right: Any, *_args: Any) -> Any:
        return []

    @contextmanager
    def both() -> Iterator[None]:
        with instead(SyncMaster, "_close", close), instead(SyncMaster, "_answer_again", again):
            yield

    return both()


@bug(23)
def session_not_checked() -> Any:
    """A message of an unknown session gets no error."""

    return instead(Dispatcher, "_refuse_unregistered", lambda _right, _self, _message, _peer: Received([]))


@bug(25)
def lost_still_covered() -> Any:
    """An aggregate claims the whole group as its members."""

    def close(right: Any, self: SyncMaster, round_: Round, *args: Any) -> Any:
        if isinstance(aggregate := decode(round_.answer), Aggregate):
            whole = Members.of(range(self.membership.world_size))
            round_.answer = encode(replace(aggregate, members=whole))
        return right(self, round_, *args)

    return instead(SyncMaster, "_close", close)


@bug(33)
def too_few_go_on() -> Any:
    """An elastic group continues with too few members."""
    return mock.patch.object(Membership, "has_quorum", property(lambda _: True))


@bug(26)
def membership_frozen_late() -> Any:
    """A newcomer's first step is the current step of the others, not the next."""

    def take_in(right: Any, self: Membership, *args: Any) -> Any:
        contributor = right(self, *args)
        if self.is_open:
            contributor.first_step = self.latest_step
        return contributor

    return instead(Membership, "_add", take_in)


@bug(315)
def late_rows_dropped() -> Any:
    """Contributions of a lost member are dropped."""

    def withdraw(right: Any, self: Round, member: int) -> None:
        future = self.futures.get(member)
        if future and future.done and len(self.futures) > 1:
            del self.futures[member]
            return
        right(self, member)

    return instead(Round, "withdraw", withdraw)


@bug(58)
def away_still_awaited() -> Any:
    """A paused or rejoining member is expected in new rounds."""

    def participants(_right: Any, self: Membership, step: int) -> list[int]:
        return [contributor.member for contributor in self.contributors.values() if contributor.first_step <= step]

    return instead(Membership, "participants", participants)


@bug(18)
def recovery_does_not_wait() -> Any:
    """A restarted server continues with the members that are back."""
    return mock.patch.object(Membership, "absent", property(lambda _: []))


@bug(18)
def first_result_wins_unchecked() -> Any:
    """The results of an earlier server complete any round of their step."""

    def take(right: Any, self: RecoveredResults, round_: Round) -> Any:
        aggregate = right(self, round_)
        claims = [claim.aggregate for claim in self.results.values()]
        alike = [one for one in claims if (one.key.step, one.key.phase) == (round_.key.step, round_.key.phase)]
        return replace(alike[0], key=round_.key) if alike else aggregate

    return instead(RecoveredResults, "consume", take)


@bug(88)
def claims_are_ignored() -> Any:
    """Results of an earlier server complete no round."""
    return mock.patch.object(RecoveredResults, "can_finish", return_value=False)


@bug(36)
def back_too_early() -> Any:
    """A pass begins while a member is still in the previous one."""

    def call_back(right: Any, self: Membership) -> bool:
        back = [contributor for contributor in self.contributors.values() if contributor.state is MemberState.REJOINING]
        if len(back) < max(2, len(self.contributors) - 1):
            return right(self)
        for contributor in back:
            contributor.first_step, contributor.state = self._next_step, MemberState.TAKES_PART
        return True

    return instead(Membership, "_begin_pass", call_back)


@bug(45)
def late_answer_is_a_return() -> Any:
    """A returning member takes any answer for its admission."""

    def registered(_right: Any, self: Session, frame: bytes) -> Any:
        message = self._read(frame, None)
        return message if self._is_registered(message) else None

    return instead(Session, "registered", registered)


@bug(8414)
def refused_begins_recovery() -> Any:
    """A refused member starts a recovery, and the group opens with the members present."""

    def admit(right: Any, self: Membership, now: float, register: Any, peer: bytes) -> Any:
        if register.was_in_group and self.state is GroupState.FILLING:
            self._recovering_since, self.state = now, GroupState.RECOVERING
        return right(self, now, register, peer)

    return instead(Membership, "admit", admit)


@bug(0)
def answers_first_socket() -> Any:
    """Only the first waiting socket is answered at once; the other sockets get the answer when they ask again."""
    right = Round.peers.fget
    return mock.patch.object(Round, "peers", property(lambda self: right(self)[:1]))


@bug(289)
def silence_too_short() -> Any:
    """A member that missed a single heartbeat is lost."""
    return mock.patch.object(limits, "SILENCE_SECONDS", limits.HEARTBEAT_SECONDS + 0.5)


@bug(1)
def dead_kept() -> Any:
    """The session of a member that left is kept."""

    def pop(self: Sessions, token: bytes, _default: Any) -> Any:
        session = self.get(token)
        return session if session and session.contributor.state not in {MemberState.LEFT, MemberState.LOST} else None

    return mock.patch.object(Sessions, "pop", pop)


@bug(0)
def steps_count_by_forward() -> Any:
    """A step begins with each backward round rather than with the next forward round."""

    def contribution(right: Any, self: Session, key: Any, *args: Any) -> bytes:
        frame = right(self, key, *args)
        if key.phase != client.session.protocol.session.FORWARD:
            self.steps.step, self.steps._backward_seen = self.steps.step + 1, False
        return frame

    return instead(Session, "contribution", contribution)


@bug(12)
def gathered_backwards() -> Any:
    """Gathered values are in reverse order."""

    def reduce_round(right: Any, round_: Round) -> Aggregate:
        if round_.key.phase != GATHER:
            return right(round_)
        return _reduced(round_, [future.get() for future in reversed(round_.futures.values())])

    return instead(master, "reduce_round", reduce_round)


@bug(11)
def retry_without_attempt() -> Any:
    """A contribution that is sent again has the same attempt number."""

    def ask_again(right: Any, self: RoundTrip, now: float) -> Any:
        self._attempt = -1
        return right(self, now)

    return instead(RoundTrip, "_retry", ask_again)


@bug(1768)
def deadline_counts_anew() -> Any:
    """The time for a round begins again with each answer."""

    def step(right: Any, self: RoundTrip, now: float, frame: bytes | None) -> Any:
        if frame is not None:
            self._expiry = now + self._session.member.round_timeout + GRACE_SECONDS
        return right(self, now, frame)

    return instead(RoundTrip, "step", step)


@bug(2)
def no_introduction_in_a_round() -> Any:
    """A member that waits for a round does not introduce itself to a restarted server."""
    return instead(RoundTrip, "_resync", lambda _right, self, now: self._retry(now))


@bug(34)
def registers_once() -> Any:
    """A member that waits for others does not repeat its registration."""

    def take(right: Any, self: Registration, now: float, answer: Any) -> Any:
        frames, due, result = right(self, now, answer)
        if result is None:
            self._due = due = now + 1000.0
        return frames, due, result

    return instead(Registration, "_handle", take)


def _reduced(round_: Round, contributions: list[Rows]) -> Aggregate:
    rows = [row for one in contributions for row in one.values]
    counts = [count for one in contributions for count in one.counts]
    with np.errstate(all="ignore"):
        total = join_in_order(rows) if round_.key.phase == GATHER else functools.reduce(np.add, rows)
    return Aggregate(round_.key, len(counts), sum(counts), Members.of(round_.futures), total)


@bug(3)
def memory_never_escalates() -> Any:
    """A member that waits in memory waits for ever, and does not report its wait to the server."""
    return instead(MemoryRound, "_escalate", lambda _right, _self, now: ((), now + 1.0, None))


@bug(320)
def memory_keys_not_compared() -> Any:
    """Members in different rounds exchange rows in memory."""
    arrive = GroupMemory.arrive
    return mock.patch.object(GroupMemory, "arrive", lambda self, _digest, *arguments: arrive(self, 1, *arguments))


@bug(218)
def settled_rounds_untold() -> Any:
    """The end of a round in memory is not reported to the server."""
    return mock.patch.object(GroupMemory, "is_escalated", new=False)


@bug(1270)
def settled_by_the_teller_alone() -> Any:
    """Only members that sent their rows report the end of a round in memory to the server."""

    def poll(right: Any, self: MemoryRound, now: float) -> Any:
        over = right(self, now)
        if self._trip or not over:
            return over
        self._session.last_round_done.frame = b""
        return ((), *over[1:])

    return instead(MemoryRound, "_poll", poll)


@bug(1610)
def settled_rounds_begin_anew() -> Any:
    """A late copy of a contribution reopens a round that ended in memory."""

    def settle(right: Any, self: SyncMaster, now: float, contributor: Any, key: Any) -> None:
        right(self, now, contributor, key)
        self._ended.pop(hash(key), None)

    return instead(SyncMaster, "finish_round", settle)


@bug(0)
def memory_not_looked_at_again() -> Any:
    """A member that has sent its rows to the server no longer checks memory."""

    def poll(right: Any, self: MemoryRound, now: float) -> Any:
        return None if self._trip else right(self, now)

    return instead(MemoryRound, "_poll", poll)
