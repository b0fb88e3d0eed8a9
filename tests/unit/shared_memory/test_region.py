"""Who has come to a meeting, and what they have brought."""

from mmap import mmap

import numpy as np
import pytest

from client.shared_memory import region
from client.shared_memory.region import Region
from statsd_bn.rows import Rows


@pytest.fixture
def regions():
    memory = mmap(-1, region.size_of(3))
    return [Region(memory, 3, me) for me in range(3)]


def rows(first: float, replicas: int = 1, channels: int = 4) -> Rows:
    values = np.arange(replicas * 2 * channels, dtype=np.float64).reshape(replicas, 2, channels) + first
    return Rows(tuple(range(5, 5 + replicas)), values)


def test_a_meeting_waits_for_the_last_member(regions):
    for one in regions[:2]:
        one.bring(1, 7, rows(0.5))
        assert not any(each.have_all_come(1) for each in regions)
    regions[2].bring(1, 7, rows(0.5))
    assert all(each.have_all_come(1) for each in regions)


def test_each_member_reads_what_all_have_brought_in_their_order(regions):
    brought = [rows(0.1), rows(-3e300, replicas=2), rows(np.inf, replicas=5)]
    for one, mine in zip(regions, brought, strict=True):
        one.bring(1, 2**64 - 1, mine)
    for one in regions:
        for found, mine in zip(one.brought(1), brought, strict=True):
            assert found.digest == 2**64 - 1
            assert found.rows.counts == mine.counts
            assert found.rows.values.tobytes() == mine.values.tobytes()


def test_a_member_may_be_at_the_next_meeting_while_another_reads_the_last(regions):
    for one in regions:
        one.bring(1, 7, rows(1.0))
    regions[0].bring(2, 8, rows(2.0))
    assert [found.digest for found in regions[1].brought(1)] == [7, 7, 7]
    assert not regions[1].have_all_come(2)


def test_rows_that_are_too_large_are_not_brought(regions):
    fits = (region.SLOT_BYTES - 5 * region.WORD_BYTES) // (2 * region.WORD_BYTES)
    regions[0].bring(1, 7, rows(1.0, channels=fits))
    regions[1].bring(1, 7, rows(1.0, channels=fits + 1))
    regions[2].bring(1, 7, rows(1.0))
    assert [found.rows is None for found in regions[0].brought(1)] == [False, True, False]


def test_members_do_not_write_into_one_anothers_places(regions):
    largest = (region.SLOT_BYTES - 5 * region.WORD_BYTES) // (2 * region.WORD_BYTES)
    for meeting in (1, 2):
        for number, one in enumerate(regions):
            one.bring(meeting, number, rows(float(number), channels=largest))
    for meeting in (1, 2):
        assert [found.digest for found in regions[0].brought(meeting)] == [0, 1, 2]
        assert [found.rows.values[0, 0, 0] for found in regions[0].brought(meeting)] == [0.0, 1.0, 2.0]
    assert not regions[0].is_closed


def test_one_that_closes_is_seen_by_all(regions):
    assert not any(one.is_closed for one in regions)
    regions[1].close()
    assert all(one.is_closed for one in regions)
