"""Verdict: the state of a group in one sentence, with the cards and flags of its ranks. Pure.

The page and `status` print these words and decide nothing themselves, so they cannot contradict each other.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.group.health import MAX_DELAY_SHARE, WINDOW_SECONDS
from statsd_bn.members import Members, format_ranks
from statsd_bn.messages import format_missing_members
from statsd_bn.round_key import FORWARD, GATHER, MEMORY_GATHER
from statsd_bn.skew import describe_outlier
from statsd_bn.text import duration, percent, two_digits
from statsd_bn.timing import quantile

Group = Mapping[str, Any]

FINE, NOTICE, ATTENTION, BROKEN = range(4)  # severities; a notice is worth a look

# Text for the time after which a round fails; the ranks set this time.
ROUND_TIMEOUT = "their round_timeout, 600 s by default"

# A wait is unusual after the longer of WAIT_SECONDS and twice the p99 delay of last ranks, or after LONG_SECONDS.
WAIT_SECONDS, LONG_SECONDS = 1.0, 10.0

ENDS = {"fails": "failed", "is lost": "was lost", "leaves": "left"}  # what the rank that broke the group did, by `how`
# The server's text for a rank that sends no more heartbeats, with the seconds since the last one if known.
NO_SIGN_OF_LIFE = re.compile(r"no sign of life(?: for (\d{1,9}\.\d) s)?")
_FOLDER = re.compile(r"(?<=ipc://)\S+(?=/)")  # of an endpoint; the page omits it too


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of a group."""

    state: str  # "healthy", "forming", "waiting", "slow", "data", "broken", "ended" or "silent"
    severity: int
    text: str  # one sentence; its start up to ": " or "; " can stand alone
    since: float | None = None  # seconds since 1970
    step: int | None = None  # the first step with the problem; for a slow rank the step at which it was noticed
    rank: int | None = None  # the rank concerned, if there is only one
    advice: str = ""  # what to do, as a short sentence
    flags: Mapping[int, str] = field(default_factory=dict)  # a word for each rank concerned
    card: tuple[str, ...] = ()  # the name of the card that it replaces, with value and note
    lag: float = 0.0  # seconds from its beginning to the first report with it

    def entry(self, others: Sequence["Verdict"] = ()) -> dict[str, Any]:
        """The verdict as a snapshot has it, with the texts of the group's other verdicts as `also`."""
        names = "state", "severity", "text", "since", "step", "rank", "advice"
        return {**{name: getattr(self, name) for name in names}, "also": [other.text for other in others]}


def verdicts(group: Group, now: float, restarted: float | None = None) -> list[Verdict]:
    """All verdicts of a group of a snapshot or report, the most urgent first. `restarted`: time of a recent restart."""
    found = [*_breaks(group), *_non_finite(group)]
    if "over" not in group and not group["lost"]:
        found += [*_forming(group, now, restarted), *_waiting(group, now), *_slow(group)]
    found += _differing(group)
    if "over" in group and not group["lost"]:
        return [_fine(group, now, restarted), *found]
    return sorted(found, key=lambda verdict: -verdict.severity) or [_fine(group, now, restarted)]


def of_server(error: str, answered: float) -> Verdict:
    """The verdict on a server without groups, or on all groups of a server that does not answer."""
    if not error:
        return Verdict("forming", NOTICE, "No job yet: it appears here once its ranks connect")
    reason, _, rest = error.partition("; ")
    remedy = rest.rpartition("; ")[2].removesuffix(".") or "Look at the server's log, and start it again"
    text = f"The server does not answer: {_FOLDER.sub('...', reason)}"
    advice = f"{remedy[:1].upper()}{remedy[1:]}{'' if remedy.endswith('?') else '.'} "
    advice += "Ranks wait for a server that does not answer, unless their rounds bypass it."
    return Verdict("silent", BROKEN, text, answered, advice=advice)


def _name(group: Group, rank: int) -> str:
    place = next((member["place"] for member in group["members"] if member["member"] == rank), "")
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def name_ranks(ranks: Iterable[int], more: int = 0) -> str:
    """Ranks by number, and how many others, such as "ranks 0-7 and 4 more"."""
    return format_ranks(Members.of(ranks)) + (f" and {more} more" if more else "")


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def count_here(group: Group) -> str:
    """How many of the group's ranks are here, such as "3 of 4"."""
    here = sum(not member.get("is_gone") for member in group["members"])
    return f"{here + group.get('members_left_out', 0)} of {group['world_size']}"


def _breaks(group: Group) -> Iterator[Verdict]:
    if not is_broken(group):
        return
    if not (by := group.get("lost_by")):
        card = "Ranks", count_here(group), "the job is broken"
        advice = "Look at the ranks' logs, and start the job again."
        yield Verdict("broken", BROKEN, f"Broken: {group['lost']}", advice=advice, card=card)
        return
    rank, cause, lag = by["rank"], by["cause"], 0.0
    if by["how"] == "fails":
        kind, _, message = cause.partition(": ")
        flag, did, why = "failed", f"raised {kind}", f": {message}" if message else ""
        advice = f"Look at the traceback of rank {rank}, and start the job again."
    elif by["how"] == "leaves":
        flag, did, why = "left", "left", ", before the others finished"
        advice = "Give all ranks equally many batches, or use client.join."
    elif silence := NO_SIGN_OF_LIFE.match(cause):
        lag = float(silence[1] or 0.0)
        flag, did, why = "lost", "fell silent", f": declared lost after {lag:g} s without a sign of life" if lag else ""
        advice = f"Rank {rank} may be stopped, starved or cut off. End it if it still runs, then start the job again."
    else:
        flag, did, why = "lost", "was lost", f": {cause}"
        advice = f"Look at the log of rank {rank} and its host: killed, or out of memory? Then start the job again."
    text = f"Broken: rank {rank} ({by['place']}) {did} at step {by['step']}{why}"
    card = "Ranks", f"Rank {rank} {flag}", f"of {_ranks(group['world_size'])}"
    yield Verdict("broken", BROKEN, text, lag=lag, rank=rank, advice=advice, flags={rank: flag}, card=card)


def is_broken(group: Group) -> bool:
    """Whether the group broke before its members had finished; some may still be here."""
    return bool(group["lost"]) and not is_finishing(group)


def is_finishing(group: Group) -> bool:
    """Whether the members leave one by one, as at the end of a script: no round failed, no contribution was refused."""
    how, needed = (group.get("lost_by") or {}).get("how"), group["rounds_failed"] or group.get("refused")
    return how == "leaves" and not needed and "over" not in group


def _non_finite(group: Group) -> Iterator[Verdict]:
    if not (first := group.get("first_non_finite")):
        return
    ranks, step, more = first["ranks"], first["step"], first.get("ranks_left_out", 0)
    what = first["what"].replace("inf", "infinity") or "NaN or infinity"
    who = name_ranks(ranks, more)
    by = group.get("lost_by")
    before = f", {by['step'] - step} steps earlier" if by and by["step"] > step else ""
    channels = f", in {first['channels']} of {first['of']} channels" if first["of"] else ""
    subject = f"{who.capitalize()} brought the first {what}"
    text = f"{subject}: {first['phase']} of {first['layer']}, step {step}{before}{channels}"
    advice = f"Stop, and go back to a checkpoint before step {step}. Check the batch of {who} in that step, "
    advice += (
        f"and {'what enters' if first['phase'] == FORWARD else 'the loss and the gradients after'} {first['layer']}."
    )
    rank = ranks[0] if len(ranks) == 1 and not more else None
    flags = dict.fromkeys(ranks, "NaN" if "NaN" in what else "inf")
    card = "Numbers", f"{who.capitalize()}: {what}", f"step {step}, {first['layer']}"
    yield Verdict("data", BROKEN, text, None, step, rank, advice, flags, card)


def _forming(group: Group, now: float, restarted: float | None) -> Iterator[Verdict]:
    if not group["missing"]:
        return
    present = Members.of(member["member"] for member in group["members"])
    whom = format_missing_members(group["group"], group["world_size"], present, group["missing"])
    if group["missing"] == group["world_size"]:
        whom = "all ranks"
    elif group.get("members_left_out"):
        whom = f"{group['missing']} ranks"
    severity, since, advice = NOTICE, None, "Check that the other processes have started."
    text = f"Waiting for {whom} to join: {count_here(group)} ranks are here"
    if restarted is not None:
        severity, since, advice = ATTENTION, restarted, "The ranks return by themselves within seconds."
        text = f"The server restarted {duration(now - restarted)} ago: waiting for {whom} to return"
    yield Verdict("forming", severity, text, since, advice=advice, card=("Ranks", count_here(group), "have connected"))


def awaited(group: Group) -> Mapping[str, Any] | None:
    """The group's oldest open round, if it is open for unusually long."""
    if "over" in group or not group["waiting"]:
        return None
    oldest: Mapping[str, Any] = max(group["waiting"], key=lambda round_: round_["seconds"])
    unusual = max(WAIT_SECONDS, 2 * _usual_wait(group))
    return oldest if oldest["seconds"] >= min(unusual, LONG_SECONDS) else None


def _usual_wait(group: Group) -> float:
    """How late the last rank is at most in 99 of 100 rounds, in seconds; 0 if unknown."""
    late = group.get("late_seconds")
    return quantile(late["counts"], 0.99) if late else 0.0


def place_of(round_: Mapping[str, Any]) -> str:
    """Where a round is, for people."""
    if round_["layer"] == MEMORY_GATHER:
        return "setting up shared memory"
    return f"the gather {round_['layer']}" if round_["phase"] == GATHER else str(round_["layer"])


def _waiting(group: Group, now: float) -> Iterator[Verdict]:
    if not (round_ := awaited(group)):
        return
    time, where, missing = duration(round_["seconds"]), place_of(round_), round_["missing"]
    rank, advice, place = None, "Look at what these ranks do now.", ""
    card = "Waiting", "Several ranks", f"awaited for {time}"
    if not missing:
        if (absent := group["min_members"] - len(group["members"])) <= 0:
            return
        whom, place = f"{_ranks(absent)} to join", f": min_members is {group['min_members']}"
        advice = "Start the missing processes."
        card = "Ranks", count_here(group), f"at least {group['min_members']} must take part"
    elif len(missing) > 1 or round_.get("missing_left_out"):
        more = round_.get("missing_left_out", 0)
        whom = f"{len(missing) + more} ranks" if more else name_ranks(missing)
        place = f"; the others are at step {round_['step']}"
    else:
        (rank,) = missing
        whom = _name(group, rank)
        does = next((member.get("where", "") for member in group["members"] if member["member"] == rank), "")
        place = f"; it {does}" if does else ""
        advice = f"Look at that line in the script of rank {rank}." if does else f"Look at what rank {rank} does now."
        if does.startswith("has not answered"):
            advice = f"Look at the process of rank {rank}: it is stopped, starved, or one of its threads holds the GIL."
        card = "Waiting", f"Rank {rank}", f"awaited for {time}"
    if missing:
        if round_["seconds"] < LONG_SECONDS:
            advice = f"If this wait lasts {LONG_SECONDS:g} s or more, {advice[:1].lower()}{advice[1:]}"
        if usual := _usual_wait(group):
            advice += f" In 99 of 100 rounds the last rank is at most about {duration(usual)} late."
        advice += f" The others raise RoundTimeout after {ROUND_TIMEOUT}."
    text, flags = f"Waiting for {whom} for {time} in {where}{place}", dict.fromkeys(missing, "awaited")
    yield Verdict("waiting", ATTENTION, text, now - round_["seconds"], None, rank, advice, flags, card)


def held_share(group: Group) -> float:
    """Share of the last minute that the others waited for the slowest rank; 0 unless a whole minute was measured."""
    return float(group.get("held", 0.0)) if _is_whole(group) else 0.0


def _is_whole(group: Group) -> bool:
    return bool(group.get("held_seconds", WINDOW_SECONDS) >= WINDOW_SECONDS)


def _slow(group: Group) -> Iterator[Verdict]:
    rank, held = group.get("slowest"), held_share(group)
    if rank is None or held < MAX_DELAY_SHARE:
        return
    text = f"R{_name(group, rank)[1:]} slows the job down: the others waited {percent(held)} of the last minute for it"
    advice = f"Compare the data loading, the GPU and the CPU of rank {rank} with another rank's."
    noticed = [one["step"] for one in group.get("findings", ()) if (one["kind"], one["rank"]) == ("straggler", rank)]
    yield Verdict("slow", ATTENTION, text, None, noticed[-1] if noticed else None, rank, advice, {rank: "slow"})


def describe_finding(finding: Mapping[str, Any]) -> str:
    """A finding of the server as a sentence, with the step of its numbers unless they are of the present."""
    rank, at = finding["rank"], " (now)" if finding.get("is_present") else f" (at step {finding['step']})"
    if finding["kind"] != "skew" or "since" not in finding:
        return f"{finding['text'][:1].upper()}{finding['text'][1:]}{at}"
    if "other" in finding:
        since = f"equal in all layers since step {finding['since']}"
        return f"Rank {rank} has the same data as rank {finding['other']}: {since}"
    numbers = {name: finding[name] for name in ("since", "variance", "shift", "part", "usual")}
    numbers["layers"] = 1  # leave out the number of later layers: it changes, and the map shows it
    return f"Rank {rank}'s data look different: {describe_outlier(finding['layer'], **numbers)}{at}"


def _differing(group: Group) -> Iterator[Verdict]:
    for finding in group.get("findings", ()):
        if finding["kind"] != "skew" or finding.get("cleared"):
            continue
        rank, text = finding["rank"], describe_finding(finding)
        flag, does, advice = "differs", "differs", f"Check how rank {rank} loads and scales its inputs."
        if "other" in finding:
            flag, does, advice = "same", "has a copy", "Check that they do not use the same shard or seed."
        advice += (
            f" If that is wrong, stop, and go back to a checkpoint before step {finding.get('since', finding['step'])}."
        )
        card = "Data", f"Rank {rank} {does}", text.partition(": ")[2]
        yield Verdict("data", ATTENTION, text, None, finding.get("since"), rank, advice, {rank: flag}, card)


def _fine(group: Group, now: float, restarted: float | None) -> Verdict:
    if over := group.get("over"):
        text = f"Finished in good order: {_ranks(group['world_size'])}, {group['rounds_done']} rounds"
        return Verdict("ended", NOTICE, text, over["time"])
    if is_finishing(group):
        return Verdict("ended", NOTICE, f"Finishing: {count_here(group)} ranks are still here")
    here = len(group["members"]) + group.get("members_left_out", 0)
    if restarted is not None:
        ago = f"the server restarted {duration(now - restarted)} ago"
        if silence := group.get("silence"):
            ago += f" after {duration(silence)} without an answer"
        ago += f", {count_here(group)} ranks are back"
        advice = "Nothing to do: the ranks have sent again what was lost."
        return Verdict("healthy", FINE, f"Healthy again: {ago}", restarted, advice=advice)
    is_whole = here == group["world_size"] > 1
    facts = [f"{'all ' * is_whole}{_ranks(here)} take{'s' * (here == 1)} part"]
    if group.get("slowest") is not None:
        facts.append("none is slow" + " so far" * (not _is_whole(group)))
    if group.get("compared_layers"):
        facts.append("their data look alike")
    return Verdict("healthy", FINE, f"Healthy: {', '.join(facts)}, no NaN so far", advice="Nothing to do.")


def doing(group: Group, member: Mapping[str, Any]) -> str:
    """What a member does now, in plain words."""
    rank, where = member["member"], member.get("where", "")
    if member.get("is_gone") or "over" in group:
        by = group.get("lost_by") or {"rank": None}
        return ENDS[by["how"]] if rank == by["rank"] else "has left"
    if member["participation"] != "takes_part":
        return "is away" if member["participation"] == "paused" else "rejoins"
    if is_broken(group):
        return "ends with the job" if rank != group.get("lost_by", {}).get("rank") else ENDS[group["lost_by"]["how"]]
    if round_ := awaited(group):
        time, at = duration(round_["seconds"]), place_of(round_)
        if rank in round_["missing"]:
            return f"the others wait {time} for it in {at}" + (f"; it {where}" if where else "")
        # With an incomplete list of missing members it is unknown which members wait.
        if not round_.get("missing_left_out"):
            return f"waits {time} in {at}"
    return where or "takes part"


def with_flag(group: Group, member: Mapping[str, Any], found: list[Verdict]) -> dict[str, Any]:
    """A member of a snapshot, with its flag and its times."""
    rank, trip = member["member"], member.get("round_trip") or {"median": None, "p99": None}
    verdict = next((one for one in found if rank in one.flags), None)
    is_away = member["participation"] == "paused"
    share = group["held"] if group.get("slowest") == rank else 0.0 if "slowest" in group else None
    return {
        "steps_per_second": None,
        "late": None,
        "waiting": None,
        **member,
        "median": trip["median"],
        "p99": trip["p99"],
        "share": share,
        "doing": doing(group, member),
        "flag": verdict.flags[rank] if verdict else "away" if is_away else "",
        "severity": verdict.severity if verdict else NOTICE if is_away else 0,
    }


def cards(group: Group, found: list[Verdict]) -> list[dict[str, str]]:
    """Five facts at a glance, each with `name`, `value`, `note` and `state` ("good", "watch", "bad" or "unknown")."""
    states = "good", "good", "watch", "bad"
    shown = {card[0]: card for card in _usual_cards(group)}
    shown |= {one.card[0]: (*one.card, states[one.severity]) for one in reversed(found) if one.card}
    return [dict(zip(("name", "value", "note", "state"), card, strict=True)) for card in shown.values()]


def _usual_cards(group: Group) -> Iterator[tuple[str, ...]]:
    """The cards without a verdict: name, value, note and state."""
    rounds, layers, is_over = group["rounds_done"], group.get("compared_layers", 0), "over" in group
    here, size, rate = count_here(group), group["world_size"], group.get("rounds_per_second")
    if is_over:
        yield "Ranks", str(size), "have ended", "unknown"
        yield "Speed", "Ended", f"{rounds} rounds", "unknown"
    elif is_broken(group):
        yield "Ranks", here, "are still here", "bad"
        yield "Speed", "Stopped", f"after {rounds} rounds", "unknown"
    else:
        round_ = awaited(group)
        late = len(round_["missing"]) + round_.get("missing_left_out", 0) if round_ else 0
        take_part = "all take part" if here == f"{size} of {size}" else "take part"
        yield "Ranks", here, f"{late} awaited" if late else take_part, "watch" if late else "good"
        note = f"{rounds} rounds so far"
        if trip := group.get("round_trip_seconds"):
            median, most = (duration(quantile(trip["counts"], part)) for part in (0.5, 0.99))
            note = f"{median} round trip, {most} p99 so far"
        if round_:
            yield "Speed", "Held up", f"a round is open for {duration(round_['seconds'])}", "watch"
        elif rate is None:
            yield "Speed", "Not known yet", note, "unknown"
        else:
            is_slow = held_share(group) >= MAX_DELAY_SHARE
            note = f"slowed down by rank {group['slowest']}" if is_slow else note
            yield "Speed", f"{two_digits(rate)} rounds/s", note, "watch" if is_slow else "good"
    yield _waiting_card(group)
    if group.get("first_non_finite"):
        note = f"since the first NaN or infinity{'; the map has older values' * bool(layers)}"
        yield "Data", "Not comparable", note, "unknown"
    elif layers:
        yield "Data", "All alike", f"{size} ranks in {layers} layers", "good"
    else:
        yield "Data", "Not compared", "the job is elastic" if group["min_members"] else "no sample yet", "unknown"
    yield "Numbers", "All finite", f"no NaN in {rounds} rounds", "good"


def _waiting_card(group: Group) -> tuple[str, ...]:
    """The card on slow ranks."""
    slowest, share, length = group.get("slowest"), group.get("held", 0.0), group.get("held_seconds", WINDOW_SECONDS)
    held, is_slow = percent(share), share >= MAX_DELAY_SHARE
    if slowest is None:
        if group["world_size"] == 1:
            return "Waiting", "No other rank", "the job has one rank", "unknown"
        if "over" in group or is_broken(group):
            return "Waiting", "Not known", "the job was too short", "unknown"
        left = group.get("slowest_in")
        note = "needs 40 s of rounds" if left is None else f"known after {math.ceil(left)} s more of rounds"
        return "Waiting", "Not known yet", note, "unknown"
    if not _is_whole(group):
        value = f"Rank {slowest} so far" if is_slow else "No slow rank so far"
        whom = f"rank {slowest}" if is_slow else "any rank"
        return "Waiting", value, f"the others waited {held} of {duration(length)} for {whom}", "unknown"
    if is_slow:
        return "Waiting", f"Rank {slowest}", f"the others waited {held} of the last minute", "watch"
    return "Waiting", "No slow rank", f"rank {slowest} is last by {held} of a minute", "good"
