"""Rules on the members of each round, on passes over the data, and on the delay of answers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from client.transports.server import ESCALATE_SECONDS
from server.group.recovery import RECONNECT_SECONDS
from simulation import simulated_rules as rules
from simulation.simulated_memory import LISTEN_SECONDS
from simulation.simulated_network import decode_once
from simulation.simulated_rules import may_meet_another_beginning, newcomers_may_come_first, opened
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Aggregate, Contribution, Message
from statsd_bn.round_key import RoundKey
from statsd_bn.wire import decode_request

if TYPE_CHECKING:
    from simulation.simulated_member import Process, Span
    from simulation.simulator import World

# Rounding errors of the simulator in a latency.
ROUNDING_SECONDS = 1e-6


@dataclass(frozen=True)
class Covered:
    """A received aggregate: its pass and turn, and its members."""

    base: int
    turn: int
    key: RoundKey
    members: tuple[int, ...]


def check_coverage(world: "World", process: "Process", aggregate: Aggregate, turn: int) -> list[int]:
    """An aggregate covers its receiver, enough members, and all participants without an excuse."""
    members = list(aggregate.members)
    if process.number not in members:
        world.report("an aggregate covers its receiver", f"{process}: {aggregate.key} covers {members}")
    if len(_registered(world, aggregate.key).union(members)) < world.plan.min_members:
        world.report("no round completes with too few", f"{process}: {aggregate.key} covers {members}")
    if process.is_of_before:
        # The aggregate's round was before the other members began the group anew.
        return members
    covered = Covered(process.spans[-1].base, turn, aggregate.key, tuple(members))
    world.covered.append(covered)
    for other in [one for one in world.processes if not one.is_of_before]:
        for span in other.spans:
            _check_one(world, other, span, covered)
    return members


def is_a_doubles(process: "Process", aggregate: Aggregate, members: Iterable[int]) -> bool:
    """Whether an aggregate has the rows of another process with the receiver's number, as the protocol warns.

    This happens if newcomers began the group anew while the server knew of no other process, and a later server heard
    of an old process before it heard of the newcomer with the same number.
    """
    world = process.world
    if not may_meet_another_beginning(world):
        return False
    others = world.ledger.rows_of_other_lives(aggregate.key, process.number, process.life)
    return any(not world.ledger.complaint(aggregate, members, other) for other in others)


def check_newcomer(world: "World", process: "Process", span: "Span") -> None:
    """A new member is in all rounds from its first step on, and in none before."""
    if (not process.joined_late or _joined_a_new_group(process)) and _is_a_new_beginning(world):
        world.covered.clear()
        world.pass_began.clear()
        world.sent.clear()
        for one in world.processes:
            one.is_of_before = one.is_of_before or _has_gone(one)
    for covered in world.covered:
        _check_one(world, process, span, covered)


def _joined_a_new_group(process: "Process") -> bool:
    """Whether the group has had no round, and no member from before a restart of the server."""
    record = process.world.server.dispatcher._registry.sessions.get(process.sessions["world"].member_token)
    if record is None or record.master.done:
        return False
    return not any(one.was_in_group for one in record.master.membership.contributors.values())


def _is_a_new_beginning(world: "World") -> bool:
    """Whether all processes that had a round have gone, or a full group of newcomers may have come first."""
    went_on = [one for one in world.processes if one.rounds and not _has_gone(one)]
    return not went_on or newcomers_may_come_first(world)


def _has_gone(process: "Process") -> bool:
    """Whether a process has ended, or was silent or cut off for so long that the server may have taken it for lost."""
    facts = process.world.facts
    cut = any(one.member == process.number and one.when >= process.began and rules.is_long_cut(one) for one in facts)
    return process.result is not None or rules.is_mute(process) or cut


def _has_a_double(process: "Process") -> bool:
    """Whether another process with the same number may have reached a restarted server first."""
    numbers = [other.number for other in process.world.processes]
    return bool(process.world.server.outages) and numbers.count(process.number) > 1


def _check_one(world: "World", process: "Process", span: "Span", covered: Covered) -> None:
    is_due = span.base == covered.base and span.first <= covered.turn < span.end
    if not is_due or process.number in covered.members:
        return
    if not (_is_excused(process) or _is_unknown_round(world, covered.key)):
        complaint = f"{process}: {covered.key} covers {covered.members}, and it takes part in {span}"
        world.report("membership changes only where it may", complaint)


def _is_excused(process: "Process") -> bool:
    """Whether an elastic group may have continued without a process."""
    world = process.world
    facts = (fact for fact in world.facts if fact.member == process.number and fact.when >= process.began)
    befallen = rules.is_mute(process) or any(fact.how in {*rules.ENDS, "frozen", "cut"} for fact in facts)
    is_displaced = _has_a_double(process) or newcomers_may_come_first(world) or _is_unknown_and_late(process)
    is_displaced = is_displaced or _received_nothing(process)
    return bool(world.plan.min_members) and (befallen or is_displaced)


def _is_unknown_round(world: "World", key: RoundKey) -> bool:
    """Whether the server restarted after a round of an elastic group, and no member of that step has returned."""
    is_restarted = any(world.covers_since[key] < gone for gone, _ in world.server.outages)
    keys = (outcome.key for process in world.returned for outcome in process.outcomes)
    return bool(world.plan.min_members) and is_restarted and not any(one and one.step >= key.step for one in keys)


def _is_unknown_and_late(process: "Process") -> bool:
    """Whether a newcomer from before a restart of the server registered again too late for an elastic group."""
    world = process.world
    if not (process.is_newcomer and world.server.outages) or world.plan.weather.is_fair:
        return False
    _, back = world.server.outages[-1]
    is_registered = any(process.number in covered.members for covered in world.covered)
    return not is_registered and world.returned.get(process, float("inf")) > back + RECONNECT_SECONDS


def _received_nothing(process: "Process") -> bool:
    """Whether a process did not hear of a server's restart, because frames were lost, until the server gave it up."""
    world = process.world
    if not (world.server.outages and world.plan.weather.dropped):
        return False
    _, back = world.server.outages[-1]
    times = [entry[0] for entry in world.trace if entry[1] == "to member" and entry[2] is process and entry[0] >= back]
    return min(times, default=world.clock.now) - back >= limits.SILENCE_SECONDS


def _registered(world: "World", key: RoundKey) -> set[int]:
    """Members that count as present without being covered: paused, joining later, or ended a moment ago.

    The time of the answer counts: a frozen member reads it after others have left. A napping server learns later of
    an end. After a restart, a member that missed the opening joins later as well.
    """
    if not (world.plan.passes or world.plan.has_newcomers or world.server.outages):
        return set()
    when = world.sent_at.get(key, world.clock.now)
    delay = rules.LOSS_SECONDS + rules.nap_seconds(world)
    return {one.number for one in world.processes if one.has_connected and when - one.ended < delay}


def check_pass(world: "World", process: "Process", number: int, first_step: int) -> None:
    """Every pass begins at one common step."""
    # A restarted server cannot distinguish newcomers of an elastic group from members that missed the next pass.
    is_unsure = bool(world.plan.min_members and world.server.outages)
    if process.is_newcomer or process.joined_late or is_unsure:
        return
    if world.pass_began.setdefault(number, first_step) != first_step:
        complaint = f"{process}: pass {number} at step {first_step}, and for others at {world.pass_began[number]}"
        world.report("every pass begins at one step", complaint)


def check_restarted(world: "World", process: "Process") -> None:
    """A strict group admits no replacement of an earlier process."""
    if world.plan.min_members or process.epoch > 0 or process.life == 0:
        return
    earlier = [other for other in world.processes if other.number == process.number and other is not process]
    end = min(fact.when for fact in world.facts if fact.member == process.number and fact.how in rules.ENDS)
    others = [other for other in world.processes if other.life == 0 and other.result is None]
    if any(other.rounds for other in others) and earlier and any(opened(other, end) for other in others):
        world.report("a strict group takes in nobody anew", f"{process} was taken in")


def check_promptness(world: "World", process: "Process", key: RoundKey) -> None:
    """In an undisturbed network, waiting members are answered as soon as the last contribution arrives."""
    plan = world.plan
    if not plan.weather.is_fair or plan.faults or plan.replaced_after:
        return
    # A message each way, and four further messages if the round's group opens only now.
    ways = 6 if key.group != "world" else 2
    due = max(world.contributed_at[key], world.left_a_round) + ways * 2 * plan.weather.latency + ROUNDING_SECONDS
    if plan.in_memory:
        # Two gathers in which the group agrees on its memory, and a wake-up that is lost or late.
        due += 4 * 2 * plan.weather.latency + max(ESCALATE_SECONDS, LISTEN_SECONDS)
    if world.clock.now > due:
        world.report("answers are prompt", f"{process}: {key} came {world.clock.now - due} s late")


def note_arrival(world: "World", frame: bytes) -> None:
    """Record a contribution of a known member that reaches the server."""
    message = _sound(frame, rules.CONTRIBUTION, decode_request)
    if not isinstance(message, Contribution):
        return
    record = world.server.dispatcher._registry.sessions.get(message.session)
    if record and not record.master.membership.is_recovering and message.key not in world.sent:
        world.arrived.setdefault((record.master, message.key), set()).add(record.contributor.member)


def note_sent(world: "World", frame: bytes) -> None:
    """An answer contains all contributions that arrived, even of members lost since."""
    message = _sound(frame, rules.AGGREGATE, decode_once)
    if not isinstance(message, Aggregate):
        return
    members = tuple(message.members)
    world.sent_at.setdefault(message.key, world.clock.now)
    # A group may start anew after its end: contributions to its former life do not count.
    master = world.server.dispatcher._registry.masters.get((message.key.job, message.key.group))
    lacking = world.arrived.pop((master, message.key), set()).difference(members)
    if lacking and message.key not in world.sent:
        world.report("what has come is kept", f"{message.key} covers {members}, and {sorted(lacking)} had come")
    if world.sent.get(message.key) != members:
        world.sent.pop(message.key, None)
        world.sent[message.key] = members
        world.covers_since[message.key] = world.clock.now


def check_no_step_grows(world: "World") -> None:
    """Within a step, the members of each aggregate are a subset of the previous aggregate's members."""
    delivered = {covered.key for covered in world.covered}
    latest: dict[int, RoundKey] = {}
    for key, members in world.sent.items():
        if key not in delivered:
            continue
        earlier = world.sent[latest.get(key.step, key)]
        if not set(members) <= set(earlier) and not _is_forgotten(world, latest[key.step], world.covers_since[key]):
            world.report("no step takes anyone in", f"{key} covers {members}, and an earlier one {earlier}")
        latest[key.step] = key


def _is_forgotten(world: "World", key: RoundKey, when: float) -> bool:
    """Whether the server restarted after a round, and all members that could report it had ended."""
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
