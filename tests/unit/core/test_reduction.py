import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.members import NO_MEMBERS, Members
from statsd_bn.reduction import sum_in_order

finite = st.floats(-1e300, 1e300)


@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 8), st.integers(1, 5)), elements=finite))
def test_rows_are_added_from_left_to_right_to_the_last_bit(matrix):
    expected = []
    for column in matrix.T.tolist():
        total = column[0]
        for value in column[1:]:
            total = total + value
        expected.append(total)
    assert sum_in_order(matrix).tobytes() == np.array(expected).tobytes()


def test_one_row_comes_back_as_a_copy():
    row = np.array([1.0, 2.0])
    total = sum_in_order([row])
    np.testing.assert_array_equal(total, row)
    assert not np.shares_memory(total, row)


def test_the_inputs_are_left_alone():
    rows = [np.array([1.0, 2.0]), np.array([10.0, 20.0])]
    total = sum_in_order(rows)
    np.testing.assert_array_equal(total, [11.0, 22.0])
    np.testing.assert_array_equal(rows, [[1.0, 2.0], [10.0, 20.0]])


def test_float32_rows_are_added_in_float64():
    total = sum_in_order([np.array([2.0**24], np.float32), np.array([1.0], np.float32)])
    assert total.dtype == np.float64
    assert total == 2.0**24 + 1


def test_zero_rows_have_no_sum():
    with pytest.raises(ValueError, match="not enough values"):
        sum_in_order([])


@given(st.sets(st.integers(0, 40)))
def test_a_set_of_numbers_keeps_its_numbers(numbers):
    members = Members.of(numbers)
    assert list(members) == sorted(numbers)
    assert len(members) == len(numbers)
    assert [number in members for number in range(-1, 42)] == [number in numbers for number in range(-1, 42)]
    assert Members(members.runs) == members


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_sets_of_the_same_numbers_are_equal(one, other):
    assert (Members.of(one) == Members.of(other)) == (one == other)


@given(st.sets(st.integers(0, 40)), st.integers(0, 40))
def test_a_number_is_added_and_removed(numbers, number):
    assert Members.of(numbers).plus(number) == Members.of(numbers | {number})
    assert Members.of(numbers | {number}).minus(number) == Members.of(numbers - {number})


def test_thousands_of_consecutive_numbers_are_one_run():
    assert Members.of(range(limits.MAX_MEMBERS)).runs == ((0, limits.MAX_MEMBERS),)
    assert NO_MEMBERS.runs == ()


@pytest.mark.parametrize(
    "runs",
    [
        *(((-1, 2),), ((0, 0),), ((0, limits.MAX_MEMBERS + 1),), ((limits.MAX_MEMBERS, 1),), ((True, 1),), ((0, 1.0),)),
        *((("0", 1),), ((0, 2), (1, 2)), ((0, 2), (2, 1)), ((4, 1), (0, 1))),
    ],
)
def test_unsound_runs_are_refused(runs):
    with pytest.raises(ProtocolError, match=r"members: expected ascending runs"):
        Members(runs)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([3], "3"),
        ([0, 1, 2], "0-2"),
        ([0, 2, 3, 7], "0, 2-3, 7"),
        (range(0, 16, 2), "0, 2, 4, 6, 8, 10, 12, 14"),
        (range(0, 18, 2), "0, 2, 4, 6, 8, 10, 12, 14 and others, 9 in all"),
    ],
)
def test_numbers_are_written_as_runs(members, text):
    assert str(Members.of(members)) == text
