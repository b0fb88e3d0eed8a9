"""The lifecycle table of a group is consistent."""

from itertools import product

import pytest

from server.group import lifecycle
from server.group.lifecycle import Event, GroupState, MemberState, Notice

TRANSITIONS = lifecycle.TRANSITIONS
REGISTERED = (MemberState.TAKES_PART, MemberState.PAUSED, MemberState.REJOINING)
GOING = {Event.LEAVES: MemberState.LEFT, Event.FAILS: MemberState.LEFT, Event.IS_LOST: MemberState.LOST}
COMING = (Event.ARRIVES, Event.RETURNS, Event.RETURNS_PAUSED)


def test_a_group_opens_once_and_a_broken_one_stays_broken():
    onward = {
        GroupState.FILLING: {GroupState.FILLING, GroupState.RECOVERING, GroupState.OPEN},
        GroupState.RECOVERING: {GroupState.RECOVERING, GroupState.OPEN, GroupState.BROKEN},
        GroupState.OPEN: {GroupState.OPEN, GroupState.BROKEN},
        GroupState.BROKEN: {GroupState.BROKEN},
    }
    for state in GroupState:
        assert {after.group for (_, group, *_), after in TRANSITIONS.items() if group is state} == onward[state]


@pytest.mark.parametrize("is_elastic", [False, True])
@pytest.mark.parametrize("group", GroupState)
def test_any_member_may_leave_and_any_process_may_join_at_any_time(is_elastic, group):
    for member, (event, after) in product(REGISTERED, GOING.items()):
        assert TRANSITIONS[is_elastic, group, event, member].member is after
    for member, event in product((MemberState.NEW, *REGISTERED), COMING):
        assert TRANSITIONS[is_elastic, group, event, member]


def test_a_member_that_ends_breaks_a_full_strict_group_unless_it_leaves_while_paused():
    for group, member, event in product((GroupState.RECOVERING, GroupState.OPEN), REGISTERED, GOING):
        transition = TRANSITIONS[False, group, event, member]
        may_go = member is MemberState.PAUSED and event is Event.LEAVES
        assert (transition.group, transition.notice) == (
            (group, Notice.DEPARTED) if may_go else (GroupState.BROKEN, Notice.BROKEN)
        )


def test_an_elastic_group_breaks_for_different_results_only():
    breaking = {
        event
        for (is_elastic, group, event, _), transition in TRANSITIONS.items()
        if is_elastic and group is not GroupState.BROKEN and transition.group is GroupState.BROKEN
    }
    assert breaking == {Event.RESULTS_DIFFER}


def test_waiting_members_learn_once_who_broke_the_group():
    for (_, group, *_), transition in TRANSITIONS.items():
        breaks = group is not GroupState.BROKEN and transition.group is GroupState.BROKEN
        assert breaks == (transition.notice is Notice.BROKEN)


def test_no_case_is_in_the_table_twice(monkeypatch):
    monkeypatch.setattr(lifecycle, "TABLE", f"{lifecycle.TABLE}{lifecycle.TABLE.strip().splitlines()[-1]}\n")
    with pytest.raises(ValueError, match="has two rows"):
        lifecycle._transitions()
