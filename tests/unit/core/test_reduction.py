import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

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


def test_no_row_at_all_has_no_sum():
    with pytest.raises(ValueError, match="not enough values"):
        sum_in_order([])
