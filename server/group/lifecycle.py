"""The life of a group and of its members: one table that says what may happen, and what follows.

A group is in one of four states:

- FILLING: it waits until all its members have registered.
- RECOVERING: the server was restarted, and the group waits for the members that it had before.
- OPEN: its rounds take place.
- BROKEN: it takes part in no further round. It keeps the error that broke it, and gives it to everybody.

A member of it TAKES_PART, is PAUSED, or is REJOINING and waits for the others. One that has LEFT or is LOST is no
member any more. NEW is a process that registers and is no member yet.

The rules that the table writes out:

1. A group opens once. After that it stays open until it is broken, or until its last member has gone.
2. Before a group is open nobody relies on it: whoever leaves a filling group is not missed.
3. A strict group breaks when a member goes that the others need: any member, but for one that is away and says goodbye.
4. An elastic group does not break when a member goes, and takes in new ones while it is open.
5. Each group breaks when its members prove that they were given different results.
6. A member that was in the open group before the server was restarted makes a filling group recover. Once an elastic
   group is open again such a member is too late: the others have gone on. A strict group still takes it in if it was
   away, since nobody has waited for it.
7. A strict group that a member has left for good can never have all its members back: who is back learns that.
8. A broken group stays broken, and refuses everybody.

What the table does not name cannot happen, and raises KeyError. It does not say when an event takes place: whether
nobody is missing any more, who is late, and whether there is room, `server.group.membership`,
`server.group.recovery` and `server.group.admission` find out.
"""

from enum import StrEnum
from itertools import product
from typing import NamedTuple

from statsd_bn.messages import Participation, Register


class Policy(StrEnum):
    """What becomes of a group that loses a member."""

    STRICT = "strict"
    ELASTIC = "elastic"


class GroupState(StrEnum):
    """Where a group is in its life."""

    FILLING = "filling"
    RECOVERING = "recovering"
    OPEN = "open"
    BROKEN = "broken"


class MemberState(StrEnum):
    """What a process is to its group."""

    NEW = "new"
    TAKES_PART = "takes part"
    PAUSED = "paused"
    REJOINING = "rejoining"
    LEFT = "left"
    LOST = "lost"


class Event(StrEnum):
    """What happens, to one process or to the whole group."""

    ARRIVES = "arrives"
    RETURNS = "returns"
    RETURNS_PAUSED = "returns paused"
    PAUSES = "pauses"
    REJOINS = "rejoins"
    REJOINS_IN_VAIN = "rejoins in vain"
    LEAVES = "leaves"
    FAILS = "fails"
    IS_LOST = "is lost"
    NOBODY_IS_MISSING = "nobody is missing"
    ALL_HAVE_REJOINED = "all have rejoined"
    SOME_ARE_LATE = "some are late"
    RESULTS_DIFFER = "results differ"


class Told(StrEnum):
    """Who is told what."""

    NOBODY = "nobody"
    REGISTERED = "itself: registered"
    GO_ON = "everybody: go on"
    BROKEN = "those waiting: broken"
    DEPARTED = "rejoining: one left"
    REFUSED_BROKEN = "itself: broken"
    REFUSED_DEPARTED = "itself: one left"
    REFUSED_FULL = "itself: full"
    REFUSED_LATE = "itself: too late"


class Move(NamedTuple):
    """What follows from an event: `member` is None where a process stays what it is."""

    group: GroupState
    member: MemberState | None
    told: Told


# "needed": takes part or rejoining; "registered": these and paused; "any": these and new.
TABLE = """
| policy  | group      | what happens                     | to whom    | group then | it is then | who is told
| either  | filling    | arrives                          | any        | filling    |            | itself: registered
| either  | filling    | returns, returns paused          | any        | recovering |            | itself: registered
| either  | filling    | pauses                           | registered | filling    | paused     | itself: registered
| either  | filling    | rejoins                          | registered | filling    | rejoining  | itself: registered
| either  | filling    | leaves, fails                    | registered | filling    | left       | nobody
| either  | filling    | is lost                          | registered | filling    | lost       | nobody
| either  | filling    | nobody is missing                | the group  | open       |            | everybody: go on
| either  | recovering | arrives, returns, returns paused | any        | recovering |            | itself: registered
| either  | recovering | pauses                           | registered | recovering | paused     | itself: registered
| either  | recovering | rejoins                          | registered | recovering | rejoining  | itself: registered
| strict  | recovering | rejoins in vain                  | any        | recovering |            | itself: one left
| strict  | recovering | leaves                           | needed     | broken     | left       | those waiting: broken
| strict  | recovering | leaves                           | paused     | recovering | left       | rejoining: one left
| strict  | recovering | fails                            | registered | broken     | left       | those waiting: broken
| strict  | recovering | is lost                          | registered | broken     | lost       | those waiting: broken
| strict  | recovering | some are late                    | the group  | broken     |            | those waiting: broken
| elastic | recovering | leaves, fails                    | registered | recovering | left       | nobody
| elastic | recovering | is lost                          | registered | recovering | lost       | nobody
| elastic | recovering | some are late                    | the group  | recovering |            | nobody
| either  | recovering | nobody is missing                | the group  | open       |            | everybody: go on
| either  | open       | arrives, returns, returns paused | registered | open       |            | itself: registered
| strict  | open       | arrives, returns                 | new        | open       |            | itself: full
| strict  | open       | returns paused                   | new        | open       |            | itself: registered
| elastic | open       | arrives                          | new        | open       |            | itself: registered
| elastic | open       | returns, returns paused          | new        | open       |            | itself: too late
| either  | open       | pauses                           | registered | open       | paused     | itself: registered
| either  | open       | rejoins                          | registered | open       | rejoining  | itself: registered
| strict  | open       | rejoins in vain                  | any        | open       |            | itself: one left
| either  | open       | all have rejoined                | the group  | open       | takes part | everybody: go on
| strict  | open       | leaves                           | needed     | broken     | left       | those waiting: broken
| strict  | open       | leaves                           | paused     | open       | left       | rejoining: one left
| strict  | open       | fails                            | registered | broken     | left       | those waiting: broken
| strict  | open       | is lost                          | registered | broken     | lost       | those waiting: broken
| elastic | open       | leaves, fails                    | registered | open       | left       | nobody
| elastic | open       | is lost                          | registered | open       | lost       | nobody
| either  | open       | results differ                   | the group  | broken     |            | those waiting: broken
| either  | broken     | arrives, returns, returns paused | any        | broken     |            | itself: broken
| either  | broken     | leaves, fails                    | registered | broken     | left       | nobody
| either  | broken     | is lost                          | registered | broken     | lost       | nobody
| either  | broken     | results differ                   | the group  | broken     |            | nobody
"""

Case = tuple[Policy, GroupState, Event, MemberState | None]

_POLICIES = {"either": tuple(Policy), **{policy.value: (policy,) for policy in Policy}}

_NEEDED = (MemberState.TAKES_PART, MemberState.REJOINING)
_REGISTERED = (*_NEEDED, MemberState.PAUSED)
_WHOM: dict[str, tuple[MemberState | None, ...]] = {
    "new": (MemberState.NEW,),
    "paused": (MemberState.PAUSED,),
    "needed": _NEEDED,
    "registered": _REGISTERED,
    "any": (MemberState.NEW, *_REGISTERED),
    "the group": (None,),
}


def rows() -> list[list[str]]:
    """Returns the cells of the table, with its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.strip().splitlines()]


def _moves() -> dict[Case, Move]:
    moves: dict[Case, Move] = {}
    for policies, group, events, whom, group_then, member_then, told in rows()[1:]:
        what_follows = Move(GroupState(group_then), MemberState(member_then) if member_then else None, Told(told))
        cases = product(_POLICIES[policies], [GroupState(group)], map(Event, events.split(", ")), _WHOM[whom])
        for case in cases:
            if case in moves:
                raise ValueError(f"the table says twice what follows from {case}")
            moves[case] = what_follows
    return moves


_MOVES = _moves()


def move(policy: Policy, group: GroupState, event: Event, member: MemberState | None = None) -> Move:
    """Returns what follows from an event.

    Args:
        policy: the group's.
        group: its state.
        event: what happens.
        member: the state of the process that it happens to; None where it happens to the group.

    Raises:
        KeyError: this cannot happen.
    """
    return _MOVES[policy, group, event, member]


def arrival(register: Register) -> Event:
    """Returns how a process comes that registers."""
    if not register.has_past:
        return Event.ARRIVES
    return Event.RETURNS if register.participation == Participation.TAKES_PART else Event.RETURNS_PAUSED


def change(register: Register, *, one_left: bool) -> Event | None:
    """Returns what a member does that registers, whether it is new or not; None where it takes part.

    Args:
        register: what it says.
        one_left: whether a member of the strict group has left that was away.
    """
    if register.participation == Participation.TAKES_PART:
        return None
    if register.participation == Participation.PAUSED:
        return Event.PAUSES
    return Event.REJOINS_IN_VAIN if one_left else Event.REJOINS


def state_of(participation: int) -> MemberState:
    """Returns the state that a member says it is in."""
    return MemberState[Participation(participation).name]
