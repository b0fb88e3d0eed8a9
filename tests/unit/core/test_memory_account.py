"""Memory accounting: stored data count with their size, and a full server still serves small tenants."""

import dataclasses
import gc
import os
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from server.core.dispatcher import Dispatcher
from server.security.access import Principal
from server.security.quota import (
    CONTRIBUTION_BYTES,
    FUTURE_BYTES,
    GROUP_BYTES,
    MEMBER_BYTES,
    MemoryShare,
    Quota,
    QuotaUsage,
)
from statsd_bn import limits
from statsd_bn.errors import LimitExceeded
from statsd_bn.members import NO_MEMBERS, Members
from statsd_bn.messages import Failure, Heartbeat, LatenessReport, Leave, Message, Result, RoundTrips
from statsd_bn.wire import decode, encode
from support.strategies import contribution, key, register, rows, session_of

ALICE = Principal("alice", "key of alice", ("*",), "team")
ANNA = Principal("anna", "key of anna", ("*",), "team")
BOB = Principal("bob", "key of bob", ("*",))


class Play:
    def __init__(self, **quota: float) -> None:
        self.dispatcher = Dispatcher(b"server-0", 0.0, quota=Quota(**quota))

    def send(self, message: Message, **given: Any) -> dict[bytes, Any]:
        received = self.dispatcher.receive(0.0, getattr(message, "session", b"anybody"), encode(message), **given)
        return {peer: decode(frame) for peer, frame in received.replies}

    def open(self, members: int = 2, **given: Any) -> None:
        for member in range(members):
            self.send(register(member, members, **given))

    @property
    def usage(self) -> QuotaUsage:
        return self.dispatcher._usage


def grown(act: Callable[[], None]) -> int:
    """How many more bytes Python has allocated after `act` than before."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        act()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def many_futures(play: Play) -> Callable[[], None]:
    play.open(64)
    frames = [encode(contribution(0, key=key(step=step))) for step in range(100)]
    return lambda: [play.dispatcher.receive(0.0, b"peer", frame).replies for frame in frames] and None


def many_rows(play: Play) -> Callable[[], None]:
    play.open(8)
    frames = [encode(contribution(member, key=key(step=step))) for step in range(100) for member in range(7)]
    return lambda: [play.dispatcher.receive(0.0, b"peer", bytes(bytearray(frame))).replies for frame in frames] and None


def many_members(_: Play) -> list[Message]:
    return [register(member, 1000, session=os.urandom(8), place="h" * 250) for member in range(300)]


def many_reports(play: Play) -> list[Message]:
    messages = many_members(play)
    counts = tuple(1000 + bucket for bucket in range(limits.BUCKETS))
    for session in [one.session for one in messages]:
        messages += [kind(session, 500, counts) for kind in (RoundTrips, LatenessReport)]
        messages.append(Heartbeat(session, 1, 1000, "shared_memory", "", 1000))
    return messages


def many_groups(_: Play) -> list[Message]:
    return [register(0, job=f"{number} {'j' * 200}", session=os.urandom(8)) for number in range(500)]


def scattered(_: Play) -> list[Message]:
    """After a restart members report thousands of members that are not consecutive, as known members and in results."""
    known = Members(tuple((2 * number, 1) for number in range(4000)))
    messages: list[Message] = []
    for member in range(4):
        session = os.urandom(8)
        messages.append(register(member, 9, session=session, server=b"server-9", known=known, results=8))
        messages += [Result(session, dataclass_of(step, Members(known.runs[member + step :]))) for step in range(8)]
    return messages


def scattered_bearers(_: Play) -> list[Message]:
    bearers = Members(tuple((2 * number, 1) for number in range(4000)))
    session = os.urandom(8)
    results = [dataclass_of(step, Members.of(range(9)), Members(bearers.runs[step:])) for step in range(8)]
    known = register(0, 9, session=session, server=b"server-9", known=Members.of(range(9)), results=8)
    return [known, *(Result(session, result) for result in results)]


def dataclass_of(step: int, members: Members, bearers: Members = NO_MEMBERS) -> Any:
    play = Play()
    play.open()
    play.send(contribution(0, key=key(step=step)))
    aggregate = play.send(contribution(1, key=key(step=step)))[session_of(1)]
    return dataclasses.replace(aggregate, members=members, non_finite=bearers)


@pytest.mark.parametrize(
    "ways", [many_futures, many_rows, many_members, many_reports, many_groups, scattered, scattered_bearers]
)
def test_stored_data_count_with_at_least_their_size(ways):
    play = Play()
    act = ways(play)
    if not callable(act):
        frames = [encode(message) for message in act]

        def act() -> None:
            for frame in frames:
                play.dispatcher.receive(0.0, os.urandom(5), frame)

    counted = play.usage.allocated
    size = grown(act)
    counted = play.usage.allocated - counted
    assert size <= counted <= 8 * size


def test_the_overhead_of_a_group_counts():
    def taken_by_each(messages: list[Message]) -> float:
        dispatcher, frames = Dispatcher(b"server-0", 0.0), [encode(message) for message in messages]

        def register_all() -> None:
            for frame in frames:
                dispatcher.receive(0.0, b"", frame)

        return grown(register_all) / len(frames)

    play = Play()
    of_group = taken_by_each(many_groups(play)) - taken_by_each(many_members(play))
    assert GROUP_BYTES / 2 < of_group <= GROUP_BYTES


def test_the_keys_of_a_tenant_share_an_account():
    play = Play(max_tenant_bytes=100_000)
    play.send(register(0, 1, job="a"), principal=ALICE)
    play.send(register(0, 1, job="b"), principal=ANNA)
    play.send(register(0, 1, job="c"), principal=BOB)
    assert play.usage.allocated_by_tenant["tenant 'team'"] == 2 * play.usage.allocated_by_tenant["tenant 'bob'"]
    wide = rows(1.0, channels=8000)
    assert not isinstance(contribute(play, "a", ALICE, wide), Failure)
    refused = contribute(play, "b", ANNA, wide)
    assert (refused.code, refused.fields) == ("limit", {"limit": 100_000, "what": "bytes kept for a tenant"})
    assert not isinstance(contribute(play, "c", BOB, wide), Failure)


def contribute(play: Play, job: str, tenant: Principal, own_rows: Any) -> Any:
    (answer,) = play.send(contribution(0, own_rows, key(job=job)), principal=tenant).values()
    return answer


def test_a_large_job_does_not_push_out_a_smaller_one():
    play = Play(max_server_bytes=500_000, max_tenant_bytes=450_000)
    play.open(job="small")
    play.send(contribution(0, rows(1.0, channels=10_000), key(job="small")))
    play.open()
    for step in range(6):
        answers = play.send(contribution(0, rows(1.0, channels=10_000), key(step=step)))
    assert {answer.code for answer in answers.values()} == {"limit"}
    assert {group["job"] for group in play.dispatcher.report(0.0)["groups"]} == {"small", "job"}


def test_1024_members_at_2048_channels_fit():
    quota = Quota()
    round_ = 8 * 2 * 2048 + CONTRIBUTION_BYTES + FUTURE_BYTES
    assert 1024 * ((limits.CACHED_ROUNDS + 1) * round_ + MEMBER_BYTES) < quota.max_tenant_bytes
    assert 2 * quota.max_server_bytes <= 2**30, "the memory limit given to docker and Kubernetes"


def test_a_repeated_error_keeps_no_received_data():
    play = Play()
    play.open()
    play.send(Leave(session_of(1), "boom"))
    wide = encode(contribution(0, rows(1.0, channels=10_000), key(step=1)))

    def ask() -> None:
        for _ in range(100):
            play.dispatcher.receive(0.0, b"peer", bytes(bytearray(wide)))

    ask()
    assert grown(ask) < 10_000


def test_a_budget_names_the_limit_that_was_reached():
    usage = QuotaUsage(Quota(max_server_bytes=100, max_tenant_bytes=60))
    room, other = MemoryShare(usage, "job 'a'"), MemoryShare(usage, "job 'b'")
    room.allocate(60)
    with pytest.raises(LimitExceeded, match="job 'a' holds 60 bytes, and 1 more exceed the limit of 60"):
        room.allocate(1)
    with pytest.raises(LimitExceeded, match="the server holds 60 bytes, and 41 more for job 'b' exceed") as caught:
        other.allocate(41)
    assert caught.value.fields == {"limit": 100, "what": "bytes kept in all"}
    assert usage.allocated == 60
