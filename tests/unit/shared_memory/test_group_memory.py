"""Members meet: all wait for the last, and read the same."""

import random
import threading
from mmap import mmap

import numpy as np
import pytest

from client.shared_memory import futex, group_memory, region
from client.shared_memory.group_memory import GroupMemory
from client.shared_memory.region import Brought
from statsd_bn.rows import Rows
from support.memory_members import in_threads

pytestmark = pytest.mark.skipif(not futex.is_available(), reason="this system has no futexes")

LONG = 20.0


def memories_of(members: int) -> list[GroupMemory]:
    memory = mmap(-1, region.size_of(members))
    return [GroupMemory(memory, members, me) for me in range(members)]


def row(value: float) -> Rows:
    return Rows((1,), np.full((1, 2, 3), value))


def values(found: Brought | None) -> list[float] | None:
    return None if found is None else found.values[:, 0, 0].tolist()


def test_whoever_waits_is_woken_when_the_last_comes():
    first, second = memories_of(2)
    first.arrive(1, row(0.5))
    assert not first.wait(0.0)

    def come_late():
        second.arrive(1, row(0.25))
        return second.wait(LONG), values(second.brought())

    (waited, mine), theirs = in_threads([lambda: (first.wait(LONG), values(first.brought())), come_late])
    assert waited
    assert (mine, theirs) == ([0.5, 0.25], (True, [0.5, 0.25]))


def test_a_wake_up_that_is_lost_costs_a_slice_and_no_hang(monkeypatch):
    monkeypatch.setattr(futex.Futex, "wake", lambda *_: None)
    first, second = memories_of(2)

    def meet(mine: GroupMemory, value: float):
        mine.arrive(1, row(value))
        return mine.wait(LONG) and values(mine.brought())

    assert in_threads([lambda: meet(first, 1.0), lambda: meet(second, 2.0)]) == [[1.0, 2.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    "brought",
    [
        [(1, row(1.0)), (2, row(1.0)), (1, row(1.0))],
        [(1, row(1.0)), (1, Rows((1,), np.ones((1, 2, region.SLOT_BYTES // 8))))],
    ],
    ids=["for different things", "rows that do not fit"],
)
def test_where_rows_cannot_be_had_all_members_learn_it(brought):
    memories = memories_of(len(brought))
    for mine, (digest, rows) in zip(memories, brought, strict=True):
        mine.arrive(digest, rows)
    assert [(mine.wait(0.0), mine.brought()) for mine in memories] == [(True, None)] * len(brought)


def test_a_wait_ends_when_a_member_comes_no_more():
    first, second = memories_of(2)
    first.arrive(1, row(1.0))
    waiting = threading.Event()

    def wait():
        waiting.set()
        return first.wait(LONG)

    def close():
        waiting.wait(LONG)
        second.close()

    assert in_threads([wait, close])[0] is False
    assert first.is_closed


def test_a_meeting_that_all_have_come_to_counts_although_one_has_closed_since():
    first, second = memories_of(2)
    first.arrive(1, row(1.0))
    second.arrive(1, row(2.0))
    second.close()
    assert first.wait(LONG)
    assert values(first.brought()) == [1.0, 2.0]


@pytest.mark.parametrize("members", [2, 3, 8])
def test_many_meetings_with_pauses_give_everybody_the_rows_of_each(members):
    rounds = 300 // members

    def member(me: int, mine: GroupMemory) -> list[list[float]]:
        chance, found = random.Random(me), []
        for number in range(rounds):
            if chance.random() < 0.1:
                threading.Event().wait(chance.uniform(0, 2 * group_memory.SLICE_SECONDS))
            mine.arrive(number, row(number + me / 16))
            while not mine.wait(0.01):
                pass
            found.append(values(mine.brought()))
        return found

    all_of_them = memories_of(members)
    found = in_threads([lambda me=me, mine=mine: member(me, mine) for me, mine in enumerate(all_of_them)], 60.0)
    assert found == [[[number + me / 16 for me in range(members)] for number in range(rounds)]] * members


def test_where_the_system_refuses_futexes_there_are_none(monkeypatch):
    monkeypatch.setattr(futex.Futex, "wake", lambda *_: -1)
    assert not futex.is_available.__wrapped__()
