"""Deadlock: members that wait for one another, each in a round that only another one could complete.

All members must run the same layers in the same order. If one skips a layer, swaps two, or runs one forward pass more,
their rounds never complete: all members wait, nobody is merely late, and no deadline has to pass to know it. This is
what `client.data_parallel.barrier` does for the threads of a process, here for all groups of a job at once: a member
may wait in one group for a member that waits for it in another.

A member is *blocked* while it waits in an open round, for a group to open, or for all to come back from `client.join`.
A member that is not blocked is free, and so is each member that waits for a free one. Those that remain are *stuck*:
nobody who could free them is running. Most jobs wait for few contributions; a search takes time in proportion to these,
and to the ranks of the collectives of torch that members say they are in, so `Mismatches` bounds how often it is made.

A member may also wait in a collective of torch for members that wait here, see `server.core.collectives`: then it is
blocked like one that waits in a round.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from server.core.collectives import Held, held_members, ranks_told
from server.core.registry import Name
from server.group.contributor import Contributor
from server.group.lifecycle import GroupState
from server.group.master import SyncMaster
from statsd_bn.error_text import MOST_ROWS, Place, Row, error_text
from statsd_bn.errors import RoundMismatch
from statsd_bn.limits import SILENCE_SECONDS
from statsd_bn.messages import WORLD
from statsd_bn.round_key import RoundKey, advice_for

# How long members must seem stuck without a change. A member may have further threads, which the server does not see
# before they contribute: overlapping models reach their rounds some milliseconds apart, and in any order. Together with
# TICK_SECONDS of the service this is less than a second.
QUIET_SECONDS = 0.5

# The same for a member that has had more rounds of a group under way at once than it has now: it does have another
# thread, which may be in the middle of a long step. After this long people begin to wonder; any deadline is far longer.
THREADED_QUIET_SECONDS = 10.0

# Places listed in an error, the most crowded first: more would bury the odd one, and the text has its limit.
MAX_TOLD_PLACES = 8

# Numbers of members in the fields of an error.
MAX_TOLD_MEMBERS = 64

# A member that is not known here, and so not known to be blocked. Ranks are not negative.
ANYBODY = -1

WHAT = "the ranks wait for one another in different places, so nobody can go on"
ADVICE_FOR_PASSES = (
    "Run as many passes of client.join on every rank; a model under DistributedDataParallel needs torch's Join around "
    "ours too: `with Join([ddp]), client.join(ddp):`."
)


@dataclass(frozen=True, slots=True)
class Wait:
    """A place where members of one group wait.

    Attributes:
        master: of the group.
        key: the round; None where they wait for the group to open, or for all to come back from a pass.
        since: who waits, and since when.
        missing: whom they wait for.
        held: the member that waits there, if the place is a collective of torch and no round.
    """

    master: SyncMaster
    key: RoundKey | None
    since: Mapping[int, float]
    missing: Collection[int]
    held: Contributor | None = None


def find(masters: Sequence[SyncMaster], now: float, held: Sequence[Held] = ()) -> list[Wait]:
    """Places where members of a job are stuck.

    Args:
        masters: all groups of the job.
        now: the time, on the clock of the masters.
        held: the members that wait in a collective of torch.
    """
    if not held and not _may_be_stuck(masters):
        return []
    waits = [*_waits(masters), *_in_collectives(masters, held)]
    running = _changed(masters, waits, now - QUIET_SECONDS)
    running |= _changed(masters, waits, now - THREADED_QUIET_SECONDS) & _with_more_threads(waits)
    if not held:
        running |= _just_back(waits, now - THREADED_QUIET_SECONDS)
    members = stuck(((wait.since, wait.missing) for wait in waits), running)
    return [wait for wait in waits if not members.isdisjoint(wait.since)]


def _changed(masters: Iterable[SyncMaster], waits: Iterable[Wait], quiet: float) -> set[int]:
    """Members for which something has changed after the time `quiet`."""
    # Whoever was answered runs, even if another thread of it waits elsewhere.
    answered = (master for master in masters if master.open_rounds.answered > quiet)
    changed = {member for master in answered for member in master.membership.contributors}
    return changed | {member for wait in waits for member, since in wait.since.items() if since > quiet}


def _with_more_threads(waits: Iterable[Wait]) -> set[int]:
    """Members that have had more rounds of a group under way at once than they have now."""
    contributors = (wait.master.membership.contributors[member] for wait in waits if wait.key for member in wait.since)
    now = Counter((contributor.session, contributor.member, contributor.threads) for contributor in contributors)
    return {member for (_, member, threads), waiting in now.items() if threads > waiting}


def _just_back(waits: Iterable[Wait], since: float) -> set[int]:
    """Members that are back from a pass only since then: another thread of theirs may be in the middle of a step."""
    return {member for wait in waits if _is_for_pass(wait) for member, at in wait.since.items() if at > since}


def stuck(waits: Iterable[tuple[Iterable[int], Iterable[int]]], running: Iterable[int]) -> set[int]:
    """Members that can never go on, in time linear in the arguments.

    Args:
        waits: for each place the members that wait there, and those they wait for.
        running: members that count as running although they wait somewhere.
    """
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
            waiting.clear()  # another member that this place waits for need not look again
    return blocked


def _may_be_stuck(masters: Iterable[SyncMaster]) -> bool:
    """Whether so many members wait that nobody may be running; the only check while training goes well."""
    sizes = [(round_.nr_waiting, len(round_.futures)) for master in masters for round_ in master.open_rounds]
    sizes += [(master.nr_slaves, master.membership.world_size) for master in masters if _fills(master)]
    sizes += [(len(back), master.nr_slaves) for master in masters if (back := master.membership.returning)]
    return bool(sizes) and sum(waiting for waiting, _ in sizes) >= min(size for _, size in sizes)


def _in_collectives(masters: Iterable[SyncMaster], held: Sequence[Held]) -> Iterator[Wait]:
    of = {
        contributor.session: master
        for master in masters
        if held
        for contributor in master.membership.contributors.values()
    }
    for one in held:
        if master := of.get(one.contributor.session):
            yield Wait(master, None, {one.contributor.member: one.since}, one.missing, one.contributor)


def _waits(masters: Sequence[SyncMaster]) -> Iterator[Wait]:
    for master in masters:
        for round_ in master.open_rounds:
            since = {member: future.since for member, future in round_.futures.items() if future.peer}
            # Where nobody is missing the round waits for any newcomer, because its group has become too small.
            yield Wait(master, round_.key, since, round_.missing or (ANYBODY,))
        if _fills(master):
            contributors = master.membership.contributors
            yield Wait(
                master,
                None,
                {member: contributors[member].since for member in contributors},
                _candidates(master, masters),
            )
        if returning := {one.member: one.since for one in master.membership.returning}:
            others = master.membership.contributors.keys() - returning.keys()
            yield Wait(master, None, returning, others or (ANYBODY,))


def _fills(master: SyncMaster) -> bool:
    """Whether members wait for the group to open; while they come back after a restart of the server they may run."""
    return master.membership.state is GroupState.FILLING


def _is_for_pass(wait: Wait) -> bool:
    """Whether members wait for all others to come back from a pass over their data."""
    return wait.key is None and wait.held is None and wait.master.membership.is_open


def _candidates(master: SyncMaster, masters: Iterable[SyncMaster]) -> Collection[int]:
    """Members that may yet join a group: any other member of the world, if those are known to suffice."""
    for world in masters:
        if world.membership.group == WORLD and world.membership.has_opened:
            others = world.membership.contributors.keys() - master.membership.contributors.keys()
            return others if len(others) >= master.membership.missing else (ANYBODY,)
    return (ANYBODY,)


class Table:
    """Which members wait where, as text and as fields, in bounded size.

    Args:
        waits: the places.
        now: the time, on the clock of the masters.
    """

    def __init__(self, waits: Sequence[Wait], now: float) -> None:
        self._now = now
        self._nr_places = len(waits)
        self._told = sorted(waits, key=lambda wait: (-len(wait.since), min(wait.since)))[:MAX_TOLD_PLACES]
        self._in_groups = len({wait.master.membership.group for wait in waits}) > 1
        self._in_calls = any(wait.key and wait.key.call for wait in waits)
        names = [self._name(wait) for wait in waits]
        self._advice = ADVICE_FOR_PASSES if any(map(_is_for_pass, waits)) else advice_for(names)
        self._places = [self._place(wait) for wait in self._told]
        self._fields = [self._field(wait) for wait in self._told]

    def error(self, wait: Wait) -> RoundMismatch:
        """Error for the members at one of the places."""
        membership = wait.master.membership
        name = {"job": membership.job, "group": membership.group}
        text = error_text(
            WHAT,
            table=self._places,
            more_places=self._nr_places - len(self._places),
            where=self._where(wait.master),
            advice=self._advice,
        )
        return RoundMismatch(
            text, **(wait.key.fields if wait.key else name), table=self._fields, places=self._nr_places
        )

    def _where(self, master: SyncMaster) -> str:
        name = f"job {master.membership.job!r}"
        return f"{name}, epoch {master.epoch}" if self._in_groups else f"{master.membership.name}, epoch {master.epoch}"

    def _place(self, wait: Wait) -> Place:
        name = self._name(wait)
        first = sorted(wait.since)[:MOST_ROWS]
        return Place([self._row(wait, member, name) for member in first], len(wait.since), name)

    def _row(self, wait: Wait, member: int, name: str) -> Row:
        seconds = self._now - wait.since[member]
        if wait.held:
            return Row((str(wait.held), f"waits {seconds:.1f} s", name), (f"{wait.held} {wait.held.where(self._now)}",))
        return Row((str(wait.master.membership.contributors[member]), f"waits {seconds:.1f} s", name))

    def _name(self, wait: Wait) -> str:
        if wait.held:
            return "in a collective of torch"
        if _is_for_pass(wait):
            return "for all to come back from client.join"
        if wait.key is None:
            return f"for group {wait.master.membership.group!r} to open"
        return f"in {wait.key.in_words(with_call=self._in_calls, with_group=self._in_groups)}"

    def _field(self, wait: Wait) -> dict[str, Any]:
        key = wait.key
        place = {"step": key.step, "layer": key.layer, "call": key.call, "phase": key.phase} if key else {}
        return {
            "members": sorted(wait.since)[:MAX_TOLD_MEMBERS],
            "nr_members": len(wait.since),
            "seconds": self._now - min(wait.since.values()),
            "group": wait.master.membership.group,
            **place,
            **({"stack": wait.held.place_in_code} if wait.held else {}),
        }


# A job that waits for at most so many is searched each time: 60 µs.
FEW_WAITS = 256

# One contribution takes a quarter of a microsecond. A job is searched for a twentieth of the time at most, and all
# together for 30 ms at a time.
PAUSE_SECONDS_EACH = 5e-6
MOST_WAITS = 2**17

# So many ranks of a collective take as long as one contribution: 70 ns each.
RANKS_OF_ONE = 4

NOBODY_ASKED: Mapping[str, Sequence[Contributor]] = MappingProxyType({})


class Mismatches:
    """Finds members that wait for one another.

    A job that waits for more than `MOST_WAITS` contributions at a time is not searched: its rounds end at their
    deadlines.

    Args:
        silence: how long a member may be silent, in seconds.
    """

    def __init__(self, silence: float = SILENCE_SECONDS) -> None:
        self._silence = silence
        self._due: dict[str, float] = {}

    def find(
        self, now: float, groups: Mapping[Name, SyncMaster], asked: Mapping[str, Sequence[Contributor]] = NOBODY_ASKED
    ) -> Iterator[list[Wait]]:
        """Where members are stuck, for each job that has such members; call it often.

        Args:
            now: the time.
            groups: all groups of all jobs.
            asked: by job, the members that have been asked where they are.
        """
        jobs: dict[str, list[SyncMaster]] = defaultdict(list)
        for (job, _), master in groups.items():
            jobs[job].append(master)
        self._due = {job: due for job, due in self._due.items() if job in jobs}
        left = MOST_WAITS
        for job in sorted(jobs, key=lambda job: self._due.get(job, 0.0)):
            contributors = asked.get(job, ())
            size = sum(master.nr_slaves * (1 + len(master.open_rounds)) for master in jobs[job])
            size += ranks_told(contributors) // RANKS_OF_ONE
            if size > FEW_WAITS:
                if now < self._due.get(job, 0.0) or size > left:
                    continue
                left -= size
                self._due[job] = now + size * PAUSE_SECONDS_EACH
            if waits := find(jobs[job], now, held_members(contributors, self._silence)):
                yield waits
