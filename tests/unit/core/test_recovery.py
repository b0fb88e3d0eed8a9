"""Members that a group awaits after a restart of the server."""

import numpy as np
import pytest

from server.group.membership import Membership
from server.group.recovery import RECONNECT_SECONDS
from statsd_bn import limits
from statsd_bn.errors import DuplicateMember, RegistrationRefused, ReplicaLost
from statsd_bn.members import NO_MEMBERS, Members
from statsd_bn.messages import Aggregate, Participation
from statsd_bn.round_key import RoundKey
from support.strategies import key, register

SILENCE = limits.SILENCE_SECONDS
SERVER = b"server-9"


def coming_back(member: int, **given):
    return register(member, 3, server=SERVER, **{"known": Members.of(range(3)), **given})


def recovering(*members: int, known=(0, 1, 3), min_members: int = 0) -> Membership:
    """A group of five to which `members` have returned at 10 s, each with `known` as its known members."""
    group = Membership(register(0, 5, min_members=min_members))
    for member in members:
        comes = register(member, 5, server=SERVER, min_members=min_members, known=Members.of(known))
        group.admit(10.0, comes, b"")
    return group


def test_a_known_member_is_awaited():
    assert recovering(0).absent == [1, 3]
    group = recovering(0, 3, 4)
    assert group.absent == [1]
    assert not group.advance(10.0)
    assert recovering(0, 1, 3).advance(10.0)


def test_a_member_that_has_left_an_elastic_group_is_no_longer_awaited():
    group = recovering(0, 1, min_members=1)
    group.remove(group.contributors[1], "")
    assert group.absent == [3]


def test_members_that_miss_the_deadline_are_no_longer_awaited():
    group = recovering(0, min_members=1)
    group.expire(10.0 + SILENCE - 0.01)
    assert group.absent == [1, 3]
    group.expire(10.0 + SILENCE)
    assert group.absent == []
    group.expire(10.0 + SILENCE)
    assert group.advance(10.0 + SILENCE)


def test_an_elastic_group_waits_for_unknown_members():
    group = recovering(0, 1, 3, min_members=1)
    assert not group.advance(10.0 + RECONNECT_SECONDS - 0.01)
    assert group.advance(10.0 + RECONNECT_SECONDS + 0.01)


def result(key: RoundKey) -> Aggregate:
    return Aggregate(key, 3, 3, Members.of(range(3)), np.ones((1, 1)))


def test_a_filling_group_recovers_once_a_member_of_an_open_group_registers():
    group = Membership(register(0, 3))
    for newcomer in (register(0, 3), coming_back(1, known=NO_MEMBERS)):
        group.admit(0.0, newcomer, b"")
        assert not group.is_recovering
    group.admit(0.0, coming_back(2), b"")
    assert group.is_recovering


def test_a_member_that_reports_late_that_it_was_in_the_group_is_no_newcomer():
    group = Membership(register(2, 3, min_members=1))
    group.admit(0.0, register(2, 3, min_members=1), b"")
    contributor = group.admit(0.0, coming_back(2, min_members=1, results=1), b"")
    assert (contributor.was_in_group, contributor.results_pending) == (True, True)
    group.record_result(contributor, result(key(step=3)))
    for member in (0, 1):
        group.admit(0.0, coming_back(member, min_members=1, step=4), b"")
    assert group.advance(RECONNECT_SECONDS)
    assert contributor.first_step == 0, "a newcomer would begin after the others"


def test_a_member_owes_the_results_that_it_has_announced():
    group = Membership(coming_back(0))
    contributor = group.admit(0.0, coming_back(0, results=2), b"")
    assert contributor.results_pending
    for layer in ("bn", "bn", "bn2"):
        assert contributor.results_pending
        group.record_result(contributor, result(key(layer, step=4)))
    assert not contributor.results_pending
    assert group.latest_step == 4


def test_a_present_member_that_owes_results_is_missing():
    group = Membership(coming_back(0))
    for member in range(3):
        group.admit(0.0, coming_back(member, results=int(member == 1)), b"")
    assert not group.advance(0.0)
    assert (group.missing, group.absent) == (1, [1])
    group.record_result(group.contributors[1], result(key()))
    assert group.advance(0.0)
    assert (group.is_open, group.missing, group.is_recovering) == (True, 0, False)


def test_a_newcomer_to_a_group_that_has_not_been_restarted_owes_nothing():
    group = Membership(register(0, 1))
    assert not group.admit(0.0, register(0, 1, results=2), b"").results_pending


def test_members_that_do_not_return_break_a_strict_group():
    group = Membership(coming_back(0))
    group.admit(0.0, coming_back(0, step=5), b"")
    group.expire(SILENCE - 0.01)
    assert group.lost is None
    group.expire(SILENCE)
    assert isinstance(group.lost, ReplicaLost)
    assert str(group.lost) == (
        "ranks 1-2 did not reconnect after the server was restarted\n  in job 'job', group 'world', step 5"
    )
    assert (group.lost.fields["member"], group.lost.fields["step"]) == (1, 5)
    assert not group.advance(SILENCE)


def test_a_member_that_leaves_while_others_return_breaks_a_strict_group():
    group = Membership(coming_back(0))
    contributor = group.admit(0.0, coming_back(0), b"")
    assert group.remove(contributor, "boom") is group.lost
    assert "rank 0 (place 0) failed with boom" in str(group.lost)
    group.expire(SILENCE)
    assert "rank 0 (place 0) failed with boom" in str(group.lost), "a late member is not the culprit"


@pytest.mark.parametrize(
    ("comes", "error"),
    [
        (register(1, 2, server=SERVER, step=1, known=Members.of(range(2))), RegistrationRefused),
        (register(0, 2, session=b"another-", server=SERVER, known=Members.of(range(2))), DuplicateMember),
    ],
    ids=["refused", "its rank is taken"],
)
def test_a_refused_member_begins_no_recovery(comes, error):
    """A recovery would open the group with its only member, because no missing member would be known."""
    group = Membership(register(0, 2))
    group.admit(0.0, register(0, 2), b"")
    with pytest.raises(error):
        group.admit(0.0, comes, b"")
    assert not group.is_recovering
    assert not group.advance(1.0)


@pytest.mark.parametrize("far", [{"step": 1}, {"results": 1}])
@pytest.mark.parametrize("new", [{}, {"server": SERVER}])
@pytest.mark.parametrize("first", ["far", "new"])
def test_members_with_results_refuse_a_process_that_took_part_in_no_round(far, new, first):
    group = Membership(register(0, 2))
    old = register(0, 2, server=SERVER, known=Members.of(range(2)), **far)
    both = [old, register(1, 2, **new)]
    one, other = both if first == "far" else reversed(both)
    group.admit(0.0, one, b"")
    with pytest.raises(RegistrationRefused, match="has taken part in no round"):
        group.admit(0.0, other, b"")


def test_a_member_that_returns_for_an_abandoned_pass_is_refused():
    group = Membership(coming_back(0, step=5, known=Members.of([0])))
    for comes in (
        coming_back(0, step=5, known=Members.of([0])),
        coming_back(1, step=5, participation=int(Participation.PAUSED)),
    ):
        contributor = group.admit(0.0, comes, b"")
    group.remove(contributor, "")
    assert group.departed
    with pytest.raises(ReplicaLost):
        group.admit(0.1, coming_back(2, step=5, participation=int(Participation.REJOINING)), b"")
    assert set(group.contributors) == {0}


# A member that asks to rejoin, and has missed the start of the pass.


def in_a_pass(*members: int) -> Membership:
    """An elastic group in which `members` have started a pass at step 1, and member 2 waits to rejoin."""
    group = Membership(coming_back(2, min_members=1))
    group.admit(0.0, coming_back(2, min_members=1, participation=int(Participation.REJOINING)), b"")
    for member in members:
        group.admit(0.0, coming_back(member, min_members=1, step=1, first_step=1), b"")
    return group


def test_a_newcomer_does_not_exclude_a_late_member_from_the_pass():
    group = in_a_pass(0)
    newcomer = group.admit(0.0, register(1, 3, min_members=1), b"")
    assert group.advance(RECONNECT_SECONDS)
    assert newcomer.first_step == 2
    assert group.participants(1) == [2, 0]
