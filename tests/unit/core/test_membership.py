import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.membership.contributor import Contributor
from server.membership.membership import Membership
from statsd_bn.error_text import in_log
from statsd_bn.errors import DuplicateMember, ReplicaLost, WorldSizeMismatch
from statsd_bn.messages import Register
from support.strategies import register


@pytest.fixture
def group() -> Membership:
    return Membership(register(0, 3))


def admit(group: Membership, register: Register, peer: bytes) -> Contributor:
    contributor = group.admit(0.0, register, peer)
    group.settle(0.0)
    return contributor


def admit_all(group: Membership) -> None:
    for member in range(group.world_size):
        admit(group, register(member, group.world_size), b"peer %d" % member)


def test_a_group_opens_when_all_members_have_registered(group):
    seen = []
    for member in (2, 0, 1):
        admit(group, register(member, 3), b"")
        seen.append((group.is_open, group.missing, list(group.present)))
    assert seen == [(False, 2, [2]), (False, 1, [0, 2]), (True, 0, [0, 1, 2])]


@given(st.sampled_from(["world", "pair"]), st.integers(1, 4), st.lists(st.integers(0, 5), max_size=12))
def test_a_group_takes_the_members_it_has_room_for_and_no_other(name, size, numbers):
    group = Membership(register(0, size, group=name))
    fit: list[int] = []
    for number in numbers:
        fits = number in fit or (len(fit) < size and (name != "world" or number < size))
        if fits:
            admit(group, register(number, size, group=name), b"")
            fit += [number] * (number not in fit)
        else:
            with pytest.raises(WorldSizeMismatch, match=re.escape(f"rank {number} (place {number})")) as caught:
                admit(group, register(number, size, group=name), b"")
            assert str(sorted(fit)) in str(caught.value)
            assert caught.value.fields["got"] > caught.value.fields["expected"] == size
        assert list(group.present) == sorted(fit)
        assert (group.missing, group.is_open) == (size - len(fit), len(fit) == size)


def test_a_slave_is_what_its_member_said(group):
    contributor = admit(group, register(1, 3, deadline=12.0, place="host 7"), b"peer")
    assert (contributor.member, contributor.deadline, contributor.place) == (1, 12.0, "host 7")
    assert (contributor.peer, contributor.replicas) == (b"peer", 0)
    assert str(contributor) == "rank 1 (host 7)"


def test_the_same_session_is_found_again_at_its_new_peer(group):
    contributor = admit(group, register(1, 3), b"old")
    assert admit(group, register(1, 3), b"new") is contributor
    assert contributor.peer == b"new"
    assert list(group.present) == [1]


def test_another_process_cannot_take_a_members_place(group):
    contributor = admit(group, register(1, 3, place="host 1"), b"first")
    with pytest.raises(DuplicateMember) as caught:
        admit(group, register(1, 3, session=b"stranger", place="host 2"), b"second")
    assert "there is a rank 1 already: host 1 is registered, host 2 was refused" in str(caught.value)
    assert "RANK" in str(caught.value)
    assert caught.value.fields == {"job": "job", "group": "world", "member": 1, "place": "host 1"}
    assert group.contributors == {1: contributor}
    assert contributor.peer == b"first"


def test_a_member_that_expects_another_number_of_members_is_refused(group):
    admit(group, register(1, 3), b"")
    with pytest.raises(WorldSizeMismatch) as caught:
        admit(group, register(0, 4, place="host 2"), b"")
    assert "expected world_size 3, as ranks [1] have it, got 4 from rank 0 (host 2)" in str(caught.value)
    assert caught.value.fields == {"job": "job", "group": "world", "member": 0, "expected": 3, "got": 4}
    assert list(group.present) == [1]


def test_the_world_counts_its_members_from_0(group):
    admit(group, register(2, 3), b"")
    with pytest.raises(WorldSizeMismatch) as caught:
        admit(group, register(3, 3, place="host 2"), b"")
    expected = "expected a number in [0, 3), as ranks [2] have it, got 3 from rank 3 (host 2)"
    assert expected in str(caught.value)
    assert caught.value.fields == {"job": "job", "group": "world", "member": 3, "expected": 3, "got": 4}
    assert list(group.present) == [2]


def test_any_other_group_takes_whoever_names_it_until_it_is_full():
    group = Membership(register(0, 2, group="pair"))
    for member in (9, 4):
        admit(group, register(member, 2, group="pair"), b"")
    assert (group.is_open, list(group.present)) == (True, [4, 9])
    with pytest.raises(WorldSizeMismatch) as caught:
        admit(group, register(0, 2, group="pair", place="host 2"), b"")
    assert "expected 2 ranks, and [4, 9] are there, got one more from rank 0 (host 2)" in str(caught.value)
    assert caught.value.fields == {"job": "job", "group": "pair", "member": 0, "expected": 2, "got": 3}
    assert admit(group, register(9, 2, group="pair"), b"new").peer == b"new"


def test_leaving_before_the_group_is_open_frees_the_place(group):
    contributor = admit(group, register(1, 3), b"")
    group.remove(contributor, "")
    assert group.lost is None
    assert (group.missing, list(group.present)) == (3, [])
    admit(group, register(1, 3, session=b"stranger"), b"")
    assert (group.missing, list(group.present)) == (2, [1])


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("", "rank 1 (place 1) left while others went on; for data of different lengths see client.join"),
        ("MemoryError: full", "failed with MemoryError: full"),
    ],
)
def test_leaving_an_open_group_breaks_it_with_the_cause(group, cause, reason):
    admit_all(group)
    group.contributors[1].step = 7
    assert group.remove(group.contributors[1], cause) is group.lost
    assert isinstance(group.lost, ReplicaLost)
    assert reason in in_log(group.lost)
    assert "step 7" in str(group.lost)
    assert group.lost.fields == {"job": "job", "group": "world", "member": 1, "step": 7, "cause": cause}


def test_a_member_lost_without_a_word_breaks_an_open_group(group):
    admit_all(group)
    contributor = group.contributors[1]
    assert group.lose(contributor, "the connection was lost") is group.lost
    assert "rank 1 (place 1) was lost: the connection was lost" in str(group.lost)
    assert group.lost.fields["cause"] == "the connection was lost"


def test_a_member_lost_before_the_group_is_open_may_come_back(group):
    contributor = admit(group, register(1, 3), b"")
    assert group.lose(contributor, "the connection was lost") is None
    assert (group.lost, list(group.present)) == (None, [])
    assert admit(group, register(1, 3), b"").member == 1


def test_the_first_loss_is_the_one_that_is_told(group):
    admit_all(group)
    group.remove(group.contributors[1], "boom")
    first = group.lost
    group.remove(group.contributors[2], "because of that")
    assert group.lost is first


def test_a_broken_group_takes_nobody_in_not_even_again(group):
    admit_all(group)
    group.remove(group.contributors[1], "boom")
    for newcomer in (register(1, 3), register(0, 3), register(1, 3, session=b"stranger")):
        with pytest.raises(ReplicaLost, match="boom"):
            admit(group, newcomer, b"")


def test_an_open_group_stays_open_for_members_that_register_again(group):
    admit_all(group)
    admit(group, register(2, 3), b"new")
    assert group.is_open
    assert group.missing == 0
