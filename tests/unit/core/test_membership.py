import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.group.contributor import Contributor
from server.group.membership import Membership
from statsd_bn.errors import ReplicaLost, WorldSizeMismatch
from statsd_bn.members import Members, format_ranks
from statsd_bn.messages import Register
from statsd_bn.text import log_line
from support.strategies import register


@pytest.fixture
def group() -> Membership:
    return Membership(register(0, 3))


def admit(group: Membership, register: Register, peer: bytes) -> Contributor:
    contributor = group.admit(0.0, register, peer)
    group.advance(0.0)
    return contributor


def admit_all(group: Membership) -> None:
    for member in range(group.world_size):
        admit(group, register(member, group.world_size), b"peer %d" % member)


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
            assert (name == "world" and number >= size) or format_ranks(Members.of(fit)) in str(caught.value)
            assert caught.value.fields["got"] > caught.value.fields["expected"] == size
        assert list(group.present) == sorted(fit)
        assert (group.missing, group.is_open) == (size - len(fit), len(fit) == size)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("", "rank 1 (place 1) left before the others finished; for data of different lengths see client.join"),
        ("MemoryError: full", "failed with MemoryError: full"),
    ],
)
def test_leaving_an_open_group_breaks_it_with_the_cause(group, cause, reason):
    admit_all(group)
    group.record_reported_step(7)
    assert group.remove(group.contributors[1], cause) is group.lost
    assert isinstance(group.lost, ReplicaLost)
    assert reason in log_line(group.lost)
    assert "step 7" in str(group.lost)
    assert group.lost.fields == {"job": "job", "group": "world", "member": 1, "step": 7, "cause": cause}


def test_the_first_loss_is_reported(group):
    admit_all(group)
    group.remove(group.contributors[1], "boom")
    first = group.lost
    group.remove(group.contributors[2], "because of that")
    assert group.lost is first
