"""Bugs to plant into the real code, one at a time: a simulator that does not find them would find no others either.

Each is a context manager that changes one thing, as a slip of the pen would.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

import client.session
from client.session import Session
from server import deadlock
from server.dispatcher import Dispatcher
from server.liveness import Liveness
from server.master import SyncMaster
from server.membership import Membership
from server.rounds import Round
from statsd_bn import limits
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Rows
from statsd_bn.wire import decode, encode

BUGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {}


def bug(plant: Callable[[], Any]) -> Callable[[], Any]:
    """Enters a bug under its function's name."""
    BUGS[plant.__name__.replace("_", "-")] = plant
    return plant


def instead(owner: Any, name: str, wrong: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Puts `wrong(right, *args)` in the place of a method."""
    right = getattr(owner, name)
    return mock.patch.object(owner, name, functools.wraps(right)(lambda *args, **named: wrong(right, *args, **named)))


@bug
@contextmanager
def no_duplicate_check() -> Iterator[None]:
    """A contribution that comes again counts as another member's."""

    def put(right: Any, self: Round, member: int, rows: Rows, peer: bytes) -> None:
        was_done = self.futures[member].done
        right(self, member, rows, peer)
        if was_done and self._pending > 1:
            self._pending -= 1

    def run_master(_right: Any, _self: SyncMaster, round_: Round) -> Aggregate:
        there = [member for member, future in round_.futures.items() if future.done]
        return _reduced(round_, [round_.futures[member].get() for member in there])

    with instead(Round, "put", put), instead(SyncMaster, "run_master", run_master):
        yield


@bug
def arrival_order_sum() -> Any:
    """Rows are added as they came."""

    def run_master(_right: Any, _self: SyncMaster, round_: Round) -> Aggregate:
        futures = sorted(round_.futures.values(), key=lambda future: future.since)
        return _reduced(round_, [future.get() for future in futures])

    return instead(SyncMaster, "run_master", run_master)


@bug
def reply_lost_on_restart() -> Any:
    """A member tells a new master nothing of its latest rounds."""
    return mock.patch.object(Session, "introduction", lambda self: [self.register()])


@bug
def ring_too_short() -> Any:
    """A member keeps one result too few to tell a new master: not the latest but one."""
    return instead(Session, "introduction", lambda right, self: [self.register(), *right(self)[1:][:-1]])


@bug
def kept_too_few() -> Any:
    """The master keeps no answer but the latest one's, one round too short for who is a round behind."""

    def close(right: Any, self: SyncMaster, round_: Round, *args: Any) -> Any:
        replies = right(self, round_, *args)
        self._kept.clear()
        return replies

    return instead(SyncMaster, "_close", close)


@bug
def death_not_announced() -> Any:
    """A lost member is taken out, and nobody is told."""

    def banish(right: Any, *args: Any) -> Any:
        loss, _ = right(*args)
        return loss, []

    return instead(SyncMaster, "banish_slave", banish)


@bug
def cause_not_carried() -> Any:
    """What a member died of is not told."""
    return instead(Membership, "remove", lambda right, self, slave, _cause: right(self, slave, ""))


@bug
def retry_with_other_rows() -> Any:
    """A contribution that is sent again is not the same."""

    def contribution(right: Any, self: Session, key: Any, rows: Rows, attempt: int = 0) -> bytes:
        return right(self, key, Rows(rows.counts, rows.values + attempt), attempt)

    return instead(Session, "contribution", contribution)


@bug
def second_write_wins() -> Any:
    """What a member brings late, after its round has ended, is added to the kept answer."""

    def answer_again(right: Any, self: SyncMaster, round_: Round, slave: Any, rows: Rows, peer: bytes) -> Any:
        message = decode(round_.answer)
        if isinstance(message, Aggregate):
            with np.errstate(all="ignore"):
                late = replace(message, values=message.values + rows.values.sum(axis=0))
            round_.answer = encode(late)
        return right(self, round_, slave, rows, peer)

    return instead(SyncMaster, "_answer_again", answer_again)


@bug
def deadlock_unseen() -> Any:
    """Nobody looks whether members wait for one another."""
    return mock.patch.object(deadlock, "find", return_value=[])


@bug
def deadlock_too_quick() -> Any:
    """Whoever waits is taken to be waited for as well."""
    return mock.patch.object(deadlock, "stuck", lambda waits, _running: {one for who, _ in waits for one in who})


@bug
def never_expires() -> Any:
    """Rounds have no deadline."""
    return mock.patch.object(SyncMaster, "expire", return_value=[])


@bug
def timeout_blames_waiting() -> Any:
    """A timeout names those who came."""
    return mock.patch.object(Round, "missing", property(lambda self: self.waiting))


@bug
def one_is_not_answered() -> Any:
    """The aggregate is sent to all but the last, who is also forgotten when it asks again."""

    def close(right: Any, self: SyncMaster, round_: Round, *args: Any) -> Any:
        return right(self, round_, *args)[:-1]

    def again(_right: Any, *_args: Any) -> Any:
        return []

    @contextmanager
    def both() -> Iterator[None]:
        with instead(SyncMaster, "_close", close), instead(SyncMaster, "_answer_again", again):
            yield

    return both()


@bug
def session_not_checked() -> Any:
    """A session that is not known is not told so."""

    def contribute(right: Any, self: Dispatcher, now: float, contribution: Any, peer: bytes) -> Any:
        return right(self, now, contribution, peer) if contribution.session in self._seats else []

    return instead(Dispatcher, "_contribute", contribute)


@bug
def lost_still_covered() -> Any:
    """An aggregate says that it covers the whole group, whoever is left."""

    def run_master(right: Any, self: SyncMaster, round_: Round) -> Aggregate:
        return replace(right(self, round_), members=Members.of(range(self.membership.world_size)))

    return instead(SyncMaster, "run_master", run_master)


@bug
def too_few_go_on() -> Any:
    """An elastic group goes on with fewer members than it may."""
    return mock.patch.object(Membership, "suffices", property(lambda _: True))


@bug
def silence_too_short() -> Any:
    """A member is lost that has only missed a heartbeat."""
    return mock.patch.object(limits, "SILENCE_SECONDS", limits.HEARTBEAT_SECONDS + 0.5)


@bug
def dead_kept() -> Any:
    """Nobody forgets the pulse of one who has left."""
    return mock.patch.object(Liveness, "forget", return_value=None)


@bug
def steps_count_by_forward() -> Any:
    """A step begins with each backward round rather than with the next forward one."""

    def contribution(right: Any, self: Session, key: Any, *args: Any) -> bytes:
        frame = right(self, key, *args)
        if key.phase != client.session.FORWARD:
            self._step, self._backward_seen = self._step + 1, False
        return frame

    return instead(Session, "contribution", contribution)


def _reduced(round_: Round, contributions: list[Rows]) -> Aggregate:
    rows = [row for one in contributions for row in one.values]
    counts = [count for one in contributions for count in one.counts]
    with np.errstate(all="ignore"):
        total = functools.reduce(np.add, rows)
    return Aggregate(round_.key, len(counts), sum(counts), Members.of(round_.futures), total)
