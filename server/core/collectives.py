"""Collectives: members that wait in a collective of torch for others, which may wait here.

torch counts the operations that a process has begun on a process group. All ranks of a group begin the same ones in the
same order, so a rank that is inside of its n-th operation needs every rank that has begun fewer than n. This is what
tells a deadlock from an asynchronous collective that has been begun everywhere and is merely slow: that one needs
nobody. A rank whose number is not known counts as needed, so that whatever frees it frees all who may wait for it.

Ranks that do not run the same program may have begun as many operations, but others: one is in a barrier, and another
in a broadcast. So a rank is needed as well if it has long been in another place, although it should have come out of
this collective with the others. That can be said of few kinds of collectives, since ranks come out of the others at
different times: the source of a broadcast may be in a barrier behind it while the others still get a large tensor. On
gloo, messages between two ranks are counted too, so the numbers alone say nothing there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from server.group.contributor import Contributor, Sighting, group_of
from statsd_bn.messages import ALL_GATHER, ALL_REDUCE, BARRIER, BUFFERS

# Out of these no rank comes before all have begun them, and then all come out at about the same time.
TOGETHER = frozenset({BARRIER, ALL_REDUCE, ALL_GATHER})

# How long ranks must have been in different places, as a multiple of the longest silence: on a network that holds up a
# collective for so long members are lost.
APART_SILENCES = 1.5


@dataclass(frozen=True, slots=True)
class Held:
    """A member that waits in a collective of torch.

    Attributes:
        contributor: the member.
        since: when it was first seen there.
        missing: the ranks that it needs, or may need.
    """

    contributor: Contributor
    since: float
    missing: frozenset[int]


def ranks_told(contributors: Iterable[Contributor]) -> int:
    """How many ranks members that wait in a collective tell of, all together: `held_members` looks at each."""
    sightings = (contributor.sighting for contributor in contributors)
    answers = (sighting.latest for sighting in sightings if sighting and sighting.is_held)
    return sum(len(answer.members) for answer in answers if answer)


def held_members(contributors: Iterable[Contributor], silence: float) -> list[Held]:
    """Those of some members of a job that wait in a collective for a rank that has not begun it.

    Args:
        contributors: the members.
        silence: how long a member may be silent, in seconds.
    """
    by_member = {contributor.member: contributor for contributor in contributors}
    found = (_held(contributor, by_member, APART_SILENCES * silence) for contributor in by_member.values())
    return [held for held in found if held]


def _held(contributor: Contributor, others: dict[int, Contributor], apart: float) -> Held | None:
    sighting = contributor.sighting
    if sighting is None or not sighting.is_held or sighting.latest is None:
        return None
    latest = sighting.latest
    needed, is_needed_for_sure = set(), False
    for member in latest.members:
        if member == contributor.member:
            continue
        other = others.get(member)
        has = _has_come(other.sighting, sighting, apart) if other and other.sighting else None
        if not has:
            needed.add(member)
        is_needed_for_sure |= has is False
    return Held(contributor, sighting.since, frozenset(needed)) if is_needed_for_sure else None


def _has_come(other: Sighting, held: Sighting, apart: float) -> bool | None:
    """Whether a member has come to the collective that another one is held in; None if nobody knows."""
    if held.latest is None:
        return None
    group = group_of(held.latest)
    has_launched = other.has_launched(group, held.latest.launched)
    if not has_launched or not _is_elsewhere(other, held):
        return has_launched
    (begin, end), (other_begin, other_end) = held.steady_in(group), other.steady_in(group)
    return min(end, other_end) - max(begin, other_begin) < apart


def _is_elsewhere(other: Sighting, held: Sighting) -> bool:
    """Whether a member that has begun as many operations is in a place where it cannot be while another is held."""
    if held.latest is None or other.latest is None:
        return False
    place, other_place = held.latest, other.latest
    if not other_place.held:
        return place.collective in TOGETHER
    # Of the same group: of one that is held no other number is known.
    is_known = other_place.collective in TOGETHER or other_place.collective == BUFFERS
    if not is_known or other_place.collective == place.collective:
        return False
    # The rank that the buffers come from is through with them before the others, and goes on to its next operation.
    has_begun_no_more = place.collective == BUFFERS and other_place.launched == place.launched
    return place.collective in TOGETHER or (has_begun_no_more and other_place.collective in TOGETHER)
