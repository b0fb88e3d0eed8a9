"""Admission: decides which processes may join a group, and makes the errors of refusals."""

from collections.abc import Mapping
from typing import Protocol

from server.group import lifecycle
from server.group.contributor import Contributor
from server.group.lifecycle import Event, GroupState, MemberState, Notice, Policy, Transition
from statsd_bn.errors import DuplicateMember, RegistrationRefused, ReplicaLost, StatsdBNError, WorldSizeMismatch
from statsd_bn.members import Members, format_ranks
from statsd_bn.messages import WORLD, Register
from statsd_bn.text import error_text


class Group(Protocol):
    """The part of `server.group.membership.Membership` that admission uses."""

    job: str
    group: str
    world_size: int
    min_members: int
    policy: Policy
    state: GroupState
    departed: ReplicaLost | None

    @property
    def name(self) -> str:
        """Display name of the group."""

    @property
    def contributors(self) -> Mapping[int, Contributor]:
        """Members by member number."""

    @property
    def present(self) -> Members:
        """Members that are registered."""

    @property
    def is_elastic(self) -> bool:
        """Whether the group continues after a loss."""

    @property
    def break_error(self) -> StatsdBNError:
        """The error that broke the group."""

    @property
    def departure_error(self) -> ReplicaLost:
        """The error of the member that left while it was paused."""


def check(group: Group, register: Register) -> Contributor | None:
    """Registered member of a repeated registration; None for a newcomer that may join.

    Raises:
        ReplicaLost: the group is broken, or the member was considered lost.
        WorldSizeMismatch: the world sizes differ, or the group is full.
        RegistrationRefused: the policies differ, or some members continue a run and others start one.
        DuplicateMember: another process is registered with this rank.
    """
    contributor = group.contributors.get(register.member)
    state = contributor.state if contributor else MemberState.NEW
    transition = lifecycle.transition(group.policy, group.state, lifecycle.arrival(register), state)
    if transition.notice is Notice.REFUSED_BROKEN:
        raise group.break_error
    _check_terms(group, register)
    if contributor and contributor.session != register.session:
        raise _duplicate(group, register, contributor)
    if contributor is None:
        _check_newcomer(group, register, transition)
    return contributor


def _check_terms(group: Group, register: Register) -> None:
    if register.world_size != group.world_size:
        raise _mismatch(
            group,
            register,
            f"expected world_size {group.world_size}, as {format_ranks(group.present)} asked for, "
            f"got {register.world_size}",
            register.world_size,
        )
    if register.min_members != group.min_members:
        raise RegistrationRefused(
            f"{group.name}: expected policy {_policy(group.min_members)}, as {format_ranks(group.present)} asked "
            f"for, got {_policy(register.min_members)} from rank {register.member} ({register.place})"
        )


def _check_newcomer(group: Group, register: Register, transition: Transition) -> None:
    if lifecycle.change(register, one_left=group.departed is not None) is Event.CANNOT_REJOIN:
        raise group.departure_error
    if transition.notice is Notice.REFUSED_LATE:
        raise too_late_error(register)
    if group.is_elastic:
        if transition.group is GroupState.OPEN:
            _check_joiner(group, register)
        # A newcomer to a recovering elastic group may be a former member that no returned member knows.
        if transition.group is not GroupState.FILLING:
            return
    else:
        _check_same_start(group, register)
    _check_vacancy(group, register, transition)


def _check_joiner(group: Group, register: Register) -> None:
    if group.group != WORLD:
        raise RegistrationRefused(
            f"{group.name}: expected one of the ranks that it began with, got rank {register.member} "
            f"({register.place}); newcomers join the group {WORLD!r} only"
        )


def _check_same_start(group: Group, register: Register) -> None:
    """Refuse to mix members that continue a run after a server restart with members that start one."""
    if _is_neutral(register):
        return
    # The members present are consistent, so the first one that is not neutral represents them.
    other = next((contributor for contributor in group.contributors.values() if not _is_neutral(contributor)), None)
    if other and other.has_started != register.has_started:
        older, newer = (other, register) if other.has_started else (register, other)
        raise RegistrationRefused(
            f"{group.name}: rank {older.member} ({older.place}) is at step "
            f"{older.step}, and rank {newer.member} ({newer.place}) has taken part in no round; all ranks "
            "of a strict group begin together. Begin a new run, with a later epoch or another job name"
        )


def _is_neutral(member: Contributor | Register) -> bool:
    """Whether a member was in the open group but has had no round, so that it fits both kinds."""
    return member.was_in_group and not member.has_started


def _check_vacancy(group: Group, register: Register, transition: Transition) -> None:
    number = register.member
    if group.group == WORLD and not group.is_elastic and number >= group.world_size:
        raise _mismatch(
            group,
            register,
            f"expected a number in [0, {group.world_size}), as {format_ranks(group.present)} asked for, got {number}",
            number + 1,
        )
    if len(group.contributors) == group.world_size or transition.notice is Notice.REFUSED_FULL:
        raise _mismatch(
            group,
            register,
            f"expected {group.world_size} ranks, and {format_ranks(group.present)} registered, got one more",
            group.world_size + 1,
        )


def _duplicate(group: Group, register: Register, contributor: Contributor) -> DuplicateMember:
    return DuplicateMember(
        error_text(
            f"there is a rank {register.member} already: {contributor.place} is registered, "
            f"{register.place} was refused",
            where=group.name,
            advice="Give every process its own RANK, or every run its own job name.",
        ),
        job=group.job,
        group=group.group,
        member=register.member,
        place=contributor.place,
    )


def _mismatch(group: Group, register: Register, reason: str, got: int) -> WorldSizeMismatch:
    return WorldSizeMismatch(
        error_text(f"{reason} from rank {register.member} ({register.place})", where=group.name),
        job=group.job,
        group=group.group,
        member=register.member,
        expected=group.world_size,
        got=got,
    )


def too_late_error(register: Register) -> ReplicaLost:
    """Error of a member that returns after the others continued without it."""
    return ReplicaLost(
        error_text(
            f"rank {register.member} ({register.place}) came back too late after the server was restarted; the others "
            "have gone on without it",
            where=f"job {register.job!r}, group {register.group!r}, step {register.step}",
        ),
        job=register.job,
        group=register.group,
        member=register.member,
        step=register.step,
        cause="came back too late",
    )


def _policy(min_members: int) -> str:
    return f'"elastic" with min_members {min_members}' if min_members else '"strict"'
