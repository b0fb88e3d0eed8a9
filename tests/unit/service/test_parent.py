"""A server with a parent: it ends with it, and when all members have left."""

import pytest

from server.network.parent_watch import PARTING_SECONDS, Parent


class Family:
    """A parent whose end is told."""

    def __init__(self, **given):
        self.number = 7
        self.has_had_members = False
        self.parent = Parent(7, lambda: self.number, **given)

    def is_over(self, now, has_members):
        self.has_had_members |= has_members
        return self.parent.needs_no_server(now, has_members=has_members, has_had_members=self.has_had_members)


def test_it_serves_while_its_parent_lives_and_nobody_has_come_yet():
    family = Family()
    assert not any(family.is_over(now, has_members=False) for now in (0.0, 1.0, 1e9))


def test_it_ends_when_all_members_have_left():
    family = Family()
    assert not family.is_over(0.0, has_members=True)
    assert not family.is_over(1.0, has_members=True)
    assert family.is_over(1.1, has_members=False)


@pytest.mark.parametrize("adopter", [1, 6])
def test_without_members_it_ends_with_its_parent(adopter):
    family = Family()
    assert not family.is_over(0.0, has_members=False)
    family.number = adopter
    assert family.is_over(0.1, has_members=False)


def test_members_have_a_few_seconds_to_leave_when_the_parent_has_ended():
    family = Family()
    assert not family.is_over(0.0, has_members=True)
    family.number = 1
    assert not family.is_over(10.0, has_members=True)
    assert not family.is_over(10.0 + PARTING_SECONDS - 0.1, has_members=True)
    assert family.is_over(10.0 + PARTING_SECONDS, has_members=True)


def test_it_does_not_wait_for_those_seconds_when_the_last_member_has_left():
    family = Family()
    family.is_over(0.0, has_members=True)
    family.number = 1
    assert not family.is_over(10.0, has_members=True)
    assert family.is_over(10.1, has_members=False)


def test_it_knows_a_parent_that_ended_before_it_looked():
    family = Family()
    family.number = 1
    assert family.is_over(0.0, has_members=False)


def test_it_ends_if_nobody_has_come_who_was_expected():
    family = Family(expected_until=10.0)
    assert not family.is_over(9.9, has_members=False)
    assert family.is_over(10.0, has_members=False)


def test_whoever_was_expected_and_came_may_stay():
    family = Family(expected_until=10.0)
    assert not family.is_over(9.9, has_members=True)
    assert not family.is_over(11.0, has_members=True)
    assert family.is_over(11.1, has_members=False)
