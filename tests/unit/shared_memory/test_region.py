"""Who has come to which turn, and what they have brought."""

from mmap import mmap

import numpy as np
import pytest

from client.shared_memory import region
from client.shared_memory.region import Region
from statsd_bn import limits
from statsd_bn.rows import Rows


@pytest.fixture
def regions():
    memory = mmap(-1, region.size_of(3))
    return [Region(memory, 3, me) for me in range(3)]


def rows(first: float, replicas: int = 1, channels: int = 4, vectors: int = 2) -> Rows:
    values = np.arange(replicas * vectors * channels, dtype=np.float64).reshape(replicas, vectors, channels) + first
    return Rows(tuple(range(5, 5 + replicas)), values)


TOO_WIDE = region.SLOT_BYTES // 8

# Counts and shapes of what follows one another in the slots.
A, B, C = ((5,), (1, 2, 4)), ((6,), (1, 2, 4)), ((5,), (1, 2, 3))
MORE, WIDE = ((5, 7), (2, 2, 4)), ((5,), (1, 2, TOO_WIDE))


@pytest.mark.parametrize("most", [1, 2, 256])
@pytest.mark.parametrize(
    "order", [(A, A, B), (A, A, C, C, A), (A, MORE, A, A, MORE), (A, A, WIDE, WIDE, A, A), (A, C, B, MORE, WIDE, A, B)]
)
def test_rows_of_one_turn_leave_nothing_for_those_of_another(regions, monkeypatch, order, most):
    monkeypatch.setattr(region, "_MOST_LAYOUTS", most)
    for turn, (counts, shape) in enumerate((*order, *order), 1):
        brought = [np.full(shape, turn + me / 4) for me in range(3)]
        for one, values in zip(regions, brought, strict=True):
            one.bring(turn, turn, Rows(counts, values))
        found = [one.brought(turn) for one in regions]
        if shape[2] == TOO_WIDE:
            assert found == [None] * 3
            continue
        assert [one.counts for one in found] == [[*counts] * 3] * 3
        assert {one.values.tobytes() for one in found} == {np.concatenate(brought).tobytes()}


@pytest.mark.parametrize("replicas", [(1, 1, 1), (3, 3, 3), (1, 2, 5)])
def test_each_member_reads_what_all_have_brought_in_their_order(regions, replicas):
    brought = [rows(first, replicas=number) for first, number in zip((0.1, -3e300, np.inf), replicas, strict=True)]
    for one, mine in zip(regions, brought, strict=True):
        one.bring(1, 2**64 - 1, mine)
    for one in regions:
        found = one.brought(1)
        assert found.counts == [count for mine in brought for count in mine.counts]
        assert found.values.tobytes() == np.concatenate([mine.values for mine in brought]).tobytes()


def test_a_member_may_be_at_the_next_meeting_while_another_reads_the_last(regions):
    for one in regions:
        one.bring(1, 7, rows(1.0))
    regions[0].bring(2, 8, rows(2.0))
    assert regions[1].brought(1).values[:, 0, 0].tolist() == [1.0, 1.0, 1.0]
    assert not regions[1].have_all_come(2)


def test_rows_that_are_too_large_are_not_brought(regions):
    fits = (region.SLOT_BYTES - 5 * region.WORD_BYTES) // (2 * region.WORD_BYTES)
    for turn, (channels, are_brought) in enumerate([(fits, True), (fits + 1, False)], 1):
        for one in regions:
            one.bring(turn, 7, rows(1.0, channels=channels))
        assert [one.brought(turn) is not None for one in regions] == [are_brought] * 3


@pytest.mark.parametrize("other", [rows(1.0, channels=3), rows(1.0, channels=8, vectors=1)])
def test_rows_that_cannot_be_added_are_not_brought(regions, other):
    for one, mine in zip(regions, (rows(1.0), rows(1.0, replicas=2), other), strict=True):
        one.bring(1, 7, mine)
    assert [one.brought(1) for one in regions] == [None] * 3


def test_members_that_believe_different_things_have_brought_nothing(regions):
    for digest, one in enumerate(regions):
        one.bring(1, digest // 2, rows(1.0))
    assert [one.brought(1) for one in regions] == [None] * 3


def test_counts_that_no_member_could_have_are_told_as_they_are(regions):
    for one in regions:
        one.bring(1, 7, rows(1.0))
    regions[1]._words[regions[1]._slots[1][1] // region.WORD_BYTES + 4] = 2**64 - 1
    assert regions[0].brought(1).counts == [5, 2**64 - 1, 5]


def test_members_do_not_write_into_one_anothers_places(regions):
    largest = (region.SLOT_BYTES - 5 * region.WORD_BYTES) // (2 * region.WORD_BYTES)
    for turn in (1, 2):
        for number, one in enumerate(regions):
            one.bring(turn, 7, rows(float(number), channels=largest))
    for turn in (1, 2):
        assert regions[0].brought(turn).values[:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    assert not regions[0].is_closed


def test_one_that_closes_is_seen_by_all(regions):
    assert not any(one.is_closed for one in regions)
    regions[1].close()
    assert all(one.is_closed for one in regions)


@pytest.mark.parametrize(
    "shape",
    [
        (limits.MAX_REPLICAS + 1, 1, 1),
        (1, limits.MAX_VECTORS + 1, 1),
        (1, 1, limits.MAX_CHANNELS + 1),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 2**63),
        (limits.MAX_REPLICAS, limits.MAX_VECTORS, limits.MAX_CHANNELS),
        (1, 1, region.SLOT_BYTES // 8),
        # These leave the member's place.
        (2**63, 1, 1),
        (1, 2**40, 2**40),
        (2, 8, region.SLOT_BYTES // 128),
        (1, 2**64 - 1, 2**64 - 1),
        (region.SLOT_BYTES, 0, 0),
    ],
)
def test_sizes_that_another_process_has_made_up_are_not_believed(regions, shape):
    for number, one in enumerate(regions):
        one.bring(1, 7, rows(float(number)))
    liar = regions[1]
    first = liar._slots[1][1] // region.WORD_BYTES
    liar._words[first + 1 : first + 4] = memoryview(np.array(shape, np.uint64)).cast("B").cast("Q")
    assert regions[0].brought(1) is None


def test_the_first_reason_to_close_is_told(regions):
    ended, given_up, _ = regions
    ended.close(region.ENDED)
    assert all(one.is_closed and not one.is_given_up for one in regions)
    given_up.close()
    given_up.close(region.ENDED)
    assert all(one.is_closed and one.is_given_up for one in regions)


def test_a_turn_is_told_by_whoever_has_told_it(regions):
    one, another, _ = regions
    another.tell(7)
    assert all(each.is_told(7) and not each.is_told(8) for each in regions)
    one.tell(8)
    assert all(each.is_told(7) and each.is_told(8) for each in regions)


def test_a_turn_may_have_been_told_by_one_that_has_told_the_next_one_since(regions):
    one = regions[0]
    one.tell(7)
    one.tell(8)
    assert all(each.is_told(7) for each in regions)
