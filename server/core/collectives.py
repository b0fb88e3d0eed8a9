"""Collectives: finds ranks that block in a torch collective for ranks that have not launched it.

torch counts the operations that a process has launched on a process group. All ranks launch the same operations in the
same order, so a rank inside its n-th operation needs every rank that has launched fewer than n. An asynchronous
collective that all ranks have launched needs no further rank: it is slow, not deadlocked. A rank with an unknown count
is needed, too, so that the search never reports a deadlock that this rank could still resolve.

Ranks that run different programs may reach the same count in different operations: one in a barrier, another in a
broadcast. So a rank is also needed if it has long been in another place although this collective should have released
it. This holds for few kinds of collectives, because the others release ranks at different times: the source of a
broadcast may already be in the next barrier while the others receive a large tensor. gloo also counts point-to-point
messages, so counts alone prove nothing there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from server.group.contributor import Contributor, StackSample, group_of
from statsd_bn.messages import ALL_GATHER, ALL_REDUCE, BARRIER, BUFFERS

# These collectives release no rank before all have launched them, and then all at about the same time.
SYNCHRONIZING = frozenset({BARRIER, ALL_REDUCE, ALL_GATHER})

# How long ranks must stay in different places, as a multiple of the allowed silence: a network that delays a collective
# for so long also loses members.
APART_SILENCES = 1.5


@dataclass(frozen=True, slots=True)
class BlockedInCollective:
    """A member that is blocked in a torch collective.

    Attributes:
        contributor: the member.
        since: time of the first report from there.
        missing: ranks that have not launched the collective, or may not have.
    """

    contributor: Contributor
    since: float
    missing: frozenset[int]


def count_reported_ranks(contributors: Iterable[Contributor]) -> int:
    """Total number of ranks in the reports of blocked members, which determines the cost of `blocked_members`."""
    samples = (contributor.stack_sample for contributor in contributors)
    answers = (sample.latest for sample in samples if sample and sample.is_blocked)
    return sum(len(answer.members) for answer in answers if answer)


def blocked_members(contributors: Iterable[Contributor], silence: float) -> list[BlockedInCollective]:
    """Members that are blocked in a collective which some rank has not launched."""
    by_member = {contributor.member: contributor for contributor in contributors}
    found = (_find_block(contributor, by_member, APART_SILENCES * silence) for contributor in by_member.values())
    return [blocked for blocked in found if blocked]


def _find_block(contributor: Contributor, others: dict[int, Contributor], apart: float) -> BlockedInCollective | None:
    sample = contributor.stack_sample
    if sample is None or not sample.is_blocked or sample.latest is None:
        return None
    latest = sample.latest
    needed, is_needed_for_sure = set(), False
    for member in latest.members:
        if member == contributor.member:
            continue
        other = others.get(member)
        has = _has_arrived(other.stack_sample, sample, apart) if other and other.stack_sample else None
        if not has:
            needed.add(member)
        is_needed_for_sure |= has is False
    return BlockedInCollective(contributor, sample.since, frozenset(needed)) if is_needed_for_sure else None


def _has_arrived(other: StackSample, blocked: StackSample, apart: float) -> bool | None:
    """Whether a member has reached the collective in which another one is blocked; None if unknown."""
    if blocked.latest is None:
        return None
    group = group_of(blocked.latest)
    has_launched = other.has_launched(group, blocked.latest.launched)
    if not has_launched or not _is_elsewhere(other, blocked):
        return has_launched
    (begin, end), (other_begin, other_end) = blocked.steady_period(group), other.steady_period(group)
    return min(end, other_end) - max(begin, other_begin) < apart


def _is_elsewhere(other: StackSample, blocked: StackSample) -> bool:
    """Whether a member with the same count is at a place that contradicts the collective of the blocked one."""
    if blocked.latest is None or other.latest is None:
        return False
    place, other_place = blocked.latest, other.latest
    if not other_place.in_collective:
        return place.collective in SYNCHRONIZING
    # A blocked member reports the count of one process group only, the same one here.
    is_known = other_place.collective in SYNCHRONIZING or other_place.collective == BUFFERS
    if not is_known or other_place.collective == place.collective:
        return False
    # The source of a buffer broadcast finishes before the others and launches its next operation.
    has_begun_no_more = place.collective == BUFFERS and other_place.launched == place.launched
    return place.collective in SYNCHRONIZING or (has_begun_no_more and other_place.collective in SYNCHRONIZING)
