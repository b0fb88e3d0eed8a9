"""Membership: the members of a group, who may join it, and their first steps.

`server.group.lifecycle` has the table of events and results. This module detects the events and keeps the members.
"""

from typing import Any

from server.group import lifecycle
from server.group.contributor import Contributor
from server.group.lifecycle import Event, GroupState, MemberState, Notice, Transition
from server.group.recovery import RECONNECT_SECONDS, RecoveredResults
from statsd_bn import limits
from statsd_bn.errors import DuplicateMember, RegistrationRefused, ReplicaLost, StatsdBNError, WorldSizeMismatch
from statsd_bn.members import NO_MEMBERS, Members, format_ranks
from statsd_bn.messages import WORLD, Aggregate, Participation, Register
from statsd_bn.text import error_text, log_line

# Causes of the loss of a member that returned to a restarted server: the group had dropped it before, or the results
# that it announced did not arrive.
OVERTAKEN = "the others had continued without it before the server restarted"
INCOMPLETE = "its results did not arrive after the server restarted"


class Membership:
    """The members of one epoch of a group; all state changes follow the table of `server.group.lifecycle`."""

    def __init__(self, register: Register, silence: float = limits.SILENCE_SECONDS) -> None:
        self.job, self.group = register.job, register.group
        self.name = f"job {self.job!r}, group {self.group!r}"
        self.world_size, self.min_members = register.world_size, register.min_members
        self.is_elastic = register.min_members > 0
        self.state = GroupState.FILLING
        self.has_opened = False  # it is open, or was before it broke
        self.lost: StatsdBNError | None = None  # the error that broke the group
        self.lost_by: dict[str, Any] | None = None  # the member whose end broke it, for the report
        # The error of a paused member that left a strict group: the others can never rejoin completely.
        self.departed: ReplicaLost | None = None
        self.notices: list[tuple[Notice, StatsdBNError]] = []  # pending
        self.contributors: dict[int, Contributor] = {}
        self.present = NO_MEMBERS  # cached, because each newcomer to a large group receives them
        self.latest_step = 0  # highest of any contribution
        self.reported_step = 0  # highest of any contribution or report, since some rounds bypass the server
        self.expected: set[int] = set()  # in a recovering group: the returned members, and the members known to them
        self.recovered = RecoveredResults()
        self._recovering_since = 0.0
        self._silence = silence

    @property
    def is_open(self) -> bool:
        """Whether the group has rounds."""
        return self.state is GroupState.OPEN

    @property
    def is_filling(self) -> bool:
        """Whether the group waits for its members to register, and was not open before a restart of the server."""
        return self.state is GroupState.FILLING

    @property
    def is_recovering(self) -> bool:
        """Whether the group waits for its former members after a restart of the server."""
        return self.state is GroupState.RECOVERING

    @property
    def has_quorum(self) -> bool:
        """Whether the group has enough members to complete a round."""
        return len(self.contributors) >= self.min_members

    @property
    def missing(self) -> int:
        """Number of members that the group waits for before it opens."""
        if self.is_filling:
            return self.world_size - len(self.contributors)
        # Members wait for the end of a recovery even if all expected members are present.
        return max(1, len(self.absent)) if self.is_recovering else 0

    def step_of(self, contributor: Contributor) -> int:
        """Current step of a member: participants of a strict group are all in the latest step."""
        is_in_lockstep = contributor.state is MemberState.TAKES_PART and not self.is_elastic
        return self.reported_step if is_in_lockstep else max(contributor.step, contributor.reported_step)

    @property
    def absent(self) -> list[int]:
        """Members that have not reconnected after a server restart, or have results pending."""
        return sorted(self.expected.difference(m for m, one in self.contributors.items() if not one.results_pending))

    @property
    def _former_participants(self) -> list[Contributor]:
        """Members that took part before a server restart, and still do."""
        return [one for one in self.contributors.values() if one.was_in_group and one.state is MemberState.TAKES_PART]

    def missing_for(self, contributor: Contributor) -> tuple[int, Members]:
        """Number of members that a member waits for, and the members present."""
        if not self.is_open or contributor.state is not MemberState.REJOINING:
            return self.missing, self.present
        back = Members.of(one.member for one in self.rejoining)
        # A rejoining member waits for the start of the pass, even if all others have returned.
        return max(1, self._size - len(back)), back

    @property
    def rejoining(self) -> list[Contributor]:
        """Members of an open group that have returned from a pass and wait for the others."""
        there = self.contributors.values() if self.is_open else ()
        return [one for one in there if one.state is MemberState.REJOINING]

    def pause_rejoining(self) -> list[Contributor]:
        """Pause the rejoining members again, because the others will not return; returns the paused members."""
        paused = self.rejoining
        for contributor in paused:
            contributor.state = self._apply(Event.PAUSES, contributor.state).member or contributor.state
        return paused

    def participants(self, step: int) -> list[int]:
        """Members of a round of `step` that starts now."""
        there = (one for one in self.contributors.values() if one.state is MemberState.TAKES_PART)
        return [one.member for one in there if one.first_step <= step]

    def record_step(self, step: int) -> None:
        """Record a step of a contribution."""
        self.latest_step = max(self.latest_step, step)
        self.record_reported_step(step)

    def record_reported_step(self, step: int) -> None:
        """Record a step that a member reports."""
        self.reported_step = max(self.reported_step, step)

    def record_result(self, contributor: Contributor, aggregate: Aggregate) -> None:
        """Record a result from before a server restart."""
        self.record_step(aggregate.key.step)
        self.recovered.add(contributor, aggregate)

    def admit(self, now: float, register: Register, peer: bytes) -> Contributor:
        """Register a member, or raise the reason of its refusal; a repetition returns the same contributor."""
        contributor = check_admission(self, register)
        # After the check, so that a refused registration changes no state.
        if not self.is_recovering:
            self._recovering_since = now  # in case this registration starts a recovery
        self._apply(lifecycle.arrival(register), contributor.state if contributor else MemberState.NEW)
        if contributor is None:
            contributor = self._add(register, peer)
        elif self.is_recovering and register.was_in_group and not contributor.was_in_group:
            # Its first registration reached the restarted server before the member knew of the restart.
            contributor.was_in_group, contributor.announced_results = True, register.results
            contributor.step, contributor.first_step = register.step, register.first_step
            self.record_reported_step(register.step)
        contributor.peer = peer
        self._change_state(now, contributor, register)
        if self.is_recovering:
            self.expected.update(register.known, [register.member])
        return contributor

    def advance(self, now: float) -> bool:
        """Open the group or start a pass if no member is missing; returns whether it did."""
        if self.state is GroupState.BROKEN:
            return False
        return self._begin_pass() if self.is_open else self._open(now)

    def left_behind(self, now: float) -> list[tuple[bytes, str]]:
        """Members of a recovering group that count as lost: pairs of session and cause."""
        if not self.is_recovering:
            return []
        there = self.contributors.values() if self._has_timed_out(now) else ()
        incomplete = [(one.session, INCOMPLETE) for one in there if one.results_pending]
        return incomplete + [(one.session, OVERTAKEN) for one in self._overtaken]

    @property
    def _overtaken(self) -> list[Contributor]:
        """Members that return to an elastic group after it has had a round without them."""
        there = self._former_participants if self.is_elastic else []
        return [one for one in there if self.recovered.is_left_out(one.member, one.first_step)]

    def expire(self, now: float) -> None:
        """Stop waiting for members that did not reconnect in time."""
        if late := self.absent if self._has_timed_out(now) else []:
            self.expected.difference_update(late)
            cause = "did not reconnect after the server was restarted"
            loss = _loss(self, late[0], self.reported_step, f"{format_ranks(Members.of(late))} {cause}", cause)
            self._break_if_notified(self._apply(Event.TIMES_OUT), loss)

    def _has_timed_out(self, now: float) -> bool:
        """Whether the time to reconnect after a server restart is over; it equals the allowed silence."""
        return self.is_recovering and now - self._recovering_since >= self._silence

    def break_for(self, error: StatsdBNError) -> None:
        """Break the group: its members received different results."""
        self._break_if_notified(self._apply(Event.RESULTS_DIFFER), error)

    def _apply(self, event: Event, member: MemberState | None = None) -> Transition:
        """Apply an event according to the table."""
        transition = lifecycle.TRANSITIONS[self.is_elastic, self.state, event, member]
        self.state = transition.group
        self.has_opened = self.has_opened or self.is_open
        if not self.is_recovering:
            self.expected.clear()
        return transition

    def _break_if_notified(self, transition: Transition, error: StatsdBNError) -> None:
        if transition.notice is Notice.BROKEN:
            self.lost = error
            self.notices.append((transition.notice, error))

    def _add(self, register: Register, peer: bytes) -> Contributor:
        self.record_step(register.step)
        state = MemberState[Participation(register.participation).name]
        # A paused member keeps its own first step: it would take a later first step as the start of the next pass.
        joins_now = self.is_open and state is MemberState.TAKES_PART
        first_step = self._next_step if joins_now else register.first_step
        results = register.results if self.is_recovering else 0
        who = (register.session, register.member, register.deadline, register.place)
        contributor = Contributor(*who, peer, register.step, first_step, state, register.was_in_group, results)
        self.contributors[register.member] = contributor
        self.present = self.present.plus(register.member)
        return contributor

    def _change_state(self, now: float, contributor: Contributor, register: Register) -> None:
        event = lifecycle.change(register, one_left=self.departed is not None)
        # A registration from before the latest pass is outdated.
        if event is None or register.step < contributor.first_step:
            return
        transition = self._apply(event, contributor.state)
        if self.departed and transition.notice is Notice.REFUSED_DEPARTED:
            raise self.departed
        self.record_step(register.step)
        if transition.member is MemberState.REJOINING and contributor.state is not MemberState.REJOINING:
            contributor.since = now
        contributor.state = transition.member or contributor.state

    def _open(self, now: float) -> bool:
        if self.is_recovering:
            # The members of an elastic group may not know the latest newcomer, which reconnects at the same time.
            is_settled = not self.is_elastic or now - self._recovering_since >= RECONNECT_SECONDS
            if is_over := is_settled and not (self.absent or self._overtaken):
                self._admit_recovered()
        else:
            is_over = len(self.contributors) == self.world_size
        return is_over and self._apply(Event.IS_COMPLETE).notice is Notice.PROCEED

    def _admit_recovered(self) -> None:
        """Set the first steps of new members, and of members that missed the start of a pass.

        If an elastic group has already had a round of that pass without such a member, the member waits for the next
        pass: the aggregate lacks its rows.
        """
        begun = self._latest_pass
        # Before the end of the first round, a member that seems new may be an original member.
        has_begun = self.latest_step > 0 or bool(self.recovered.results)
        for contributor in self.contributors.values():
            if self.is_elastic and not contributor.was_in_group and has_begun:
                contributor.first_step = self._next_step
            elif contributor.state is MemberState.REJOINING and contributor.first_step < begun:
                if self.is_elastic and self.recovered.is_left_out(contributor.member, begun):
                    continue
                contributor.first_step, contributor.state = begun, MemberState.TAKES_PART

    @property
    def _latest_pass(self) -> int:
        """First step of the latest pass known to any member."""
        if not self.is_elastic:
            return max((one.first_step for one in self.contributors.values()), default=0)
        # Newcomers start after the members that were present at the start of the pass, hence the minimum. Members that
        # are new since the restart have no first step yet.
        return min((one.first_step for one in self._former_participants), default=0)

    def _begin_pass(self) -> bool:
        contributors = self.contributors.values()
        # Called for each change; the first member is mostly not rejoining, which ends `all` early.
        are_back = all(one.state is MemberState.REJOINING for one in contributors)
        if not (contributors and are_back and len(contributors) >= self._size):
            return False
        transition = self._apply(Event.ALL_HAVE_REJOINED)
        for contributor in contributors:
            contributor.first_step, contributor.state = self._next_step, transition.member or contributor.state
        return transition.notice is Notice.PROCEED

    def remove(self, contributor: Contributor, cause: str, *, is_lost: bool = False) -> ReplicaLost | None:
        """Remove a member that leaves or is lost; returns the error for its late messages."""
        if is_lost:
            event, reason = Event.IS_LOST, f"was lost: {cause}"
        elif cause:
            event, reason = Event.FAILS, f"failed with {cause}"
        else:
            event = Event.LEAVES
            reason = "left before the others finished; for data of different lengths see client.join"
        step = self.step_of(contributor)
        del self.contributors[contributor.member]
        self.present = self.present.minus(contributor.member)
        was_missed = not self.is_filling
        transition = self._apply(event, contributor.state)
        contributor.state = transition.member or contributor.state
        if not was_missed:
            return None
        if self.is_elastic:
            self.expected.discard(contributor.member)
        loss = _loss(self, contributor.member, step, f"{contributor} {reason}", cause)
        self._break_if_notified(transition, loss)
        if self.lost is loss:
            self.lost_by = {
                "rank": contributor.member,
                "place": contributor.place,
                "how": event.value,
                "cause": log_line(cause)[: limits.MAX_NAME_BYTES],
                "step": step,
            }
        # Members that were rejoining at the first departure were notified then, and none can rejoin since.
        if transition.notice is Notice.DEPARTED and self.departed is None:
            self.departed = loss
            self.notices.append((transition.notice, loss))
        return loss

    @property
    def _next_step(self) -> int:
        """The first step that no member has started."""
        # A member may report the highest step of the protocol.
        return min(self.latest_step + 1, limits.MAX_COUNTER)

    @property
    def _size(self) -> int:
        """Number of members of the complete group."""
        return len(self.contributors) if self.is_elastic else self.world_size


def check_admission(group: Membership, register: Register) -> Contributor | None:
    """The member that repeats its registration, or None for a newcomer that may join. Raises like `admit`."""
    contributor = group.contributors.get(register.member)
    state = contributor.state if contributor else MemberState.NEW
    transition = lifecycle.TRANSITIONS[group.is_elastic, group.state, lifecycle.arrival(register), state]
    if group.lost and transition.notice is Notice.REFUSED_BROKEN:
        raise group.lost
    if (got := register.world_size) != group.world_size:
        what = f"expected world_size {group.world_size}, as {format_ranks(group.present)} asked for, got {got}"
        raise _mismatch(group, register, what, got)
    if register.min_members != group.min_members:
        raise RegistrationRefused(
            f"{group.name}: expected policy {_policy(group.min_members)}, as {format_ranks(group.present)} asked "
            f"for, got {_policy(register.min_members)} from rank {register.member} ({register.place})"
        )
    if contributor is None:
        _check_newcomer(group, register, transition)
    elif contributor.session != register.session:
        raise _duplicate(group, register, contributor)
    return contributor


def _check_newcomer(group: Membership, register: Register, transition: Transition) -> None:
    if group.departed and lifecycle.change(register, one_left=True) is Event.CANNOT_REJOIN:
        raise group.departed
    if transition.notice is Notice.REFUSED_LATE:
        raise too_late_error(register)
    if not group.is_elastic:
        _check_same_start(group, register)
    elif transition.group is GroupState.OPEN and group.group != WORLD:
        raise RegistrationRefused(
            f"{group.name}: expected a rank that the group started with, got rank {register.member} "
            f"({register.place}); new ranks can join only the group {WORLD!r}"
        )
    elif transition.group is not GroupState.FILLING:
        return  # a newcomer to a recovering elastic group may be a former member that no returned member knows
    if group.group == WORLD and not group.is_elastic and register.member >= group.world_size:
        what = f"expected a rank in [0, {group.world_size}), got {register.member}"
        raise _mismatch(group, register, what, register.member + 1)
    if len(group.contributors) == group.world_size or transition.notice is Notice.REFUSED_FULL:
        what = f"expected {group.world_size} ranks, and {format_ranks(group.present)} registered, got one more"
        raise _mismatch(group, register, what, group.world_size + 1)


def _check_same_start(group: Membership, register: Register) -> None:
    """Refuse to mix members that continue a run after a server restart with members that start one."""
    if _is_neutral(register):
        return
    # The members present are consistent, so the first one that is not neutral represents them.
    other = next((one for one in group.contributors.values() if not _is_neutral(one)), None)
    if other and other.has_started != register.has_started:
        older, newer = (other, register) if other.has_started else (register, other)
        raise RegistrationRefused(
            f"{group.name}: rank {older.member} ({older.place}) is at step {older.step}, and rank {newer.member} "
            f"({newer.place}) has taken part in no round; all ranks of a strict group begin together. Start a new run, "
            "with a later epoch or another job name"
        )


def _is_neutral(member: Contributor | Register) -> bool:
    """Whether a member was in the open group but has had no round, so that it may continue a run or start one."""
    return member.was_in_group and not member.has_started


def _duplicate(group: Membership, register: Register, contributor: Contributor) -> DuplicateMember:
    member = register.member
    what = f"there is a rank {member} already: {contributor.place} is registered, {register.place} was refused"
    advice = "Give every process its own RANK, or every run its own job name."
    text = error_text(what, where=group.name, advice=advice)
    return DuplicateMember(text, job=group.job, group=group.group, member=member, place=contributor.place)


def _mismatch(group: Membership, register: Register, reason: str, got: int) -> WorldSizeMismatch:
    text = error_text(f"{reason} from rank {register.member} ({register.place})", where=group.name)
    size = group.world_size
    return WorldSizeMismatch(text, job=group.job, group=group.group, member=register.member, expected=size, got=got)


def too_late_error(register: Register) -> ReplicaLost:
    """Error of a member that returns after the others continued without it."""
    text = (
        f"rank {register.member} ({register.place}) registered too late after the server restarted; the others "
        "continued without it"
    )
    return _loss(register, register.member, register.step, text, "registered too late")


def _loss(of: Membership | Register, member: int, step: int, text: str, cause: str) -> ReplicaLost:
    text = error_text(text, where=f"job {of.job!r}, group {of.group!r}, step {step}")
    return ReplicaLost(text, job=of.job, group=of.group, member=member, step=step, cause=cause)


def _policy(min_members: int) -> str:
    return f'"elastic" with min_members {min_members}' if min_members else '"strict"'
