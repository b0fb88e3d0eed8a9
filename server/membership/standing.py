"""Standing: where one group is in its life, and why it is broken or can have no further pass."""

from server.membership import life
from server.membership.life import Event, GroupState, MemberState, Move, Policy, Told
from statsd_bn.errors import ReplicaLost, StatsdBNError


class Standing:
    """How a group stands. It moves along the table of `server.membership.life`, and in no other way.

    Args:
        policy: strict or elastic.

    Attributes:
        policy: as given.
        state: where the group is in its life.
        lost: why the group is broken; None while it is not.
        departed: who has left a strict group while it was away, so that all can never be back again; None if nobody.
        news: what has happened that the members are still to be told.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state = GroupState.FILLING
        self._state_before = GroupState.FILLING
        self.lost: StatsdBNError | None = None
        self.departed: ReplicaLost | None = None
        self.news: list[Told] = []

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

    def _move(self, event: Event, member: MemberState | None = None) -> Move:
        """Take the step of the table that an event leads to."""
        move = life.move(self.policy, self.state, event, member)
        if move.group is not self.state:
            self.state, self._state_before = move.group, self.state
        return move

    def _break_if_told(self, move: Move, error: StatsdBNError) -> None:
        if move.told is Told.BROKEN:
            self.lost = error
            self.news.append(move.told)
