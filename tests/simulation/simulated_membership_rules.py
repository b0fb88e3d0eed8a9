"""What must be true of who takes part in which round, of passes over the data, and of how soon answers come."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from client.transports.server import ESCALATE_SECONDS
from server.group.recovery import RECONNECT_SECONDS
from simulation import simulated_rules as rules
from simulation.simulated_beginnings import may_meet_another_beginning, newcomers_may_come_first, opened
from simulation.simulated_frames import decode_once
from simulation.simulated_memory import LISTEN_SECONDS
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Aggregate, Contribution, Message
from statsd_bn.round_key import RoundKey
from statsd_bn.wire import decode_request

if TYPE_CHECKING:
    from simulation.simulated_member import Process, Span
    from simulation.simulator import World

# What the simulator's own arithmetic may add to a way.
ROUNDING_SECONDS = 1e-6


@dataclass(frozen=True)
class Covered:
    """An aggregate that somebody was given: the turn of which pass it belongs to, and whom it covers."""

    base: int
    turn: int
    key: RoundKey
    members: tuple[int, ...]


def check_coverage(world: "World", process: "Process", aggregate: Aggregate, turn: int) -> list[int]:
    """An aggregate covers its receiver, enough members, and all who take part and have no excuse."""
    members = list(aggregate.members)
    if process.number not in members:
        world.find("an aggregate covers its receiver", f"{process}: {aggregate.key} covers {members}")
    if len(_registered(world, aggregate.key).union(members)) < world.plan.min_members:
        world.find("no round completes with too few", f"{process}: {aggregate.key} covers {members}")
    if process.is_of_before:
        # It hears late of a round that took place before all others began anew.
        return members
    covered = Covered(process.spans[-1].base, turn, aggregate.key, tuple(members))
    world.covered.append(covered)
    for other in [one for one in world.processes if not one.is_of_before]:
        for span in other.spans:
            _check_one(world, other, span, covered)
    return members


def is_a_doubles(process: "Process", aggregate: Aggregate, members: Iterable[int]) -> bool:
    """Whether an aggregate is right for another process of the number that it was given to, as the protocol warns.

    That is so where newcomers began the group anew while the server knew of no other, and a later life of the server
    then heard of the one that was left out before it heard of its double.
    """
    world = process.world
    if not may_meet_another_beginning(world):
        return False
    others = world.ledger.others_brought(aggregate.key, process.number, process.life)
    return any(not world.ledger.complaint(aggregate, members, other) for other in others)


def check_newcomer(world: "World", process: "Process", span: "Span") -> None:
    """Whoever begins was expected in all rounds of its first step and later, and in none before."""
    if (not process.joined_late or _joined_a_new_group(process)) and _is_a_new_beginning(world):
        world.covered.clear()
        world.pass_began.clear()
        world.sent.clear()
        for one in world.processes:
            one.is_of_before = one.is_of_before or _has_gone(one)
    for covered in world.covered:
        _check_one(world, process, span, covered)


def _joined_a_new_group(process: "Process") -> bool:
    """Whether the group has had no round, and has nobody from before a restart of the server.

    Where a group was begun anew, the first to hear of it may be one that has joined it only then: the others are told
    before, but nothing keeps the order on the way.
    """
    record = process.world.server.dispatcher._registry.sessions.get(process.sessions["world"].member_token)
    if record is None or record.master.open_rounds.done:
        return False
    return not any(one.was_in_group for one in record.master.membership.contributors.values())


def _is_a_new_beginning(world: "World") -> bool:
    """Whether all who had a round have gone, or newcomers that are as many as the group came to a new server first."""
    went_on = [one for one in world.processes if one.rounds and not _has_gone(one)]
    return not went_on or newcomers_may_come_first(world)


def _has_gone(process: "Process") -> bool:
    """Whether it has ended, or the server may have taken it for lost: it was silent or cut off for too long."""
    facts = process.world.facts
    cut = any(one.member == process.number and one.when >= process.began and rules.is_long_cut(one) for one in facts)
    return process.result is not None or rules.is_mute(process) or cut


def _has_a_double(process: "Process") -> bool:
    """Whether another process of its number may have come to a restarted server before it."""
    numbers = [other.number for other in process.world.processes]
    return bool(process.world.server.outages) and numbers.count(process.number) > 1


def _check_one(world: "World", process: "Process", span: "Span", covered: Covered) -> None:
    is_due = span.base == covered.base and span.first <= covered.turn < span.end
    if not is_due or process.number in covered.members:
        return
    if not (_is_excused(process) or _is_unheard_of(world, covered.key)):
        told = f"{process}: {covered.key} covers {covered.members}, and it takes part in {span}"
        world.find("membership changes only where it may", told)


def _is_excused(process: "Process") -> bool:
    """Whether something has befallen it for which an elastic group may go on without it."""
    world = process.world
    facts = (fact for fact in world.facts if fact.member == process.number and fact.when >= process.began)
    befallen = rules.is_mute(process) or any(fact.how in {*rules.ENDS, "frozen", "cut"} for fact in facts)
    is_displaced = _has_a_double(process) or newcomers_may_come_first(world) or _is_unknown_and_late(process)
    is_displaced = is_displaced or _was_told_nothing(process)
    return bool(world.plan.min_members) and (befallen or is_displaced)


def _is_unheard_of(world: "World", key: RoundKey) -> bool:
    """Whether the server was restarted after a round of an elastic group, and nobody is back who had come to its step.

    Members that had gone on without another may have left before the restart. If that other one is back, it goes on
    from where it was, and newcomers take part in steps that nobody there has heard of.
    """
    is_restarted = any(world.covers_since[key] < gone for gone, _ in world.server.outages)
    told = (outcome.key for process in world.returned for outcome in process.outcomes)
    return bool(world.plan.min_members) and is_restarted and not any(one and one.step >= key.step for one in told)


def _is_unknown_and_late(process: "Process") -> bool:
    """Whether it joined before a restart of the server, and was late to say so, while no other had heard of it.

    An elastic group waits for such members, but not long.
    """
    world = process.world
    if not (process.is_newcomer and world.server.outages) or world.plan.weather.is_fair:
        return False
    _, back = world.server.outages[-1]
    is_registered = any(process.number in covered.members for covered in world.covered)
    return not is_registered and world.returned.get(process, float("inf")) > back + RECONNECT_SECONDS


def _was_told_nothing(process: "Process") -> bool:
    """Whether frames were lost until a restarted server had waited long enough for it, and it knew of no restart."""
    world = process.world
    if not (world.server.outages and world.plan.weather.dropped):
        return False
    _, back = world.server.outages[-1]
    told = [entry[0] for entry in world.trace if entry[1] == "to member" and entry[2] is process and entry[0] >= back]
    return min(told, default=world.clock.now) - back >= limits.SILENCE_SECONDS


def _registered(world: "World", key: RoundKey) -> set[int]:
    """Who suffices without being covered: whoever is away, or begins later, or was one of these a moment ago.

    What counts is the time of the answer: one that was frozen reads it when others have left since. A server that
    sleeps hears later of an end. After a restart one that has never heard of the opening begins later, too.
    """
    if not (world.plan.passes or world.plan.has_newcomers or world.server.outages):
        return set()
    when = world.sent_at.get(key, world.clock.now)
    news = rules.NEWS_SECONDS + rules.nap_seconds(world)
    return {one.number for one in world.processes if one.has_connected and when - one.ended < news}


def check_pass(world: "World", process: "Process", number: int, first_step: int) -> None:
    """Every pass begins at one common step."""
    # A restarted server cannot tell newcomers of an elastic group from members that had not heard of the next pass.
    is_unsure = bool(world.plan.min_members and world.server.outages)
    if process.is_newcomer or process.joined_late or is_unsure:
        return
    if world.pass_began.setdefault(number, first_step) != first_step:
        told = f"{process}: pass {number} at step {first_step}, and for others at {world.pass_began[number]}"
        world.find("every pass begins at one step", told)


def check_restarted(world: "World", process: "Process") -> None:
    """A strict group does not take in a process whose predecessor it has had."""
    if world.plan.min_members or process.epoch > 0 or process.life == 0:
        return
    earlier = [other for other in world.processes if other.number == process.number and other is not process]
    end = min(fact.when for fact in world.facts if fact.member == process.number and fact.how in rules.ENDS)
    others = [other for other in world.processes if other.life == 0 and other.result is None]
    if any(other.rounds for other in others) and earlier and any(opened(other, end) for other in others):
        world.find("a strict group takes in nobody anew", f"{process} was taken in")


def check_promptness(world: "World", process: "Process", key: RoundKey) -> None:
    """Where nothing disturbs the network, whoever waits is answered as soon as the last one has come."""
    plan = world.plan
    if not plan.weather.is_fair or plan.faults or plan.replaced_after:
        return
    # Two ways, and four more where the group of the round opens only now.
    ways = 6 if key.group != "world" else 2
    due = max(world.brought_at[key], world.left_a_round) + ways * 2 * plan.weather.latency + ROUNDING_SECONDS
    if plan.in_memory:
        # Two gathers where the group finds its memory; and a wake-up that is lost, or late.
        due += 4 * 2 * plan.weather.latency + max(ESCALATE_SECONDS, LISTEN_SECONDS)
    if world.clock.now > due:
        world.find("answers are prompt", f"{process}: {key} came {world.clock.now - due} s late")


def note_arrival(world: "World", frame: bytes) -> None:
    """The server is about to take a contribution of somebody that it knows."""
    message = _sound(frame, rules.CONTRIBUTION, decode_request)
    if not isinstance(message, Contribution):
        return
    record = world.server.dispatcher._registry.sessions.get(message.session)
    if record and not record.master.membership.recovery and message.key not in world.sent:
        world.arrived.setdefault((record.master, message.key), set()).add(record.contributor.member)


def note_sent(world: "World", frame: bytes) -> None:
    """The server answers: what had come from members is in it, whoever is lost since."""
    message = _sound(frame, rules.AGGREGATE, decode_once)
    if not isinstance(message, Aggregate):
        return
    members = tuple(message.members)
    world.sent_at.setdefault(message.key, world.clock.now)
    # A group that has ended may be begun anew: what had come to its former life is none of this one's.
    master = world.server.dispatcher._registry.masters.get((message.key.job, message.key.group))
    lacking = world.arrived.pop((master, message.key), set()).difference(members)
    if lacking and message.key not in world.sent:
        world.find("what has come is kept", f"{message.key} covers {members}, and {sorted(lacking)} had come")
    if world.sent.get(message.key) != members:
        world.sent.pop(message.key, None)
        world.sent[message.key] = members
        world.covers_since[message.key] = world.clock.now


def check_no_step_grows(world: "World") -> None:
    """Of the aggregates of one step, each covers some of those that the one before covers, and nobody else."""
    delivered = {covered.key for covered in world.covered}
    latest: dict[int, RoundKey] = {}
    for key, members in world.sent.items():
        if key not in delivered:
            continue
        earlier = world.sent[latest.get(key.step, key)]
        if not set(members) <= set(earlier) and not _is_forgotten(world, latest[key.step], world.covers_since[key]):
            world.find("no step takes anyone in", f"{key} covers {members}, and an earlier one {earlier}")
        latest[key.step] = key


def _is_forgotten(world: "World", key: RoundKey, when: float) -> bool:
    """Whether the server was restarted after a round, and none was there any more that might have told it of that."""
    is_restarted = any(world.covers_since[key] < gone < when for gone, _ in world.server.outages)
    covered = [one for one in world.processes if one.number in world.sent[key]]
    return is_restarted and all(one.ended < when for one in covered)


def _sound(frame: bytes, kind: int, decode: Callable[[bytes], Message]) -> Any:
    if rules.kind_of(frame) != kind:
        return None
    try:
        return decode(frame)
    except StatsdBNError:
        return None
