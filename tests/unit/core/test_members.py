import pytest
from hypothesis import given
from hypothesis import strategies as st

from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.members import NO_MEMBERS, Members


@given(st.sets(st.integers(0, 40)))
def test_a_set_of_numbers_is_what_went_in(numbers):
    members = Members.of(numbers)
    assert list(members) == sorted(numbers)
    assert len(members) == len(numbers)
    assert [number in members for number in range(-1, 42)] == [number in numbers for number in range(-1, 42)]
    assert Members(members.runs) == members


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_equal_are_those_of_the_same_numbers(one, other):
    assert (Members.of(one) == Members.of(other)) == (one == other)


@given(st.sets(st.integers(0, 40)), st.integers(0, 40))
def test_a_number_comes_and_goes(numbers, number):
    assert Members.of(numbers).plus(number) == Members.of(numbers | {number})
    assert Members.of(numbers | {number}).minus(number) == Members.of(numbers - {number})


def test_thousands_in_a_row_are_one_run():
    assert Members.of(range(limits.MAX_MEMBERS)).runs == ((0, limits.MAX_MEMBERS),)
    assert NO_MEMBERS.runs == ()


@pytest.mark.parametrize(
    "runs",
    [
        ((-1, 2),),
        ((0, 0),),
        ((0, limits.MAX_MEMBERS + 1),),
        ((limits.MAX_MEMBERS, 1),),
        ((True, 1),),
        ((0, 1.0),),
        (("0", 1),),
        ((0, 2), (1, 2)),
        ((0, 2), (2, 1)),
        ((4, 1), (0, 1)),
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
