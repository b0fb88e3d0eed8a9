"""Deadlock: members that wait for each other, each in a round that only another one can complete.

If a member skips a layer, swaps two, or runs an extra forward pass, the rounds never complete. The server reports this
without waiting for a deadline. The search covers all groups of a job, because a member may wait in one group for a
member that waits for it in another.

A member is *blocked* while it waits in an open round, for a group to open, for all members to return from
`client.join`, or in a torch collective that another member has not reached. A member that is not blocked is free, and
so is each member that waits for a free one. The remaining members are *stuck*: no running member can release them.

torch counts the operations that a process has launched on a process group. All ranks launch the same operations in the
same order, so a rank inside its n-th operation needs every rank that has launched fewer than n. A rank with an unknown
count is needed, too, so that the search never reports a deadlock that this rank could still resolve.

Ranks that run different programs may reach the same count in different operations, and gloo also counts point-to-point
messages. So a blocked rank also needs a rank that has launched enough operations but has long been elsewhere: if both
had launched the same collective, it would have released both. Only collectives that release all ranks at once allow
this conclusion: the source of a broadcast may already be in the next barrier while the others receive a large tensor.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.core.registry import GroupName
from server.group.contributor import Contributor, StackSample, group_of
from server.group.master import SyncMaster
from statsd_bn.errors import RoundMismatch
from statsd_bn.limits import SILENCE_SECONDS
from statsd_bn.messages import ALL_GATHER, ALL_REDUCE, BARRIER, BUFFERS, WORLD, StackReport
from statsd_bn.round_key import RoundKey, advice_for
from statsd_bn.text import MAX_ROWS, Row, TableSection, error_text

# How long members must stay stuck without a change. The server sees a member's other threads only once they contribute:
# models in several threads reach their rounds milliseconds apart, in any order. A deadlock of members with one thread
# is reported within a second, TICK_SECONDS of the service included.
QUIET_SECONDS = 0.5

# QUIET_SECONDS of a member that had more concurrent rounds in a group than it has now: its other thread may be in the
# middle of a long step. Deadlines are far longer than this.
THREADED_QUIET_SECONDS = 10.0

# An error lists at most MAX_POSITIONS positions, the ones with most members first, to keep its text short. Its fields
# list at most MAX_LISTED_MEMBERS members for each position.
MAX_POSITIONS, MAX_LISTED_MEMBERS = 8, 64

UNKNOWN_MEMBER = -1  # stands for a rank that has not registered and may be running; ranks are not negative

# These collectives release no rank before all have launched them, and then all at about the same time.
SYNCHRONIZING = frozenset({BARRIER, ALL_REDUCE, ALL_GATHER})

# How long two ranks must stay in different places, as a multiple of the allowed silence: a network that delayed a
# collective for so long would delay heartbeats too, and the ranks would be lost instead.
APART_SILENCES = 1.5

SUMMARY = "deadlock: the ranks wait in different places"
ADVICE_FOR_PASSES = (
    "Run as many passes of client.join on every rank; a model under DistributedDataParallel needs torch's Join around "
    "ours too: `with Join([ddp]), client.join(ddp):`."
)


@dataclass(frozen=True, slots=True)
class Wait:
    """Members of one group that wait at the same position."""

    master: SyncMaster
    key: RoundKey | None  # None if they wait for the group to open, or for all members to return from a pass
    since: Mapping[int, float]  # start of the wait by member
    missing: Collection[int]  # the members that they wait for
    blocked: Contributor | None = None  # the waiting member if it waits in a torch collective

    @property
    def is_for_pass(self) -> bool:
        """Whether members wait for the others to return from a pass over their data."""
        return self.key is None and self.blocked is None and self.master.membership.is_open


def _count_reported_ranks(masters: Iterable[SyncMaster]) -> int:
    """Total number of ranks in the reports of blocked members, which determines the cost of `blocked_members`."""
    members = (one for master in masters for one in master.membership.contributors.values())
    blocked_in = (one.stack_sample.blocked_in for one in members if one.stack_sample)
    return sum(len(collective.members) for collective in blocked_in if collective)


def blocked_members(masters: Iterable[SyncMaster], apart: float) -> list[Wait]:
    """Members that are blocked in a torch collective, each with the ranks that may not have launched it."""
    members = ((master, one) for master in masters for one in master.membership.contributors.values())
    samples = {one.member: (master, one, one.stack_sample) for master, one in members if one.stack_sample}
    found = []
    for master, contributor, sample in samples.values():
        if (collective := sample.blocked_in) is None:
            continue
        others = [member for member in collective.members if member != contributor.member]
        known = ((member, samples[member][2]) for member in others if member in samples)
        has_arrived = {member: _has_arrived(other, sample, collective, apart) for member, other in known}
        if False in has_arrived.values():
            missing = frozenset(member for member in others if not has_arrived.get(member))
            found.append(Wait(master, None, {contributor.member: sample.since}, missing, contributor))
    return found


def _has_arrived(other: StackSample, blocked: StackSample, collective: StackReport, apart: float) -> bool | None:
    """Whether a member has reached the collective in which another one is blocked; None if unknown."""
    group = group_of(collective)
    has_launched = other.has_launched(group, collective.launched)
    if not has_launched or not (other.latest and _is_elsewhere(other.latest, collective)):
        return has_launched
    (begin, end), (other_begin, other_end) = blocked.steady_period(group), other.steady_period(group)
    return min(end, other_end) - max(begin, other_begin) < apart


def _is_elsewhere(other: StackReport, blocked: StackReport) -> bool:
    """Whether a member's position contradicts its count, by which it has launched the blocked member's collective."""
    if not other.in_collective:
        return blocked.collective in SYNCHRONIZING
    # Both `launched` counts are of one process group: a member in a collective reports only the collective's group.
    is_known = other.collective in SYNCHRONIZING or other.collective == BUFFERS
    if not is_known or other.collective == blocked.collective:
        return False
    # The source of a buffer broadcast finishes before the others and launches its next operation.
    cannot_be_source = blocked.collective == BUFFERS and other.launched == blocked.launched
    return blocked.collective in SYNCHRONIZING or (cannot_be_source and other.collective in SYNCHRONIZING)


def find_deadlocks(masters: Sequence[SyncMaster], now: float, blocked: Sequence[Wait] = ()) -> list[Wait]:
    """Find the positions in which members of a job are stuck."""
    if not blocked and not _may_be_stuck(masters):
        return []
    waits = [*_waits(masters), *blocked]
    running = _changed_since(masters, waits, now - QUIET_SECONDS)
    running |= _changed_since(masters, waits, now - THREADED_QUIET_SECONDS) & _with_more_threads(waits)
    # Another thread of a member that has just returned from a pass may be in the middle of a step.
    back = [] if blocked else [wait.since.items() for wait in waits if wait.is_for_pass]
    running |= {member for since in back for member, at in since if at > now - THREADED_QUIET_SECONDS}
    members = stuck(((wait.since, wait.missing) for wait in waits), running)
    return [wait for wait in waits if not members.isdisjoint(wait.since)]


def _changed_since(masters: Iterable[SyncMaster], waits: Iterable[Wait], quiet: float) -> set[int]:
    """Members that got an answer or began to wait after the time `quiet`."""
    # A member that got an answer is running, even if another of its threads waits elsewhere.
    answered = (master for master in masters if master.last_answered > quiet)
    changed = {member for master in answered for member in master.membership.contributors}
    return changed | {member for wait in waits for member, since in wait.since.items() if since > quiet}


def _with_more_threads(waits: Iterable[Wait]) -> set[int]:
    """Members that had more concurrent rounds in a group than they have now."""
    contributors = (wait.master.membership.contributors[member] for wait in waits if wait.key for member in wait.since)
    now = Counter((contributor.session, contributor.member, contributor.threads) for contributor in contributors)
    return {member for (_, member, threads), waiting in now.items() if threads > waiting}


def stuck(waits: Iterable[tuple[Iterable[int], Iterable[int]]], running: Iterable[int]) -> set[int]:
    """Members that no running member can release, in linear time; `waits` are pairs of waiting and missing members."""
    waiting_for: dict[int, list[set[int]]] = defaultdict(list)
    blocked: set[int] = set()
    for members, missing in waits:
        waiting = set(members)
        blocked |= waiting
        for member in missing:
            waiting_for[member].append(waiting)
    blocked.difference_update(running)
    free = [member for member in waiting_for if member not in blocked]
    while free:
        for waiting in waiting_for[free.pop()]:
            freed = blocked & waiting
            blocked -= freed
            free += freed
            waiting.clear()  # this wait is resolved; skip it for its other missing members
    return blocked


def _may_be_stuck(masters: Iterable[SyncMaster]) -> bool:
    """Whether so many members wait that a deadlock is possible: the only check while training succeeds."""
    rounds = (round_ for master in masters for round_ in master.open_rounds.values())
    sizes = [(len(one.futures) - one.nr_missing, len(one.futures)) for one in rounds]
    sizes += [(master.nr_slaves, master.membership.world_size) for master in masters if master.membership.is_filling]
    sizes += [(len(back), master.nr_slaves) for master in masters if (back := master.membership.rejoining)]
    return bool(sizes) and sum(waiting for waiting, _ in sizes) >= min(size for _, size in sizes)


def _waits(masters: Sequence[SyncMaster]) -> Iterator[Wait]:
    for master in masters:
        for round_ in master.open_rounds.values():
            since = {member: future.since for member, future in round_.futures.items() if future.peer}
            # A round without missing members waits for a newcomer, because its group has fewer than `min_members`.
            yield Wait(master, round_.key, since, round_.missing or (UNKNOWN_MEMBER,))
        if master.membership.is_filling:  # not after a restart: members that return may be running
            arrived = {member: contributor.since for member, contributor in master.membership.contributors.items()}
            yield Wait(master, None, arrived, _candidates(master, masters))
        if returning := {one.member: one.since for one in master.membership.rejoining}:
            others = master.membership.contributors.keys() - returning.keys()
            yield Wait(master, None, returning, others or (UNKNOWN_MEMBER,))


def _candidates(master: SyncMaster, masters: Iterable[SyncMaster]) -> Collection[int]:
    """Members that may still join a group: the other members of the world, if there are enough of them."""
    for world in masters:
        if world.membership.group == WORLD and world.membership.has_opened:
            others = world.membership.contributors.keys() - master.membership.contributors.keys()
            return others if len(others) >= master.membership.missing else (UNKNOWN_MEMBER,)
    return (UNKNOWN_MEMBER,)


class Table:
    """Which members wait where, as text and as fields, in bounded size."""

    def __init__(self, waits: Sequence[Wait], now: float) -> None:
        self._now = now
        self._nr_positions = len(waits)
        self._in_groups = len({wait.master.membership.group for wait in waits}) > 1
        self._in_calls = any(wait.key and wait.key.call for wait in waits)
        is_for_pass = any(wait.is_for_pass for wait in waits)
        self._advice = ADVICE_FOR_PASSES if is_for_pass else advice_for([self._name(wait) for wait in waits])
        listed = sorted(waits, key=lambda wait: (-len(wait.since), min(wait.since)))[:MAX_POSITIONS]
        self._sections = [self._section(wait) for wait in listed]
        self._fields = [self._field(wait) for wait in listed]

    def error(self, wait: Wait) -> RoundMismatch:
        """Error for the members in one position."""
        membership = wait.master.membership
        name = f"job {membership.job!r}" if self._in_groups else membership.name
        where, more = f"{name}, epoch {wait.master.epoch}", self._nr_positions - len(self._sections)
        text = error_text(SUMMARY, table=self._sections, more_sections=more, where=where, advice=self._advice)
        fields = wait.key.fields if wait.key else {"job": membership.job, "group": membership.group}
        return RoundMismatch(text, **fields, table=self._fields, places=self._nr_positions)

    def _section(self, wait: Wait) -> TableSection:
        name, contributors = self._name(wait), wait.master.membership.contributors
        rows = []
        for member in sorted(wait.since)[:MAX_ROWS]:
            who = wait.blocked or contributors[member]
            below = (f"{who} {who.position(self._now)}",) if wait.blocked else ()
            rows.append(Row((str(who), f"waits {self._now - wait.since[member]:.1f} s", name), below))
        return TableSection(rows, len(wait.since), name)

    def _name(self, wait: Wait) -> str:
        if wait.blocked:
            return "in a collective of torch"
        if wait.is_for_pass:
            return "for all ranks to leave client.join"
        if wait.key is None:
            return f"for group {wait.master.membership.group!r} to open"
        return f"in {wait.key.describe(with_call=self._in_calls, with_group=self._in_groups)}"

    def _field(self, wait: Wait) -> dict[str, Any]:
        key = wait.key
        of_round = {"step": key.step, "layer": key.layer, "call": key.call, "phase": key.phase} if key else {}
        return {
            "members": sorted(wait.since)[:MAX_LISTED_MEMBERS],
            "nr_members": len(wait.since),
            "seconds": self._now - min(wait.since.values()),
            "group": wait.master.membership.group,
            **of_round,
            **({"stack": wait.blocked.stack} if wait.blocked else {}),
        }


# A search takes 0.25 µs per missing contribution. The limits below bound the searches of each job to 5 % of the time (a
# small job is still searched in each tick), and the searches of all jobs to 30 ms per tick.
PAUSE_SECONDS_EACH = 5e-6
MAX_WAITS = 2**17
RANKS_PER_WAIT = 4  # a rank of a reported collective takes 70 ns, a quarter of a missing contribution's time


class DeadlockDetector:
    """Searches all jobs for deadlocks.

    A job with more than `MAX_WAITS` missing contributions is not searched: its rounds end at their deadlines.
    """

    def __init__(self, silence: float = SILENCE_SECONDS) -> None:
        self._apart = APART_SILENCES * silence
        self._due: dict[str, float] = {}

    def find(self, now: float, groups: Mapping[GroupName, SyncMaster]) -> Iterator[list[Wait]]:
        """Yield the waits of each deadlocked job at a tick."""
        jobs: dict[str, list[SyncMaster]] = defaultdict(list)
        for (job, _), master in groups.items():
            jobs[job].append(master)
        self._due = {job: due for job, due in self._due.items() if job in jobs}
        left = MAX_WAITS
        for job in sorted(jobs, key=lambda job: self._due.get(job, 0.0)):
            size = sum(master.nr_slaves * (1 + len(master.open_rounds)) for master in jobs[job])
            size += _count_reported_ranks(jobs[job]) // RANKS_PER_WAIT
            if now < self._due.get(job, 0.0) or size > left:
                continue
            left -= size
            self._due[job] = now + size * PAUSE_SECONDS_EACH
            if waits := find_deadlocks(jobs[job], now, blocked_members(jobs[job], self._apart)):
                yield waits
