"""A server with a parent ends with its parent, and when all members have left."""

from types import SimpleNamespace

import pytest

from server.network.service import ORPHAN_SECONDS, Parent

OURS, INIT, SUBREAPER = 7, 1, 6
MEMBERS, NOBODY = True, False
SERVES, ENDS = False, True

# Timelines: time of a check, the server's parent, whether there are members, and whether the server ends.
HISTORIES = {
    "nobody has come yet": [(now, OURS, NOBODY, SERVES) for now in (0.0, 1.0, 1e9)],
    "all members leave": [(0.0, OURS, MEMBERS, SERVES), (1.0, OURS, MEMBERS, SERVES), (1.1, OURS, NOBODY, ENDS)],
    "the parent ends and init adopts": [(0.0, OURS, NOBODY, SERVES), (0.1, INIT, NOBODY, ENDS)],
    "the parent ends and a subreaper adopts": [(0.0, OURS, NOBODY, SERVES), (0.1, SUBREAPER, NOBODY, ENDS)],
    "members stay after the parent": [
        (0.0, OURS, MEMBERS, SERVES),
        (10.0, INIT, MEMBERS, SERVES),
        (10.0 + ORPHAN_SECONDS - 0.1, INIT, MEMBERS, SERVES),
        (10.0 + ORPHAN_SECONDS, INIT, MEMBERS, ENDS),
    ],
    "members leave soon after the parent": [
        (0.0, OURS, MEMBERS, SERVES),
        (10.0, INIT, MEMBERS, SERVES),
        (10.1, INIT, NOBODY, ENDS),
    ],
    "the parent ended before the first check": [(0.0, INIT, NOBODY, ENDS)],
}

EXPECTED_UNTIL = 10.0
HISTORIES_WHERE_MEMBERS_ARE_EXPECTED = {
    "nobody comes": [(9.9, OURS, NOBODY, SERVES), (10.0, OURS, NOBODY, ENDS)],
    "members come": [(9.9, OURS, MEMBERS, SERVES), (11.0, OURS, MEMBERS, SERVES), (11.1, OURS, NOBODY, ENDS)],
}


def check(history, **given):
    present, has_had_members = SimpleNamespace(parent=OURS), False
    parent = Parent(OURS, lambda: present.parent, **given)
    for now, present.parent, has_members, ends in history:
        has_had_members |= has_members
        found = parent.should_exit(now, has_members=has_members, has_had_members=has_had_members)
        assert found is ends, now


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_a_server_serves_as_long_as_its_parent_or_its_members_need_it(history):
    check(history)


@pytest.mark.parametrize(
    "history", HISTORIES_WHERE_MEMBERS_ARE_EXPECTED.values(), ids=HISTORIES_WHERE_MEMBERS_ARE_EXPECTED
)
def test_a_server_ends_if_no_expected_member_has_registered(history):
    check(history, expected_until=EXPECTED_UNTIL)
