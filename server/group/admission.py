"""Admission: who may come into a group, and who is told why not."""

from collections.abc import Mapping
from typing import Protocol

from server.group.recovery import Recovery
from server.group.slave import Slave
from statsd_bn.errors import DuplicateMember, RegistrationRefused, ReplicaLost, StatsdBNError, WorldSizeMismatch
from statsd_bn.members import Members
from statsd_bn.messages import WORLD, Register, Stand


class Group(Protocol):
    """What is asked of a group; `server.group.membership.Membership` is one."""

    job: str
    group: str
    world_size: int
    min_members: int
    is_open: bool
    lost: StatsdBNError | None
    departed: ReplicaLost | None
    recovery: Recovery | None

    @property
    def name(self) -> str:
        """As people call it."""

    @property
    def slaves(self) -> Mapping[int, Slave]:
        """By member number."""

    @property
    def present(self) -> Members:
        """Who is registered."""

    @property
    def is_elastic(self) -> bool:
        """Whether it goes on when a member is lost."""


def check(group: Group, register: Register) -> Slave | None:
    """Returns who registers again; None for a newcomer who may come in.

    Raises:
        ReplicaLost: the group is broken, or the member was taken for lost.
        WorldSizeMismatch: the member expects another number of members, or is one too many.
        RegistrationRefused: the member's policy is another; some members are far into a run that others have not begun.
        DuplicateMember: another process is this member already.
    """
    if group.lost:
        raise group.lost
    _check_terms(group, register)
    slave = group.slaves.get(register.member)
    if slave and slave.session != register.session:
        raise _duplicate(group, register, slave)
    if slave is None:
        _check_newcomer(group, register)
    return slave


def _check_terms(group: Group, register: Register) -> None:
    if register.world_size != group.world_size:
        raise _mismatch(
            group,
            register,
            f"expected world_size {group.world_size}, as members {list(group.present)} have it, "
            f"got {register.world_size}",
            register.world_size,
        )
    if register.min_members != group.min_members:
        raise RegistrationRefused(
            f"{group.name}: expected policy {_policy(group.min_members)}, as members {list(group.present)} have it, "
            f"got {_policy(register.min_members)} from member {register.member} ({register.place})"
        )


def _check_newcomer(group: Group, register: Register) -> None:
    if register.stand == Stand.BACK and group.departed:
        raise group.departed
    if group.is_open and group.is_elastic:
        _check_joiner(group, register)
        return
    if not group.is_elastic:
        _check_past(group, register)
    if not (group.is_elastic and (group.recovery or register.has_past)):
        _check_room(group, register)


def _check_joiner(group: Group, register: Register) -> None:
    if register.has_past:
        raise too_late(register)
    if group.group != WORLD:
        raise RegistrationRefused(
            f"{group.name}: expected one of the members that it began with, got member {register.member} "
            f"({register.place}); newcomers join the group {WORLD!r} only"
        )


def _check_past(group: Group, register: Register) -> None:
    """After a restart of the master its members tell it how far they are; a newcomer cannot be among them."""
    for slave in group.slaves.values():
        older, newer = (slave, register) if slave.has_begun else (register, slave)
        if older.has_begun and not (newer.has_begun or newer.has_past):
            raise RegistrationRefused(
                f"{group.name}: member {older.member} ({older.place}) is at step "
                f"{older.step}, and member {newer.member} ({newer.place}) has taken part in no round; all members "
                "of a strict group begin together. Begin a new run, with a later epoch or another job name"
            )


def _check_room(group: Group, register: Register) -> None:
    number = register.member
    if group.group == WORLD and not group.is_elastic and number >= group.world_size:
        raise _mismatch(
            group,
            register,
            f"expected a number in [0, {group.world_size}), as members {list(group.present)} have it, got {number}",
            number + 1,
        )
    # One that was away when the server was restarted was not waited for.
    was_away = register.has_past and register.stand != Stand.TAKES_PART
    if len(group.slaves) == group.world_size or (group.is_open and not was_away):
        raise _mismatch(
            group,
            register,
            f"expected {group.world_size} members, and {list(group.present)} are there, got one more",
            group.world_size + 1,
        )


def _duplicate(group: Group, register: Register, slave: Slave) -> DuplicateMember:
    return DuplicateMember(
        f"{group.name} already has a member {register.member}: "
        f"{slave.place} is registered, {register.place} was refused. Give every process its own RANK, "
        "or every run its own job name",
        job=group.job,
        group=group.group,
        member=register.member,
        place=slave.place,
    )


def _mismatch(group: Group, register: Register, reason: str, got: int) -> WorldSizeMismatch:
    return WorldSizeMismatch(
        f"{group.name}: {reason} from member {register.member} ({register.place})",
        job=group.job,
        group=group.group,
        member=register.member,
        expected=group.world_size,
        got=got,
    )


def too_late(register: Register) -> ReplicaLost:
    """Returns the error of a member that comes back when the others have done without it."""
    return ReplicaLost(
        f"job {register.job!r}, group {register.group!r}, step {register.step}: member {register.member} "
        f"({register.place}) came back too late after the server was restarted; the others have gone on without it",
        job=register.job,
        group=register.group,
        member=register.member,
        step=register.step,
        cause="came back too late",
    )


def _policy(min_members: int) -> str:
    return f'"elastic" with min_members {min_members}' if min_members else '"strict"'
