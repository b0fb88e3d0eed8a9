"""Rounds in shared memory: all members wait for the last one, and get the same sum."""

import random
import signal
import threading
import time
from mmap import mmap

import numpy as np
import pytest

from client.native.library import CLOSED, DIFFERS, DONE, NOT_FINITE, TOO_MANY, WAITS
from client.transports import group_memory
from client.transports.group_memory import MAX_MEMBERS, GroupMemory
from statsd_bn import limits
from statsd_bn.reduction import Rows, sum_in_order
from support.memory_members import in_threads

pytestmark = pytest.mark.skipif(bool(group_memory.unavailable_reason()), reason=group_memory.unavailable_reason())

LONG = 20.0

# The layout in round.c: the words of a slot before its counts, and the bytes of a cache line and of a slot.
HEAD_WORDS, LINE_BYTES, SLOT_BYTES = 5, 64, 2**18
TOO_WIDE = SLOT_BYTES // 8
WIDEST = (SLOT_BYTES // 8 - HEAD_WORDS - 1) // 2


def is_closed(memory):
    return bool(memory._core.sbn_closed(memory._at))


def memories_of(members: int) -> list[GroupMemory]:
    memory = mmap(-1, group_memory.size_of(members))
    return [GroupMemory(memory, members, me) for me in range(members)]


def rows(first: float, replicas: int = 1, channels: int = 4, vectors: int = 2, counts: tuple[int, ...] = ()) -> Rows:
    values = np.arange(replicas * vectors * channels, dtype=np.float64).reshape(replicas, vectors, channels) + first
    return Rows(counts or tuple(range(5, 5 + replicas)), values)


def meet(memories: list[GroupMemory], contributions: list[Rows], digests: list[int] | None = None) -> list[int]:
    for mine, own, digest in zip(memories, contributions, digests or [7] * len(contributions), strict=True):
        mine.arrive(digest, own)
    return [mine.wait(0.0) for mine in memories]


def test_waiting_members_wake_when_the_last_contributes():
    first, second = memories_of(2)
    assert first.arrive(1, rows(0.5)) == WAITS
    assert first.wait(0.0) == WAITS
    assert first.late == [1]
    results = in_threads([lambda: first.wait(LONG), lambda: second.arrive(1, rows(0.25), seconds=LONG)])
    assert results == [DONE, DONE]
    assert first.total.tobytes() == second.total.tobytes() == (rows(0.5).values + rows(0.25).values)[0].tobytes()
    assert first.late == []


def test_a_signal_ends_a_wait_so_that_python_handles_it():
    first, _ = memories_of(2)
    signals, began = [], time.monotonic()
    before = signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    main = threading.main_thread().ident
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    timer.start()
    try:
        assert first.arrive(1, rows(1.0), seconds=LONG) == WAITS
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert signals == [signal.SIGUSR1]
    assert time.monotonic() - began < LONG / 2


@pytest.mark.parametrize(
    ("contributions", "digests", "found"),
    [
        ([rows(1.0)] * 3, [1, 2, 1], DIFFERS),
        ([rows(1.0)] * 3, [0, 2**64 - 1, 2**63], DIFFERS),
        ([rows(1.0), rows(1.0, channels=WIDEST + 1), rows(1.0)], None, DIFFERS),
        ([rows(1.0, channels=WIDEST + 1)] * 3, None, DIFFERS),
        ([rows(1.0, channels=WIDEST)] * 3, None, DONE),
        ([rows(1.0), rows(1.0, replicas=2), rows(1.0, channels=3)], None, DIFFERS),
        ([rows(1.0), rows(1.0, replicas=2), rows(1.0, channels=8, vectors=1)], None, DIFFERS),
        ([rows(1.0, counts=(limits.MAX_COUNT - 10,)), rows(1.0), rows(1.0)], None, DONE),
        ([rows(1.0, counts=(limits.MAX_COUNT - 9,)), rows(1.0), rows(1.0)], None, TOO_MANY),
        ([rows(1.0), rows(np.nan), rows(1.0)], None, NOT_FINITE),
        ([rows(1.0), rows(-np.inf), rows(1.0)], None, NOT_FINITE),
        ([rows(1.7e308), rows(1.7e308), rows(1.0)], None, NOT_FINITE),
        ([rows(1.7e308), rows(1.0), rows(-1.7e308)], None, DONE),
    ],
)
def test_all_members_reach_the_same_verdict(contributions, digests, found):
    memories = memories_of(3)
    for _ in range(3):
        assert meet(memories, contributions, digests) == [found] * 3
    assert meet(memories, [rows(1.0)] * 3) == [DONE] * 3


# Rows of a turn: their counts, and the shape of their values.
A, B, C = ((5,), (1, 2, 4)), ((6,), (1, 2, 4)), ((5,), (1, 2, 3))
MORE, WIDE = ((5, 7), (2, 2, 4)), ((5,), (1, 2, TOO_WIDE))


@pytest.mark.parametrize("order", [(A, A, B), (A, MORE, A, A, MORE), (A, C, B, MORE, WIDE, WIDE, A, B)])
def test_rows_of_one_turn_do_not_reach_another(order):
    memories = memories_of(3)
    for turn, (counts, shape) in enumerate((*order, *order), 1):
        contributions = [np.full(shape, turn + me / 4) for me in range(3)]
        found = meet(memories, [Rows(counts, values) for values in contributions])
        assert found == [DIFFERS if shape[2] == TOO_WIDE else DONE] * 3
        for mine in memories if found[0] == DONE else ():
            assert mine.gathered_rows()[0] == [*counts] * 3
            assert mine.gathered_rows()[2].tobytes() == np.concatenate(contributions).tobytes()


@pytest.mark.parametrize("replicas", [(1, 1, 1), (3, 3, 3), (1, 2, 5)])
def test_each_member_adds_the_rows_of_all_in_member_order(replicas):
    memories = memories_of(3)
    chance = np.random.default_rng(1)
    scales = 10.0 ** chance.integers(-8, 9, (sum(replicas), 2, 37))
    parts = np.split(chance.standard_normal(scales.shape) * scales, np.cumsum(replicas)[:-1])
    parts[0][0, 0, 0] = -0.0
    contributions = [Rows(tuple(range(1, 1 + len(part))), np.asfortranarray(part)) for part in parts]
    assert meet(memories, contributions) == [DONE] * 3
    counts = [count for mine in contributions for count in mine.counts]
    for one in memories:
        assert one.total.tobytes() == sum_in_order(np.concatenate(parts)).tobytes()
        assert (one.rows, one.count) == (sum(replicas), sum(counts))
        *found, values = one.gathered_rows()
        assert found == [counts, list(replicas)]
        assert values.tobytes() == np.concatenate(parts).tobytes()


def test_a_member_may_be_at_the_next_turn_while_another_reads_the_previous_turn():
    memories = memories_of(3)
    assert meet(memories, [rows(1.0)] * 3) == [DONE] * 3
    assert memories[0].arrive(8, rows(2.0)) == WAITS
    assert memories[1].wait(0.0) == DONE
    assert memories[1].gathered_rows()[2][:, 0, 0].tolist() == [1.0, 1.0, 1.0]


def test_members_do_not_write_into_each_others_rows():
    memories = memories_of(3)
    for turn in (0.0, 10.0):
        meet(memories, [rows(turn + number, channels=WIDEST) for number in range(3)])
        assert memories[0].gathered_rows()[2][:, 0, 0].tolist() == [turn, turn + 1, turn + 2]
    assert not is_closed(memories[0])


@pytest.mark.parametrize(
    ("first", "made_up", "found"),
    [
        (1, (0, 2, 4), DIFFERS),
        (1, (2**63, 2, 4), DIFFERS),
        (1, (2**64 - 1, 2, 4), DIFFERS),
        (1, (SLOT_BYTES // 72 + 1, 2, 4), DIFFERS),
        (1, (1, 0, 4), DIFFERS),
        (1, (1, 1, 8), DIFFERS),
        (1, (1, 2, 2**63), DIFFERS),
        (1, (1, 2**40, 2**40), DIFFERS),
        (1, (1, 2**64 - 1, 2**64 - 1), DIFFERS),
        (HEAD_WORDS, (2**64 - 1,), TOO_MANY),
    ],
)
def test_invented_sizes_and_counts_are_refused(first, made_up, found):
    memory = mmap(-1, group_memory.size_of(3))
    memories = [GroupMemory(memory, 3, me) for me in range(3)]
    assert meet(memories, [rows(1.0)] * 3) == [DONE] * 3
    words = memoryview(memory).cast("Q")
    slot = (LINE_BYTES + (LINE_BYTES + 2 * SLOT_BYTES) + LINE_BYTES + SLOT_BYTES) // 8
    assert words[slot : slot + HEAD_WORDS + 1].tolist() == [7, 1, 2, 4, 0, 5]
    words[slot + first : slot + first + len(made_up)] = memoryview(np.array(made_up, np.uint64)).cast("B").cast("Q")
    assert memories[0].wait(0.0) == found
    memories[0].gathered_rows()  # reads no more than was written


@pytest.mark.parametrize(("close", "is_abandoned"), [(GroupMemory.abandon, True), (GroupMemory.leave, False)])
def test_a_wait_ends_when_a_member_leaves(close, is_abandoned):
    first, second, third = memories_of(3)
    assert first.arrive(1, rows(1.0)) == WAITS
    assert not is_closed(first)
    result, _ = in_threads([lambda: first.wait(LONG), lambda: close(second)])
    assert result == CLOSED
    assert all(is_closed(one) and one.is_abandoned == is_abandoned for one in (first, second, third))
    # The third member arrives, but the second one will not.
    assert third.arrive(1, rows(1.0)) == CLOSED
    assert first.late == [1, 2]
    third.leave()
    second.abandon()
    assert first.is_abandoned == is_abandoned  # a member's first reason stays


def test_a_complete_turn_counts_although_one_member_has_closed_since():
    first, second = memories_of(2)
    first.arrive(1, rows(1.0))
    assert second.arrive(1, rows(2.0)) == DONE
    second.abandon()
    assert first.wait(LONG) == DONE


def test_a_turn_counts_as_escalated_whichever_member_escalated_it():
    first, second = memories_of(2)
    for caller in (None, first, second):
        for one in (first, second):
            one.arrive(1, rows(1.0))
            if one is caller:
                one.escalate()
        assert [one.wait(0.0) for one in (first, second)] == [DONE, DONE]
        assert tuple(bool(one.is_escalated) for one in (first, second)) == (caller is not None, caller is not None)
    first.arrive(1, rows(1.0))
    second.arrive(1, rows(1.0))
    assert not second.is_escalated
    second.arrive(1, rows(1.0))
    second.escalate()
    assert first.wait(0.0) == DONE
    assert first.is_escalated  # the second escalated the next turn, and may have escalated this one


@pytest.mark.parametrize("members", [2, 3, 8])
def test_many_turns_with_pauses_give_each_member_every_sum(members):
    turns = 300 // members

    def member(me: int, mine: GroupMemory) -> list[float]:
        chance, found = random.Random(me), []
        for number in range(turns):
            if chance.random() < 0.1:
                threading.Event().wait(chance.uniform(0, 0.004))
            stands = mine.arrive(number, rows(number + me / 16), seconds=0.001)
            while stands == WAITS:
                stands = mine.wait(0.01)
            assert stands == DONE
            found.append(mine.total[0, 0])
        return found

    found = in_threads([lambda me=me, mine=mine: member(me, mine) for me, mine in enumerate(memories_of(members))], 60)
    assert found == [[sum(number + me / 16 for me in range(members)) for number in range(turns)]] * members


def test_a_memory_with_the_maximal_number_of_members_distinguishes_them_all():
    memories = memories_of(MAX_MEMBERS)
    memories[3].arrive(1, rows(1.0))
    assert memories[3].late == [member for member in range(MAX_MEMBERS) if member != 3]
    memories[-1].arrive(1, rows(1.0))
    assert memories[3].late[-1] == MAX_MEMBERS - 2
