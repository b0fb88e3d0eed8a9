import struct

import numpy as np
import pytest

from server.group.rounds import FutureResult, Round, RoundState
from statsd_bn.errors import ContributionConflict, RoundMismatch
from statsd_bn.reduction import Rows
from support.strategies import key, rows

KEY = key("layer3.bn", step=7, call=1)


def a_round(*members: int, seconds: float = 600.0) -> Round:
    return Round(KEY, members, 100.0, seconds)


@pytest.mark.parametrize("first", [RoundState.REDUCED, RoundState.FAILED])
@pytest.mark.parametrize("then", [RoundState.REDUCED, RoundState.FAILED])
def test_a_round_ends_once(first, then):
    ended = a_round(0)
    ended.end(b"answer", first)
    with pytest.raises(RuntimeError, match="ended already"):
        ended.end(b"other", then)
    assert (ended.state, ended.answer) == (first, b"answer")


def test_repeated_bytes_are_accepted_and_answered_at_the_new_address():
    future = FutureResult()
    first = rows(1.0, 2.0)
    assert future.put(first, b"first")
    assert future.put(rows(1.0, 2.0), b"second")
    assert future.get() is first
    assert future.peer == b"second"


@pytest.mark.parametrize(
    ("first", "other"),
    [
        *((rows(1.0), other) for other in (rows(2.0), rows(1.0, count=2), rows(1.0, 1.0), rows(1.0, channels=2))),
        *((rows(1.0), other) for other in (rows(1.0, vectors=2), rows(np.nextafter(1.0, 2.0)))),
        (rows(0.0), rows(-0.0)),
        # The same number of values in another shape.
        (Rows((1,), np.zeros((1, 2, 3))), Rows((1,), np.zeros((1, 3, 2)))),
    ],
)
def test_any_difference_counts_as_a_conflict(first, other):
    future = FutureResult()
    assert future.put(first, b"")
    assert not future.put(other, b"")


def nan(payload: int) -> Rows:
    return Rows((1,), np.frombuffer(struct.pack("<Q", 0x7FF8_0000_0000_0000 | payload)).reshape(1, 1, 1))


def test_repeated_nan_bytes_are_accepted():
    future = FutureResult()
    assert future.put(nan(42), b"")
    assert future.put(nan(42), b"")
    assert not future.put(nan(43), b"")


def test_two_different_contributions_of_one_member_conflict_and_the_first_is_used():
    round_ = a_round(0, 1)
    round_.put(0, rows(1.0), b"first")
    with pytest.raises(ContributionConflict, match="rank 0 sent two different contributions") as caught:
        round_.put(0, rows(2.0), b"second")
    assert caught.value.fields == {**KEY.fields, "member": 0}
    assert round_.peers == [b"first"]
    round_.put(1, rows(5.0), b"other")
    assert not round_.nr_missing
    assert round_.futures[0].get().values == 1.0


@pytest.mark.parametrize(
    ("first", "second", "text", "expected", "got"),
    [
        ({"channels": 64}, {"channels": 32}, "64 channels, as rank 2 sent, got 32", [1, 64], [1, 32]),
        ({"vectors": 2}, {"vectors": 3}, "2 vectors, as rank 2 sent, got 3", [2, 1], [3, 1]),
        (
            {"vectors": 2, "channels": 4},
            {"vectors": 3, "channels": 5},
            "4 channels, as rank 2 sent, got 5",
            [2, 4],
            [3, 5],
        ),
    ],
)
def test_a_mismatch_names_the_layer_the_member_and_both_shapes(first, second, text, expected, got):
    round_ = a_round(0, 1, 2)
    round_.put(2, rows(1.0, **first), b"")
    with pytest.raises(RoundMismatch) as caught:
        round_.put(0, rows(1.0, **second), b"")
    message = str(caught.value)
    assert text in message
    assert "layer 'layer3.bn'" in message
    assert caught.value.fields == {**KEY.fields, "expected": expected, "got": got, "member": 0}
    assert round_.waiting == [2]
