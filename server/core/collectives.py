"""Collectives: finds ranks that block in a torch collective for ranks that have not launched it.

torch counts the operations that a process has launched on a process group. All ranks launch the same operations in the
same order, so a rank inside its n-th operation needs every rank that has launched fewer than n. A rank with an unknown
count is needed, too, so that the search never reports a deadlock that this rank could still resolve.

Ranks that run different programs may reach the same count in different operations, and gloo also counts point-to-point
messages. So a rank is also needed if it has long been in another place although this collective should have released
it. Few kinds of collectives show that: the source of a broadcast may already be in the next barrier while the others
receive a large tensor.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from server.group.contributor import Contributor, StackSample, group_of
from statsd_bn.messages import ALL_GATHER, ALL_REDUCE, BARRIER, BUFFERS, StackReport

# These collectives release no rank before all have launched them, and then all at about the same time.
SYNCHRONIZING = frozenset({BARRIER, ALL_REDUCE, ALL_GATHER})

# How long ranks must stay in different places, as a multiple of the allowed silence: a network that delays a collective
# for so long also loses members.
APART_SILENCES = 1.5


@dataclass(frozen=True, slots=True)
class BlockedInCollective:
    """A member that is blocked in a torch collective, and the ranks that may not have launched it."""

    contributor: Contributor
    since: float  # time of the first report from there
    missing: frozenset[int]


def count_reported_ranks(contributors: Iterable[Contributor]) -> int:
    """Total number of ranks in the reports of blocked members, which determines the cost of `blocked_members`."""
    samples = (contributor.stack_sample for contributor in contributors)
    return sum(len(sample.latest.members) for sample in samples if sample and sample.is_blocked and sample.latest)


def blocked_members(contributors: Iterable[Contributor], silence: float) -> list[BlockedInCollective]:
    """Members that are blocked in a collective which some rank has not launched."""
    samples = {one.member: (one, one.stack_sample) for one in contributors if one.stack_sample}
    found = []
    for contributor, sample in samples.values():
        if not (sample.is_blocked and sample.latest):
            continue
        others = [member for member in sample.latest.members if member != contributor.member]
        has_arrived = {
            member: _has_arrived(samples[member][1], sample, sample.latest, APART_SILENCES * silence)
            for member in others
            if member in samples
        }
        if False in has_arrived.values():
            missing = frozenset(member for member in others if not has_arrived.get(member))
            found.append(BlockedInCollective(contributor, sample.since, missing))
    return found


def _has_arrived(other: StackSample, blocked: StackSample, place: StackReport, apart: float) -> bool | None:
    """Whether a member has reached the collective `place` in which another one is blocked; None if unknown."""
    group = group_of(place)
    has_launched = other.has_launched(group, place.launched)
    if not has_launched or not (other.latest and _is_elsewhere(other.latest, place)):
        return has_launched
    (begin, end), (other_begin, other_end) = blocked.steady_period(group), other.steady_period(group)
    return min(end, other_end) - max(begin, other_begin) < apart


def _is_elsewhere(other_place: StackReport, place: StackReport) -> bool:
    """Whether a member with the same count is at a place that contradicts the collective of the blocked one."""
    if not other_place.in_collective:
        return place.collective in SYNCHRONIZING
    # A blocked member reports the count of one process group only, the same one here.
    is_known = other_place.collective in SYNCHRONIZING or other_place.collective == BUFFERS
    if not is_known or other_place.collective == place.collective:
        return False
    # The source of a buffer broadcast finishes before the others and launches its next operation.
    has_begun_no_more = place.collective == BUFFERS and other_place.launched == place.launched
    return place.collective in SYNCHRONIZING or (has_begun_no_more and other_place.collective in SYNCHRONIZING)
