"""Lifecycle of a group and its members, as one transition table.

The rules behind the table:

1. A group opens once, and then stays open until it breaks or its last member leaves.
2. A filling group survives the loss of members.
3. An open or recovering strict group breaks when it loses a member. Only a paused member may leave, and without an
   error.
4. An elastic group survives the loss of members, and accepts new ones while it is open or recovers.
5. An open group, strict or elastic, breaks when its members have presented contradictory results.
6. A filling group becomes recovering when a former member registers. An open elastic group refuses former members,
   because the others have continued. An open strict group accepts a former member only if it was paused,
   because no round needs it.
7. After a paused member has left a strict group, rejoining members get an error: the group can never be complete again.
8. A broken group stays broken and refuses all registrations; `server.core.registry` may replace it.

A case without a row cannot occur and raises KeyError. `server.group.membership` decides when an event occurs: it checks
whether members are missing, late, or too many.
"""

from enum import StrEnum
from itertools import product
from typing import NamedTuple

from statsd_bn.messages import Participation, Register


class GroupState(StrEnum):
    """State of a group."""

    FILLING = "filling"  # waits for its members to register
    RECOVERING = "recovering"  # the server was restarted, and the group waits for its former members
    OPEN = "open"  # has rounds
    BROKEN = "broken"  # has no further rounds, and answers each member with the error that broke it


class MemberState(StrEnum):
    """State of a process in its group."""

    NEW = "new"  # is registering
    TAKES_PART = "takes part"
    PAUSED = "paused"  # its data has ended
    REJOINING = "rejoining"  # waits for the others to return
    LEFT = "left"
    LOST = "lost"


class Event(StrEnum):
    """Event of one process or of the whole group."""

    ARRIVES = "arrives"
    RETURNS = "returns"
    RETURNS_PAUSED = "returns paused"
    PAUSES = "pauses"
    REJOINS = "rejoins"
    CANNOT_REJOIN = "cannot rejoin"
    LEAVES = "leaves"
    FAILS = "fails"
    IS_LOST = "is lost"
    IS_COMPLETE = "is complete"
    ALL_HAVE_REJOINED = "all have rejoined"
    TIMES_OUT = "times out"
    RESULTS_DIFFER = "results differ"


class Notice(StrEnum):
    """Recipients and content of the replies."""

    NONE = "none"
    REGISTERED = "member: registered"
    PROCEED = "all: proceed"
    BROKEN = "waiting: broken"
    DEPARTED = "rejoining: one left"
    REFUSED_BROKEN = "member: broken"
    REFUSED_DEPARTED = "member: one left"
    REFUSED_FULL = "member: full"
    REFUSED_LATE = "member: too late"


class Transition(NamedTuple):
    """Result of an event."""

    group: GroupState
    member: MemberState | None  # None if it does not change
    notice: Notice


# "needed": takes part or rejoining; "registered": needed or paused; "any": registered or new.
TABLE = """
| policy  | group      | event                            | subject    | next group | next state | notice
| either  | filling    | arrives                          | any        | filling    |            | member: registered
| either  | filling    | returns, returns paused          | any        | recovering |            | member: registered
| either  | filling    | pauses                           | registered | filling    | paused     | member: registered
| either  | filling    | rejoins                          | registered | filling    | rejoining  | member: registered
| either  | filling    | leaves, fails                    | registered | filling    | left       | none
| either  | filling    | is lost                          | registered | filling    | lost       | none
| either  | filling    | is complete                      | the group  | open       |            | all: proceed
| either  | recovering | arrives, returns, returns paused | any        | recovering |            | member: registered
| either  | recovering | pauses                           | registered | recovering | paused     | member: registered
| either  | recovering | rejoins                          | registered | recovering | rejoining  | member: registered
| strict  | recovering | cannot rejoin                    | any        | recovering |            | member: one left
| strict  | recovering | leaves                           | needed     | broken     | left       | waiting: broken
| strict  | recovering | leaves                           | paused     | recovering | left       | rejoining: one left
| strict  | recovering | fails                            | registered | broken     | left       | waiting: broken
| strict  | recovering | is lost                          | registered | broken     | lost       | waiting: broken
| strict  | recovering | times out                        | the group  | broken     |            | waiting: broken
| elastic | recovering | leaves, fails                    | registered | recovering | left       | none
| elastic | recovering | is lost                          | registered | recovering | lost       | none
| elastic | recovering | times out                        | the group  | recovering |            | none
| either  | recovering | is complete                      | the group  | open       |            | all: proceed
| either  | open       | arrives, returns, returns paused | registered | open       |            | member: registered
| strict  | open       | arrives, returns                 | new        | open       |            | member: full
| strict  | open       | returns paused                   | new        | open       |            | member: registered
| elastic | open       | arrives                          | new        | open       |            | member: registered
| elastic | open       | returns, returns paused          | new        | open       |            | member: too late
| either  | open       | pauses                           | registered | open       | paused     | member: registered
| either  | open       | rejoins                          | registered | open       | rejoining  | member: registered
| strict  | open       | cannot rejoin                    | any        | open       |            | member: one left
| either  | open       | all have rejoined                | the group  | open       | takes part | all: proceed
| strict  | open       | leaves                           | needed     | broken     | left       | waiting: broken
| strict  | open       | leaves                           | paused     | open       | left       | rejoining: one left
| strict  | open       | fails                            | registered | broken     | left       | waiting: broken
| strict  | open       | is lost                          | registered | broken     | lost       | waiting: broken
| elastic | open       | leaves, fails                    | registered | open       | left       | none
| elastic | open       | is lost                          | registered | open       | lost       | none
| either  | open       | results differ                   | the group  | broken     |            | waiting: broken
| either  | broken     | arrives, returns, returns paused | any        | broken     |            | member: broken
| either  | broken     | leaves, fails                    | registered | broken     | left       | none
| either  | broken     | is lost                          | registered | broken     | lost       | none
| either  | broken     | results differ                   | the group  | broken     |            | none
"""

# Whether the group is elastic, its state, an event, and the state of the member to which it happens, if any.
Case = tuple[bool, GroupState, Event, MemberState | None]

_POLICIES = {"either": (False, True), "strict": (False,), "elastic": (True,)}

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


def _transitions() -> dict[Case, Transition]:
    found: dict[Case, Transition] = {}
    for row in TABLE.strip().splitlines()[1:]:
        policies, group, events, whom, group_then, member_then, notice = map(str.strip, row.strip("|").split("|"))
        result = Transition(GroupState(group_then), MemberState(member_then) if member_then else None, Notice(notice))
        cases = product(_POLICIES[policies], [GroupState(group)], map(Event, events.split(", ")), _WHOM[whom])
        for case in cases:
            if case in found:
                raise ValueError(f"the table has two rows for {case}")
            found[case] = result
    return found


TRANSITIONS = _transitions()


def arrival(register: Register) -> Event:
    """Returns the event of a registration: a member arrives or returns."""
    if not register.was_in_group:
        return Event.ARRIVES
    return Event.RETURNS if register.participation == Participation.TAKES_PART else Event.RETURNS_PAUSED


def change(register: Register, *, one_left: bool) -> Event | None:
    """Returns the change of participation that a registration asks for; None without a change.

    `one_left`: a paused member has left the strict group, so the others cannot rejoin.
    """
    if register.participation == Participation.TAKES_PART:
        return None
    if register.participation == Participation.PAUSED:
        return Event.PAUSES
    return Event.CANNOT_REJOIN if one_left else Event.REJOINS
