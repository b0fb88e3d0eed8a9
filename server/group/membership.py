"""Who belongs to a group, since which step, until when.

What may happen to a group, and what follows, is the table of `server.group.lifecycle`. This file finds out when it
happens, and keeps who is in the group. The first member of a new run replaces a group that is broken. Newcomers to an
elastic group take part from a step on that nobody has begun.

A member may be away for a while, because its data has ended, and takes part again when all others are back as well.
"""

from server.group import admission, lifecycle
from server.group.contributor import Contributor
from server.group.lifecycle import Event, GroupState, MemberState, Move, Policy, Told
from server.group.recovery import Recovery
from statsd_bn import limits
from statsd_bn.error_text import error_text
from statsd_bn.errors import ReplicaLost, StatsdBNError
from statsd_bn.members import NOBODY, Members, ranks_in_words
from statsd_bn.messages import Participation, Register


class Membership:
    """The members of one life of a group, which moves along the table of `server.group.lifecycle`, and in no other way.

    Args:
        register: the registration that begins it.
        silence: how long members may take to come back after a restart of the server, in seconds.

    Attributes:
        policy: strict or elastic.
        state: where the group is in its life.
        lost: why the group is broken; None while it is not.
        departed: who has left a strict group while it was away, so that all can never be back again; None if nobody.
        news: what has happened that the members are still to be told.
        contributors: by member number.
        present: the numbers of the members; kept beside them, since each newcomer to a large group is told them.
        latest_step: the highest step that any member has begun.
        told_step: the same, or one that a member says it has begun: of some rounds the server sees nothing.
        recovery: who is still to come back to a recovering group; None in any other state.
    """

    def __init__(self, register: Register, silence: float = limits.SILENCE_SECONDS) -> None:
        self.policy = Policy.ELASTIC if register.min_members else Policy.STRICT
        self.state = self._state_before = GroupState.FILLING
        self.lost: StatsdBNError | None = None
        self.departed: ReplicaLost | None = None
        self.news: list[Told] = []
        self._silence = silence
        self.job = register.job
        self.group = register.group
        self.world_size = register.world_size
        self.min_members = register.min_members
        self.contributors: dict[int, Contributor] = {}
        self.present = NOBODY
        self.latest_step = self.told_step = 0
        self.recovery: Recovery | None = None
        self._may_some_be_back = False

    @property
    def is_elastic(self) -> bool:
        """Whether the group goes on when a member is lost."""
        return self.policy is Policy.ELASTIC

    @property
    def is_open(self) -> bool:
        """Whether rounds can take place."""
        return self.state is GroupState.OPEN

    @property
    def has_opened(self) -> bool:
        """Whether the group is open, or was until it was broken."""
        return GroupState.OPEN in {self.state, self._state_before}

    @property
    def why_broken(self) -> StatsdBNError:
        """The error that broke the group."""
        if self.lost is None:
            raise LookupError("the group is not broken")
        return self.lost

    @property
    def why_incomplete(self) -> ReplicaLost:
        """The error of the member that has left while it was away."""
        if self.departed is None:
            raise LookupError("nobody has left the group")
        return self.departed

    @property
    def suffices(self) -> bool:
        """Whether enough members are there for a round to be completed."""
        return len(self.contributors) >= self.min_members

    @property
    def missing(self) -> int:
        """How many members the group still waits for before it opens."""
        if self.state is GroupState.FILLING:
            return self.world_size - len(self.contributors)
        # Nobody may begin before a recovery is over, though all who are known to be missing may be there before.
        return max(1, len(self.absent)) if self.state is GroupState.RECOVERING else 0

    def step_of(self, contributor: Contributor) -> int:
        """The step that a member is in: the members of a strict group that take part are all in the latest one."""
        is_in_lockstep = contributor.state is MemberState.TAKES_PART and not self.is_elastic
        return self.told_step if is_in_lockstep else contributor.known_step

    @property
    def absent(self) -> list[int]:
        """The members that have not come back after a restart of the server, with all that they know."""
        return self.recovery.missing(self._returned) if self.recovery else []

    @property
    def _returned(self) -> list[int]:
        return [contributor.member for contributor in self.contributors.values() if not contributor.owes]

    @property
    def _returned_to_rounds(self) -> list[Contributor]:
        """Members that took part before a restart of the server, and still do."""
        return [one for one in self.contributors.values() if one.has_past and one.state is MemberState.TAKES_PART]

    def missing_for(self, contributor: Contributor) -> tuple[int, Members]:
        """Number of members that a member still waits for, and the members that are there."""
        if not self.is_open or contributor.state is not MemberState.REJOINING:
            return self.missing, self.present
        back = Members.of(other.member for other in self.contributors.values() if other.state is MemberState.REJOINING)
        # One that is back waits until it is called back, though all may be back the moment before.
        return max(1, self._size - len(back)), back

    @property
    def returning(self) -> list[Contributor]:
        """Members of an open group that are back, and wait for all others."""
        # Asked several times a second; mostly nobody has come back since all took part.
        if not (self.is_open and self._may_some_be_back):
            return []
        back = [contributor for contributor in self.contributors.values() if contributor.state is MemberState.REJOINING]
        self._may_some_be_back = bool(back)
        return back

    def turn_back(self, contributor: Contributor) -> None:
        """Take a member that is back for away again: the others will not come."""
        move = self._move(Event.PAUSES, contributor.state)
        contributor.state = move.member or contributor.state

    def participants(self, step: int) -> list[int]:
        """Members that take part in a round of a step, if the round begins now."""
        return [
            contributor.member
            for contributor in self.contributors.values()
            if contributor.state is MemberState.TAKES_PART and contributor.first_step <= step
        ]

    def reach(self, step: int) -> None:
        """Record that a member has begun a step."""
        self.latest_step = max(self.latest_step, step)
        self.hear_of(step)

    def hear_of(self, step: int) -> None:
        """Record that a member says that it has begun a step."""
        self.told_step = max(self.told_step, step)

    def recall(self, step: int, covered: Members) -> None:
        """Record which members a result covers; an earlier life of the server gave it to a member."""
        self.reach(step)
        if self.recovery:
            self.recovery.tell(step, covered)

    def admit(self, now: float, register: Register, peer: bytes) -> Contributor:
        """Register a member, or find it if it is registered.

        Raises:
            ReplicaLost: the group is broken, or the member was taken for lost.
            WorldSizeMismatch: the member expects another number of members, or is one too many.
            RegistrationRefused: the member's policy is another; some members are far into a run that others have not
                begun.
            DuplicateMember: another process is this member already.
        """
        contributor = admission.check(self, register)
        # Not before: one that is refused begins nothing.
        self._move(lifecycle.arrival(register), contributor.state if contributor else MemberState.NEW)
        if self.state is GroupState.RECOVERING and self.recovery is None:
            self.recovery = Recovery(now, self._silence)
        if contributor is None:
            contributor = self._take_in(register, peer)
        elif self.recovery and register.has_past and not contributor.has_past:
            # It came before it had heard that the group had been open, and has been asked what it knows.
            contributor.learn_past(register)
            self.hear_of(register.step)
        contributor.peer = peer
        self._change_state(now, contributor, register)
        if self.recovery:
            self.recovery.name(register.known)
            self.recovery.name(Members.of([register.member]))
        return contributor

    def settle(self, now: float) -> bool:
        """Open the group, or begin another pass, if nobody is missing; returns whether it did."""
        if self.state is GroupState.BROKEN:
            return False
        return self._call_back() if self.is_open else self._open(now)

    def incomplete(self, now: float) -> list[Contributor]:
        """Members that have announced results that did not come in time; none while there is time."""
        if self.recovery is None or not self.recovery.is_late(now):
            return []
        return [contributor for contributor in self.contributors.values() if contributor.owes]

    @property
    def overtaken(self) -> list[Contributor]:
        """Members that come back to an elastic group that had lost them: the others have a result without them."""
        if self.recovery is None or not self.is_elastic:
            return []
        return [one for one in self._returned_to_rounds if self.recovery.is_left_out(one.member, one.first_step)]

    def give_up_waiting(self, now: float) -> bool:
        """Give up on members that have not come back after a restart of the server; returns whether there are any."""
        late = self.recovery.late(now, self._returned) if self.recovery else []
        if late:
            cause = "did not come back after the server was restarted"
            loss = self._loss(late[0], self.told_step, f"{ranks_in_words(Members.of(late))} {cause}", cause)
            self._break_if_told(self._move(Event.SOME_ARE_LATE), loss)
        return bool(late)

    def find_contradiction(self, error: StatsdBNError) -> None:
        """Break the group because its members were given different results."""
        self._break_if_told(self._move(Event.RESULTS_DIFFER), error)

    def remove(self, contributor: Contributor, cause: str) -> ReplicaLost | None:
        """Remove a member that said goodbye; returns the error that it gets if it comes back."""
        if cause:
            return self._take_out(contributor, Event.FAILS, f"failed with {cause}", cause)
        orderly = "left while others went on; for data of different lengths see client.join"
        return self._take_out(contributor, Event.LEAVES, orderly, cause)

    def lose(self, contributor: Contributor, cause: str) -> ReplicaLost | None:
        """Remove a member that is lost; returns the error that it gets if it comes back."""
        return self._take_out(contributor, Event.IS_LOST, f"was lost: {cause}", cause)

    def _move(self, event: Event, member: MemberState | None = None) -> Move:
        """Take the step of the table that an event leads to."""
        move = lifecycle.move(self.policy, self.state, event, member)
        if move.group is not self.state:
            self.state, self._state_before = move.group, self.state
        if self.state is not GroupState.RECOVERING:
            self.recovery = None
        return move

    def _break_if_told(self, move: Move, error: StatsdBNError) -> None:
        if move.told is Told.BROKEN:
            self.lost = error
            self.news.append(move.told)

    def _take_in(self, register: Register, peer: bytes) -> Contributor:
        self.reach(register.step)
        joins = self.is_open
        contributor = Contributor(
            register.session,
            register.member,
            register.deadline,
            register.place,
            peer,
            register.step,
            # Whoever is away begins when it is called back, and would take a later step for that.
            self._next_step if joins and register.participation == Participation.TAKES_PART else register.first_step,
            lifecycle.state_of(register.participation),
            register.has_past,
            register.results if self.recovery else 0,
        )
        self.contributors[register.member] = contributor
        self._may_some_be_back |= contributor.state is MemberState.REJOINING
        self.present = self.present.plus(register.member)
        return contributor

    def _change_state(self, now: float, contributor: Contributor, register: Register) -> None:
        event = lifecycle.change(register, one_left=self.departed is not None)
        # One that was sent before the latest pass began says nothing any more.
        if event is None or register.step < contributor.first_step:
            return
        move = self._move(event, contributor.state)
        if move.told is Told.REFUSED_DEPARTED:
            raise self.why_incomplete
        self.reach(register.step)
        if move.member is MemberState.REJOINING and contributor.state is not MemberState.REJOINING:
            contributor.since = now
        self._may_some_be_back |= move.member is MemberState.REJOINING
        contributor.state = move.member or contributor.state

    def _open(self, now: float) -> bool:
        if self.recovery:
            is_over = self.recovery.is_over(now, self._returned, is_elastic=self.is_elastic) and not self.overtaken
        else:
            is_over = len(self.contributors) == self.world_size
        if not is_over:
            return False
        if self.recovery:
            self._let_in_after(self.recovery)
        return self._move(Event.NOBODY_IS_MISSING).told is Told.GO_ON

    def _let_in_after(self, recovery: Recovery) -> None:
        """Let new members begin after the others; let members that missed the call for a pass begin that pass.

        If an elastic group has had a round of the pass without such a member, that waits for the next pass: it would
        be given an aggregate without its rows.
        """
        begun = self._latest_call
        for contributor in self.contributors.values():
            if self.is_elastic and not contributor.has_past and self._has_begun:
                contributor.first_step = self._next_step
            elif contributor.state is MemberState.REJOINING and contributor.first_step < begun:
                if self.is_elastic and recovery.is_left_out(contributor.member, begun):
                    continue
                contributor.first_step, contributor.state = begun, MemberState.TAKES_PART

    @property
    def _latest_call(self) -> int:
        """First step of the latest pass that any member knows of."""
        if not self.is_elastic:
            return max((contributor.first_step for contributor in self.contributors.values()), default=0)
        # Those who wait may be newcomers, and so may those who take part: whoever was called begins before these. One
        # that is new since the restart was not called, and has no first step yet.
        return min((contributor.first_step for contributor in self._returned_to_rounds), default=0)

    @property
    def _has_begun(self) -> bool:
        """Whether a round has ended. Before that, a member that seems new may have been there from the beginning."""
        return self.latest_step > 0 or (self.recovery is not None and self.recovery.has_results)

    def _call_back(self) -> bool:
        contributors = self.contributors.values()
        # Whoever takes part is mostly the first to be asked: this is looked at for each message that changes anything.
        if (
            not contributors
            or len(contributors) < self._size
            or not all(contributor.state is MemberState.REJOINING for contributor in contributors)
        ):
            return False
        move = self._move(Event.ALL_HAVE_REJOINED)
        for contributor in contributors:
            contributor.first_step, contributor.state = self._next_step, move.member or contributor.state
        return move.told is Told.GO_ON

    def _take_out(self, contributor: Contributor, event: Event, reason: str, cause: str) -> ReplicaLost | None:
        step = self.step_of(contributor)
        del self.contributors[contributor.member]
        self.present = self.present.minus(contributor.member)
        was_missed = self.state is not GroupState.FILLING
        move = self._move(event, contributor.state)
        contributor.state = move.member or contributor.state
        if not was_missed:
            return None
        if self.recovery and self.is_elastic:
            self.recovery.forget(contributor.member)
        loss = self._loss(contributor.member, step, f"{contributor} {reason}", cause)
        self._break_if_told(move, loss)
        # Whoever was back when the first one left has been told then, and nobody can be back since.
        if move.told is Told.DEPARTED and self.departed is None:
            self.departed = loss
            self.news.append(move.told)
        return loss

    def _loss(self, member: int, step: int, text: str, cause: str) -> ReplicaLost:
        return ReplicaLost(
            error_text(text, where=f"{self.name}, step {step}"),
            job=self.job,
            group=self.group,
            member=member,
            step=step,
            cause=cause,
        )

    @property
    def _next_step(self) -> int:
        """The first step that nobody has begun."""
        # A stranger may claim to be in the last step there is.
        return min(self.latest_step + 1, limits.MAX_COUNTER)

    @property
    def _size(self) -> int:
        """How many members make the group complete."""
        return len(self.contributors) if self.is_elastic else self.world_size

    @property
    def name(self) -> str:
        """Which group it is, for people."""
        return f"job {self.job!r}, group {self.group!r}"
