"""One member's part in a round of a relay: a pure machine, with the memory of one host and no clock."""

from mmap import mmap

import numpy as np
import pytest

from client.conversation.member import Member
from client.conversation.session import Session
from client.lanes.carried_round import CARRY_SECONDS, MOST_BYTES, CarriedRound
from client.lanes.round_in_memory import ESCALATE_SECONDS, AtServer
from client.shared_memory import passing
from client.shared_memory.host_memory import HostMemory, size_of
from statsd_bn import limits
from statsd_bn.errors import LimitExceeded, RoundTimeout, UnknownSession
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Carried, Failure, Pending
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.tokens import digest
from statsd_bn.wire import decode, encode

pytestmark = pytest.mark.skipif(bool(passing.why_not()), reason=passing.why_not())

WORLD = 4


def rows_of(member: int, channels: int = 3) -> Rows:
    return Rows((member + 1,), np.random.default_rng(member).standard_normal((1, 2, channels)))


class Host:
    """Members of one host; the first numbers of a group of four."""

    def __init__(self, members: int = 3) -> None:
        memory = mmap(-1, size_of(members))
        self.sessions = [
            Session(b"session%d" % n, Member("job", "world", 0, n, WORLD, 60.0, f"place {n}")) for n in range(members)
        ]
        self.memories = [HostMemory(memory, members, n, one.token) for n, one in enumerate(self.sessions)]
        self.trips: list[int] = []

    def round(self, member: int, layer: str = "bn", rows: Rows | None = None) -> CarriedRound:
        session = self.sessions[member]

        def begin_trip():
            self.trips.append(member)
            return f"trip of {member}"

        return CarriedRound(
            session, session.forward_key(layer), rows or rows_of(member), self.memories[member], begin_trip
        )

    def begin(self, now: float = 0.0, layer: str = "bn", rows=rows_of):
        """All come, the last number last; returns their machines and what the last one is to do."""
        rounds = [self.round(member, layer, rows(member)) for member in range(len(self.sessions))]
        *others, last = [one.begin(now) for one in rounds]
        assert all(turn == ((), now + ESCALATE_SECONDS, None) for turn in others)
        return rounds, last


def key(layer: str = "bn", call: int = 0) -> RoundKey:
    return RoundKey("job", "world", 0, 0, layer, call, "forward")


def answer(call: int = 0, value: float = 0.5, layer: str = "bn") -> bytes:
    values = np.full((2, 3), value)
    return encode(Aggregate(key(layer, call), WORLD, 10, Members.of(range(WORLD)), values))


def test_the_last_to_come_carries_the_rows_of_all():
    host = Host()
    _, (frames, due, found) = host.begin(now=5.0)
    (carried,) = map(decode, frames)
    assert isinstance(carried, Carried)
    assert (carried.session, carried.tokens, carried.key) == (
        b"session2",
        (b"session0", b"session1", b"session2"),
        key(),
    )
    assert carried.rows.counts == (1, 2, 3)
    assert carried.rows.values.tobytes() == b"".join(rows_of(n).values.tobytes() for n in range(3))
    assert (due, found) == (5.0 + CARRY_SECONDS, None)
    assert host.sessions[2].spoke == 5.0
    assert [one.spoke for one in host.sessions[:2]] == [0.0, 0.0], "the others have said nothing to the server"


def test_the_answer_is_left_for_the_others_seal_and_all():
    host = Host()
    rounds, _ = host.begin()
    *_, found = rounds[2].step(0.01, answer())
    for one in rounds[:2]:
        frames, _, mine = one.step(0.02, None)
        assert not frames
        assert (mine.key, mine.values.tobytes()) == (found.key, found.values.tobytes())
    assert [len(list(one.introduction())) for one in host.sessions] == [2, 2, 2], "each tells it to a restarted server"
    assert host.trips == []


def test_turns_follow_one_another_and_anyone_may_carry():
    host = Host()
    for call in range(7):
        order = [(call + shift) % 3 for shift in range(3)]
        rounds = {member: host.round(member) for member in order}
        *_, (frames, _, _) = [rounds[member].begin(0.0) for member in order]
        assert decode(frames[0]).session == b"session%d" % order[-1]
        found = [
            rounds[member].step(0.01, answer(call, float(call)) if member == order[-1] else None)[2]
            for member in order[::-1]
        ]
        assert {one.values[0, 0] for one in found} == {float(call)}


def test_two_that_take_themselves_for_the_last_both_carry_and_both_leave_the_answer():
    host = Host(2)
    rounds = [host.round(0), host.round(1)]
    come = HostMemory.come

    def comes_at_the_same_time(digest, rows):
        come(host.memories[0], digest, rows)
        second.append(rounds[1].begin(0.0))
        return host.memories[0].have_all_come

    second = []
    host.memories[0].come = comes_at_the_same_time
    first = rounds[0].begin(0.0)
    sent = [decode(turn[0][0]) for turn in (first, *second)]
    assert [one.session for one in sent] == [b"session0", b"session1"]
    assert encode(sent[0])[-96:] == encode(sent[1])[-96:], "the same rows"
    assert all(one.step(0.1, answer())[2].count == 10 for one in rounds)


def test_one_that_waits_for_long_asks_for_itself_and_may_be_carried_later():
    host = Host()
    first = host.round(0)
    assert first.begin(1.0) == ((), 1.0 + ESCALATE_SECONDS, None)
    assert first.step(1.04, None) == ((), 1.0 + ESCALATE_SECONDS, None)
    assert first.step(1.05, None)[2] == AtServer("trip of 0")
    host.round(1).begin(1.06)
    frames, _, _ = host.round(2).begin(1.07)
    assert decode(frames[0]).tokens == (b"session0", b"session1", b"session2")
    assert host.sessions[0].lane.seconds_in_memory == pytest.approx(0.05)


def test_where_all_have_come_the_others_give_whoever_carries_some_time():
    host = Host()
    rounds, _ = host.begin()
    assert rounds[0].step(ESCALATE_SECONDS, None) == ((), CARRY_SECONDS, None)
    assert rounds[0].step(0.2, None) == ((), CARRY_SECONDS, None)
    assert rounds[0].step(CARRY_SECONDS, None)[2] == AtServer("trip of 0")
    assert rounds[1].step(CARRY_SECONDS, None)[2] == AtServer("trip of 1"), "at once, if it has slept so long"


def test_whoever_carries_asks_for_itself_where_no_answer_comes():
    host = Host()
    rounds, _ = host.begin()
    assert rounds[2].step(CARRY_SECONDS, None)[2] == AtServer("trip of 2")


def test_the_next_turn_begins_where_all_have_come_to_the_last_one():
    """They may have asked for themselves in it."""
    host = Host()
    rounds, _ = host.begin()
    for one in rounds:
        assert isinstance(one.step(CARRY_SECONDS, None)[2], AtServer)
    _, (frames, _, found) = host.begin(now=1.0)
    assert decode(frames[0]).key == key(call=1)
    assert found is None


def test_the_memory_is_closed_where_one_comes_a_second_time_before_the_others():
    """Another thread of it: the others may still read what it would write over."""
    host = Host()
    assert isinstance(step_after(host.round(0), ESCALATE_SECONDS), AtServer)
    frames, _, found = host.round(0, "other").begin(0.1)
    assert (frames, found) == ((), AtServer("trip of 0"))
    assert host.memories[1].is_given_up
    assert isinstance(host.round(1).begin(0.2)[2], AtServer)
    assert host.memories[1].have_all_come, "it has not come to any turn"


def step_after(one: CarriedRound, seconds: float):
    one.begin(0.0)
    return one.step(seconds, None)[2]


def test_different_rounds_are_for_the_server_at_once():
    host = Host()
    rounds = [host.round(0, "a"), host.round(1, "a"), host.round(2, "b")]
    assert [one.begin(0.0)[2] for one in rounds] == [None, None, AtServer("trip of 2")]
    assert [one.step(0.001, None)[2] for one in rounds[:2]] == [AtServer("trip of 0"), AtServer("trip of 1")]
    assert not host.memories[0].is_closed


@pytest.mark.parametrize(
    "rows",
    [
        lambda member: Rows((1,) * (1 + member), np.ones((1 + member, 1, 1))),
        lambda _: Rows((1,) * 32, np.ones((32, 1, 1))),
        lambda member: rows_of(member, 3 + member),
    ],
    ids=["different numbers", "too many rows", "different shapes"],
)
def test_what_cannot_be_carried_together_each_brings_itself(rows):
    host = Host()
    rounds, (frames, _, found) = host.begin(rows=rows)
    assert (frames, found) == ((), AtServer("trip of 2"))
    assert isinstance(rounds[0].step(0.001, None)[2], AtServer)
    assert not host.memories[0].is_closed


def test_a_count_that_another_process_has_made_up_is_not_carried():
    host = Host(2)
    memory = host.memories[0]
    host.round(0).begin(0.0)
    region = memory._region
    start = region._slots_of(1)[0] // 8
    region._words[start + 4] = limits.MAX_COUNT + 1
    frames, _, found = host.round(1).begin(0.0)
    assert (frames, found) == ((), AtServer("trip of 1"))


def test_what_is_not_about_this_round_is_ignored():
    host = Host()
    rounds, (_, due, _) = host.begin()
    for frame in (answer(call=5), encode(Pending(key(), 1, "waiting"))):
        assert rounds[2].step(0.01, frame) == ((), due, None)


def test_a_server_that_was_restarted_is_asked_anew():
    host = Host()
    rounds, _ = host.begin()
    name = digest(b"session2").hex()
    unknown = encode(Failure(UnknownSession.code, "who?", {"digest": name}, key()))
    assert rounds[2].step(0.01, unknown)[2] == AtServer("trip of 2")
    assert not host.memories[2].is_closed


@pytest.mark.parametrize("error", [LimitExceeded, RoundTimeout])
@pytest.mark.parametrize("about", [None, key()])
def test_after_an_error_everybody_asks_for_itself_at_once(error, about):
    host = Host()
    rounds, _ = host.begin()
    failed = encode(Failure(error.code, "no", {}, about))
    assert rounds[2].step(0.01, failed)[2] == AtServer("trip of 2")
    assert [one.step(0.02, None)[2] for one in rounds[:2]] == [AtServer("trip of 0"), AtServer("trip of 1")]


def test_an_answer_is_taken_although_whoever_left_it_has_ended():
    host = Host()
    rounds, _ = host.begin()
    rounds[2].step(0.01, answer())
    host.memories[2].end()
    assert rounds[0].step(0.02, None)[2].count == 10


def test_one_that_ends_instead_of_coming_ends_the_wait():
    host = Host()
    first = host.round(0)
    first.begin(0.0)
    host.memories[1].end()
    assert first.step(0.001, None)[2] == AtServer("trip of 0")


def test_an_answer_that_makes_no_sense_is_not_taken():
    host = Host()
    rounds, _ = host.begin()
    host.memories[2].leave(b"garbage", 0.0)
    assert rounds[0].step(0.01, None)[2] == AtServer("trip of 0")


def test_an_answer_that_is_too_long_for_the_memory_is_not_left():
    host = Host()
    rounds, _ = host.begin()
    host.memories[2].leave(bytes(2**20), 0.0)
    assert rounds[0].step(0.01, None)[2] is None


def test_the_wait_for_those_of_the_host_is_told_and_not_the_wait_for_the_server():
    host = Host(2)
    rounds = [host.round(0), host.round(1)]
    rounds[0].begin(10.0)
    rounds[1].begin(10.03)
    rounds[1].step(10.23, answer())
    rounds[0].step(10.24, None)
    waited = [one.lane.seconds_in_memory for one in host.sessions]
    assert waited == pytest.approx([0.04, 0.0])


def test_so_many_bytes_that_the_messages_do_not_count_are_not_carried():
    channels = 14_000
    assert 5 * rows_of(0, channels).values.nbytes > MOST_BYTES
    _, (frames, _, found) = Host(5).begin(rows=lambda member: rows_of(member, channels))
    assert (frames, found) == ((), AtServer("trip of 4"))


def test_an_answer_that_comes_just_before_the_end_of_its_bringer_is_not_missed(monkeypatch):
    host = Host()
    rounds, _ = host.begin()
    looks = iter([None, (answer(), 0.0)])
    monkeypatch.setattr(HostMemory, "answer", property(lambda _: next(looks)))
    host.memories[2].end()
    assert rounds[0].step(0.02, None)[2].count == 10
