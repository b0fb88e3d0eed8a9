"""Members whose models differ, in processes, through a real server: all are told what differs, long before a deadline.

How long it takes is measured by `benchmarks/faults`; here it is only not the deadline, which is 30 seconds.
"""

import re

import pytest

from programs import mismatch_programs
from programs.mismatch_programs import Outcome
from statsd_bn.errors import RoundMismatch

MEMBERS = 3
SOON = 10.0


def told(outcomes: list[Outcome]) -> list[RoundMismatch]:
    """The errors; everybody has one, and had it soon."""
    assert [type(outcome.error) for outcome in outcomes] == [RoundMismatch] * len(outcomes)
    assert max(outcome.told for outcome in outcomes) - min(outcome.began for outcome in outcomes) < SOON
    return [outcome.error for outcome in outcomes]


@pytest.mark.parametrize(
    ("odd", "others_wait", "odd_one_waits"),
    [
        (mismatch_programs.other_order, ("first", 0, "forward"), ("second", 0, "forward")),
        (mismatch_programs.one_skipped, ("second", 0, "forward"), ("third", 0, "forward")),
        (mismatch_programs.one_forward_more, ("third", 0, "backward"), ("first", 1, "forward")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_member_that_runs_other_layers_is_shown_to_everybody(members, odd, others_wait, odd_one_waits):
    step = mismatch_programs.STEPS
    for member, error in enumerate(told(members(MEMBERS, mismatch_programs.last_member_differs, odd))):
        rows = [line for line in str(error).splitlines() if line.startswith("  rank ")]
        for rank, row in enumerate(rows):
            layer, call, phase = odd_one_waits if rank == MEMBERS - 1 else others_wait
            where = rf"{phase} of {layer}(, call {call})?, step {step}"
            assert re.fullmatch(rf"  rank {rank} \(.*\)  waits [\d.]+ s  in {where}", row)
        assert len(rows) == MEMBERS
        mine = odd_one_waits if member == MEMBERS - 1 else others_wait
        assert (error.fields["layer"], error.fields["call"], error.fields["phase"]) == mine
        assert [row["members"] for row in error.fields["table"]] == [[0, 1], [2]]


def test_a_member_that_never_uses_a_group_is_shown_to_those_who_wait_for_it(members):
    for error in told(members(MEMBERS, mismatch_programs.all_but_the_last_wait_for_a_group)):
        first, second, third = (line for line in str(error).splitlines() if line.startswith("  rank "))
        for rank, row in enumerate((first, second)):
            assert re.fullmatch(rf"  rank {rank} \(.*\)  waits [\d.]+ s  for group 'paired' to open", row)
        assert re.fullmatch(r"  rank 2 \(.*\)  waits [\d.]+ s  in forward of first, step 1, group 'world'", third)
