"""Rules for every world and fault, except the check of sums: a member's errors must agree with the true *facts*."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from client.session.protocol.registration import ANSWER_SECONDS, DUPLICATE_SECONDS
from client.session.protocol.round_trip import GRACE_SECONDS, MAX_RETRY_SECONDS, RETRY_SECONDS
from server.core.deadlock import THREADED_QUIET_SECONDS
from server.core.liveness import RECONNECT_SECONDS
from server.group.master import REMEMBERED_ROUNDS
from server.network.connections import PROBE_SECONDS
from server.network.service import TICK_SECONDS
from simulation.simulated_network import is_sound
from simulation.simulated_plan import HARMLESS_FREEZE
from statsd_bn import errors, limits
from statsd_bn.wire import decode

if TYPE_CHECKING:
    from simulation.simulated_member import Outcome, Process
    from simulation.simulator import World

# Where a header stands in a frame. A header of fixed fields begins with the type; in a msgpack array the type follows
# the first byte, and in a long array also two bytes of length.
HEADER_AT = 8
SHORT_ARRAYS, LONG_ARRAY = range(0x90, 0xA0), 0xDC

# Where a Result's session stands in its frame.
SESSION = slice(12, 20)
REGISTER, CONTRIBUTION, AGGREGATE, RESULT, WHEREABOUTS = 1, 3, 4, 11, 13

# Tolerance on the bound of a wait: latency of the frames, and the server's ticks.
MARGIN = 1.0

# From the end of a member to the report of its loss: by a lost connection, or by silence.
LOSS_SECONDS = limits.SILENCE_SECONDS + limits.HEARTBEAT_SECONDS + RECONNECT_SECONDS + PROBE_SECONDS + 2 * TICK_SECONDS

# The protocol's value, which planted bugs do not change.
PROMISED_SILENCE_SECONDS = limits.SILENCE_SECONDS

# The cause of a member's loss if a restarted server has continued without it.
TOO_LATE = "registered too late"

# Facts that end a life of a member.
ENDS = {"killed", "vanished", "failed", "left"}


def check_outcome(world: "World", outcome: "Outcome") -> None:
    """Judges the end of a wait, with a result or an error."""
    _ends_within_its_bound(world, outcome)
    if outcome.error is None:
        return
    excused = (
        _a_registration_was_lost(world, outcome)
        or not _nobody_was_mute(world)
        or not _all_saw_the_restart(world)
        or _a_goodbye_was_lost(world)
        or _was_recognised_too_late(world)
        or _a_slow_one_lost_frames(world, outcome)
        or _one_lost_all_its_time(world)
    )
    if world.plan.is_harmless and not excused:
        world.report("harmless faults do no harm", f"{outcome.process} {outcome.what} {outcome.key}: {outcome.error!r}")
    judge = TRUTHS.get(type(outcome.error))
    if judge is None:
        world.report("errors are of the kinds there are", f"{outcome.process}: {outcome.error!r}")
    elif not judge(world, outcome, outcome.error):
        world.report(f"{type(outcome.error).__name__} tells the truth", f"{outcome.process}: {_text_of(outcome.error)}")


def check_memory(world: "World") -> None:
    """Nothing that the server keeps grows without bound."""
    registry = world.server.dispatcher._registry
    most = len(world.processes) * (1 + len(world.plan.groups))
    if len(registry.sessions) > most:
        world.report("memory is bounded", f"{len(registry.sessions)} sessions of {len(world.processes)} processes")
    for master in registry.masters.values():
        # After a restart each member may resend a full ring of rounds, all of them different.
        claimed = limits.CACHED_ROUNDS * len(world.processes) if world.server.outages else 0
        nr_cached, nr_open = len(master._cached_results) + len(master._cached_failures), len(master.open_rounds)
        if (
            nr_cached > 2 * limits.CACHED_ROUNDS
            or len(master.membership.recovered.results) > claimed
            or len(master._ended) > REMEMBERED_ROUNDS
            or nr_open > limits.MAX_OPEN_ROUNDS
        ):
            world.report("memory is bounded", f"{nr_cached} rounds kept, {nr_open} open")


def check_end(world: "World") -> None:
    """Judges a world in which all programs have ended."""
    if world.plan.is_faultless:
        _costs_one_message_each_way(world)
    if world.plan.weather.is_fair:
        _a_retry_says_so(world)
    waits = [channel for channel in world.network._channels if len(channel.inbox) > limits.CACHED_ROUNDS * 16]
    if waits:
        world.report("memory is bounded", f"{len(waits[0].inbox)} frames that nobody reads")


def is_empty(world: "World") -> bool:
    """Whether the server keeps nothing any more."""
    registry = world.server.dispatcher._registry
    return not (registry.masters or registry.sessions)


def check_nothing_is_left(world: "World") -> None:
    """All have ended, and as much time has passed as anything may take: the server has forgotten everything."""
    if not is_empty(world):
        dispatcher = world.server.dispatcher
        world.report(
            "nothing is left", f"{list(dispatcher._registry.masters)}, {len(dispatcher._registry.sessions)} sessions"
        )


def _ends_within_its_bound(world: "World", outcome: "Outcome") -> None:
    plan = world.plan
    filling = plan.deadline + 2 * ANSWER_SECONDS + DUPLICATE_SECONDS
    bound = plan.deadline + GRACE_SECONDS if outcome.what == "exchange" else filling
    if outcome.group != "world":
        bound += filling
    if outcome.key in world.agreements:
        # After this round the members agree on memory, in two gathers.
        bound += 2 * (plan.deadline + GRACE_SECONDS)
    took = outcome.ended - outcome.started - outcome.process.frozen_seconds
    if took > bound + MARGIN:
        world.report(
            "every wait ends in time", f"{outcome.process} {outcome.what} {outcome.key}: {took} s, not {bound}"
        )


def _a_retry_says_so(world: "World") -> None:
    """A contribution that is sent again has another attempt, so no two frames are the same."""
    frames = [entry[3] for entry in world.trace if entry[1] == "to server" and kind_of(entry[3]) == CONTRIBUTION]
    if len(set(frames)) < len(frames):
        world.report("a retry says so", f"{len(frames) - len(set(frames))} of {len(frames)} contributions are the same")


def kind_of(frame: bytes) -> int:
    """The number of the message's type in an undamaged frame."""
    header = frame[HEADER_AT:]
    if not header:
        return -1
    place = 3 if header[0] == LONG_ARRAY else int(header[0] in SHORT_ARRAYS)
    return header[place] if len(header) > place else -1


def _costs_one_message_each_way(world: "World") -> None:
    waits = [one for process in world.processes for one in process.outcomes if one.what == "exchange"]
    exchanges = len(waits)
    again = sum(int((one.ended - one.started) / (0.9 * RETRY_SECONDS)) for one in waits)
    if any(isinstance(process.result, BaseException) for process in world.processes):
        world.report("a round costs one message each way", "an error in a world without a fault")
    counts = (world.contributions, world.aggregates)
    if world.plan.in_memory:
        # Two gathers of each member and group, and rounds without the server. A member that reports a round and then
        # learns in memory that only the server can end it (a sum that is not finite) asks again.
        least, most = 0, 2 * exchanges + again + 2 * sum(len(process.sessions) for process in world.processes)
    else:
        least, most = exchanges, exchanges + again
    if not all(least <= count <= most for count in counts):
        complaint = f"{world.contributions} contributions and {world.aggregates} aggregates for {exchanges} exchanges"
        world.report("a round costs one message each way", complaint)


def _a_registration_was_lost(world: "World", outcome: "Outcome") -> bool:
    """A member that gets no answer to its first Register soon gives up, as the protocol says, and its group ends."""
    outcomes = [outcome, *(one for process in world.processes for one in process.outcomes)]
    sleeps = nap_seconds(world) + 4 * world.plan.weather.latency >= ANSWER_SECONDS
    is_silent = world.plan.weather.dropped > 0 or sleeps
    return is_silent and any(isinstance(one.error, errors.ServerUnreachable) for one in outcomes)


def _a_goodbye_was_lost(world: "World") -> bool:
    """A member that ends its last pass leaves while others continue; if its Leave is lost, it counts as lost."""
    return bool(world.plan.passes) and not world.plan.weather.is_fair and any(f.how == "left" for f in world.facts)


def _was_recognised_too_late(world: "World") -> bool:
    """A member with lost frames may be recognised too late on a new connection, or by a restarted server."""
    found = [one.error for process in world.processes for one in process.outcomes if one.error]
    causes = {error.fields["cause"] for error in found if isinstance(error, errors.ReplicaLost)}
    cut = world.plan.has("cut") and "the connection was lost" in causes
    late = bool(world.server.outages) and {"did not reconnect after the server was restarted", TOO_LATE} & causes
    return not world.plan.weather.is_fair and bool(cut or late)


def _a_slow_one_lost_frames(world: "World", outcome: "Outcome") -> bool:
    """A slow member has little time left, and each lost frame costs it seconds, as the protocol says."""
    slow = {fact.member for fact in world.facts if fact.how == "slow"}
    outcomes = [outcome, *(one for process in world.processes for one in process.outcomes)]
    late = [one for one in outcomes if isinstance(one.error, errors.RoundTimeout)]
    return world.plan.weather.dropped > 0 and any(
        _asked_again_since(world, member, one.started)
        for one in late
        for member in slow.intersection(one.error.fields.get("missing") or ())
    )


def _asked_again_since(world: "World", member: int, since: float) -> bool:
    """Whether a member has waited in a round for so long after `since` that it has asked again."""
    waits = [one for process in world.processes if process.number == member for one in process.outcomes]
    return any((one.ended or world.clock.now) - max(one.started, since) >= 0.9 * RETRY_SECONDS for one in waits)


def _one_lost_all_its_time(world: "World") -> bool:
    """Whether a member was late because it lost frames in an earlier round, each of which costs seconds."""
    waits = [one for process in world.processes for one in process.outcomes]
    late = [one for one in waits if isinstance(one.error, errors.RoundTimeout)]
    return any(
        _frames_lost(world, wait) * MAX_RETRY_SECONDS >= world.plan.deadline
        for one in late
        for wait in waits
        if wait.process.number in (one.error.fields.get("missing") or ())
        and wait.key != one.key
        and wait.started < one.started
        and not 0.0 < wait.ended < one.ended
    )


def _frames_lost(world: "World", wait: "Outcome") -> int:
    """The number of lost contributions and aggregates of a member's round."""
    return sum(decode(frame).key == wait.key for frame in _lost(world, wait))


def _lost(world: "World", wait: "Outcome") -> list[bytes]:
    """A member's contributions and aggregates that were lost during its wait, even of gathers before its round."""
    lost = (entry[2:] for entry in world.trace if entry[1] == "dropped" and entry[0] >= wait.started)
    return [frame for process, frame in lost if process is wait.process and kind_of(frame) in {CONTRIBUTION, AGGREGATE}]


def _nobody_was_mute(world: "World") -> bool:
    """Whether the network let through enough heartbeats of everyone."""
    return all(process.longest_silence < mute_seconds(world) - TICK_SECONDS for process in world.processes)


def _lives(world: "World", member: int) -> bool:
    return any(process.number == member and process.result is None for process in world.processes)


def _all_saw_the_restart(world: "World") -> bool:
    """A restarted server does not know members that left before the restart, so members that need them wait in vain."""
    first_end = min((fact.when for fact in world.facts if fact.how in ENDS), default=float("inf"))
    return all(back < first_end for _, back in world.server.outages)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error} {getattr(error, 'fields', '')}"


def _replica_lost_is_true(world: "World", outcome: "Outcome", error: Any) -> bool:
    """The error names a member that is gone or was mute, with the cause, and in time."""
    return _is_in_time(world, outcome, error) and _is_gone(world, error)


def _is_gone(world: "World", error: Any) -> bool:
    member, cause = error.fields["member"], error.fields["cause"]
    facts = [fact for fact in world.facts if fact.member == member]
    if cause == "the connection was lost":
        ended = any(fact.how in {"killed", "failed", "left"} or is_long_cut(fact) for fact in facts)
        # After a short cut the member is not lost, unless the server cannot hear of its new connection.
        cut = any(fact.how == "cut" for fact in facts)
        muted = not world.plan.weather.is_fair or any(fact.how == "frozen" for fact in facts)
        vanished = any(fact.how == "vanished" for fact in facts)
        return ended or _napped(world) or (cut and (muted or vanished))
    if cause.startswith("no sign of life"):
        long_freeze = any(fact.how == "frozen" and fact.until - fact.when > HARMLESS_FREEZE for fact in facts)
        return long_freeze or any(fact.how in ENDS for fact in facts) or _was_mute(world, member)
    if cause.startswith(("did not reconnect", "the others had continued", "its results did not arrive")):
        return bool(world.server.outages) and (_was_away(world, member) or _was_left_behind(world, member, cause))
    if cause == "":
        return any(fact.how == "left" for fact in facts)
    if cause == TOO_LATE and world.server.outages and (world.plan.has_newcomers or _was_late_from_away(world, member)):
        # A full group of newcomers that reaches a restarted server first begins a new group. The server does not wait
        # for a paused member.
        return True
    taken_for_lost = cause in {"declared lost", TOO_LATE} and _was_away(world, member)
    return taken_for_lost or any(fact.cause == cause for fact in facts) or _is_cause_of_refusal(world, member, cause)


def note_return(world: "World", process: "Process", frame: bytes) -> None:
    """Records that a restarted server has heard from a process."""
    if kind_of(frame) == REGISTER and is_sound(frame):
        world.returned.setdefault(process, world.clock.now)


def _was_late_from_away(world: "World", member: int) -> bool:
    """Whether a member may have been paused, so no other waited for it, and frames of its return were lost or late."""
    if not world.plan.passes or world.plan.weather.is_fair:
        return False
    _, back = world.server.outages[-1]
    returned = [when for process, when in world.returned.items() if process.number == member]
    return all(when > back + RECONNECT_SECONDS for when in returned)


def _was_left_behind(world: "World", member: int, cause: str) -> bool:
    """Whether a restarted server did not know a member because frames were lost, or because the group started anew."""
    if cause.startswith("did not reconnect"):
        is_back = any(process.number == member for process in world.returned)
        return not world.plan.weather.is_fair and not is_back
    if cause.startswith("its results did not arrive"):
        return _a_result_was_lost_or_late(world, member)
    return cause.startswith("the others had continued") and may_meet_another_beginning(world)


def _a_result_was_lost_or_late(world: "World", member: int) -> bool:
    """Whether a member's result may have been lost, or too late, on its way to a restarted server."""
    lives = [process for process in world.processes if process.number == member]
    sessions = {session.member_token for process in lives for session in process.sessions.values()}
    held_up = (entry[-1] for entry in world.trace if entry[1] in {"dropped", "corrupted", "delayed"})
    return any(frame[SESSION] in sessions for frame in held_up if kind_of(frame) == RESULT)


def _is_in_time(world: "World", outcome: "Outcome", error: Any) -> bool:
    """A member whose connection has ended is reported at once, and a silent one after `SILENCE_SECONDS`."""
    cause = error.fields["cause"]
    facts = [fact for fact in world.facts if fact.member == error.fields["member"]]
    disturbed = world.server.outages or nap_seconds(world) or not world.plan.weather.is_fair
    own = world.plan.has("frozen", "cut") or outcome.what == "connect" or not facts
    if disturbed or own or not cause.startswith(("the connection", "no sign")):
        return True
    allowed = PROBE_SECONDS + RECONNECT_SECONDS if cause == "the connection was lost" else limits.SILENCE_SECONDS
    late = outcome.ended - max(facts[-1].when, outcome.started)
    return late <= allowed + 2 * TICK_SECONDS + 4 * world.plan.weather.latency


def _was_away(world: "World", member: int) -> bool:
    facts = (fact.how for fact in world.facts if fact.member == member)
    return any(how in {*ENDS, "frozen", "cut"} for how in facts) or _was_mute(world, member)


def _is_cause_of_refusal(world: "World", member: int, cause: str) -> bool:
    """Whether the cause is an error with which a member left a group, even before its program has ended."""
    return any(
        _cause(outcome.error) == cause
        for process in world.processes
        if process.number == member
        for outcome in process.outcomes
        if outcome.error
    )


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".encode(errors="replace")[: limits.MAX_TEXT_BYTES].decode(errors="ignore")


def is_long_cut(fact: Any) -> bool:
    """Whether the server may have taken the member for lost because it could not reach it."""
    return fact.how == "cut" and fact.until - fact.when > RECONNECT_SECONDS - 0.1


def _napped(world: "World") -> bool:
    return world.plan.has("server naps") and world.plan.has("cut")


def _was_mute(world: "World", member: int) -> bool:
    return any(process.number == member and is_mute(process) for process in world.processes)


def is_mute(process: "Process") -> bool:
    """Whether the server may have taken a process for lost because of its silence."""
    return process.longest_silence >= mute_seconds(process.world) - 0.01


def mute_seconds(world: "World") -> float:
    """The least silence of a process after which one of its sessions may count as lost.

    A session's heartbeat comes up to a second later if the process is active in another group.
    """
    if not world.plan.groups:
        return PROMISED_SILENCE_SECONDS
    # All frames of one session may be lost, while another session of the member is heard.
    return (
        limits.HEARTBEAT_SECONDS if world.plan.weather.dropped else PROMISED_SILENCE_SECONDS - limits.HEARTBEAT_SECONDS
    )


# A rank in an error, and its reported position in the code, which contains the rank too.
_PLACED = re.compile(r"rank (\d+)(?: \([^)]*\)+)? is in program\.py:(\d+) run")


def check_whereabouts(world: "World", text: str) -> None:
    """The reported position of a late rank is that rank's own answer."""
    for rank, answered in _PLACED.findall(text):
        world.network.count("answered where")
        if rank != answered:
            world.report("a rank is said to be where it is", text)


def _mismatch_is_true(world: "World", _outcome: "Outcome", _error: Any) -> bool:
    return world.plan.has("skips", "swaps")


def _conflict_is_true(world: "World", _outcome: "Outcome", _error: Any) -> bool:
    return may_meet_another_beginning(world)


def _timeout_is_true(world: "World", outcome: "Outcome", error: Any) -> bool:
    """The missing members did not contribute, are not known to be lost, and do not wait for others themselves."""
    missing = error.fields.get("missing")
    if missing is None:
        # The member got no answer. The server would have answered with its own timeout, unless the member was frozen.
        if outcome.process.frozen_seconds >= world.plan.deadline:
            return True
        if "last report: " in str(error):
            return _was_counted_anew(world)
        away = sum(back - gone for gone, back in world.server.outages)
        return away > world.plan.deadline / 2 or world.plan.weather.dropped > 0
    if world.server.outages or world.timeouts.get(outcome.key) == str(error):
        # A late contribution to a round that timed out gets the error of the timeout.
        return True
    world.timeouts[outcome.key] = str(error)
    return all(_is_late(world, outcome, member) for member in missing)


def _was_counted_anew(world: "World") -> bool:
    """A restarted server counts a round's time anew; a server that napped or heard late of the round times out late."""
    return bool(world.server.outages) or bool(nap_seconds(world)) or not world.plan.weather.is_fair


def _is_late(world: "World", outcome: "Outcome", member: int) -> bool:
    gone = [fact for fact in world.facts if fact.member == member and fact.how in ENDS]
    # Another process may have replaced it.
    if (
        gone
        and not _lives(world, member)
        and outcome.ended - max(gone[-1].when, outcome.started) > LOSS_SECONDS + 2 * nap_seconds(world)
    ):
        return False
    waits = [
        one for process in world.processes if process.number == member for one in process.outcomes if not one.ended
    ]
    for wait in waits:
        since = outcome.ended - wait.started
        if wait.key == outcome.key and since > 2 * MAX_RETRY_SECONDS + MARGIN and world.plan.weather.is_fair:
            return _was_frozen(world, member)
        if since > THREADED_QUIET_SECONDS + MARGIN and _all_wait(world, outcome, since):
            return _was_frozen(world, member)
    return True


def _all_wait(world: "World", outcome: "Outcome", seconds: float) -> bool:
    """Whether all others have waited as long, in any round, not counting the time that their lost frames cost."""
    others = [process for process in world.processes if process.result is None and process is not outcome.process]
    least = min(seconds, THREADED_QUIET_SECONDS + MARGIN)
    waits = [process.outcomes[-1] if process.outcomes else None for process in others]
    return all(wait and not wait.ended and _seconds_in(world, wait) >= least for wait in waits)


def _seconds_in(world: "World", wait: "Outcome") -> float:
    return world.clock.now - wait.started - MAX_RETRY_SECONDS * len(_lost(world, wait))


def _was_frozen(world: "World", member: int) -> bool:
    return any(fact.member == member and fact.how in {"frozen", "cut"} for fact in world.facts) or bool(
        nap_seconds(world)
    )


def nap_seconds(world: "World") -> float:
    """The total length of the server's naps."""
    return sum(fault.seconds for fault in world.plan.faults if fault.kind == "server naps")


def _unknown_session_is_true(world: "World", outcome: "Outcome", _error: Any) -> bool:
    """The server took the member for lost, or another run has replaced the member's run."""
    number = outcome.process.number
    cut = any(fact.member == number and is_long_cut(fact) for fact in world.facts)
    return cut or _was_mute(world, number) or world.plan.relaunch or bool(world.server.outages)


def _refusal_is_true(world: "World", _outcome: "Outcome", _error: Any) -> bool:
    """Another run has begun, or after a restart members of two runs meet; the earlier one may have been frozen."""
    return (
        world.plan.relaunch
        or bool(world.plan.replaced_after)
        or (bool(world.server.outages) and any(fact.how in {*ENDS, "frozen"} for fact in world.facts))
    )


def _incomplete_is_true(world: "World", outcome: "Outcome", _error: Any) -> bool:
    """A member of the group did not register, or left."""
    members = world.plan.members_of("" if outcome.group == "world" else outcome.group)
    absent = any(
        fact.member in members and (fact.how in ENDS or fact.how in {"frozen", "slow"}) for fact in world.facts
    )
    late = world.plan.has("joins late", "skips", "swaps", "comes") or (world.plan.passes and world.plan.has("slow"))
    return absent or bool(late) or not world.plan.weather.is_fair or bool(world.server.outages)


def _duplicate_is_true(world: "World", outcome: "Outcome", _error: Any) -> bool:
    return len([one for one in world.processes if one.number == outcome.process.number]) > 1


def _unreachable_is_true(world: "World", _outcome: "Outcome", _error: Any) -> bool:
    long = any(back - gone >= ANSWER_SECONDS / 2 for gone, back in world.server.outages)
    return long or not world.plan.weather.is_fair or world.plan.has("cut", "server naps", "frozen")


def _protocol_is_true(world: "World", _outcome: "Outcome", _error: Any) -> bool:
    return world.plan.weather.corrupted > 0


TRUTHS: dict[type[BaseException], Callable[["World", "Outcome", Any], bool]] = {
    errors.ReplicaLost: _replica_lost_is_true,
    errors.RoundMismatch: _mismatch_is_true,
    errors.RoundTimeout: _timeout_is_true,
    errors.ContributionConflict: _conflict_is_true,
    errors.UnknownSession: _unknown_session_is_true,
    errors.RegistrationRefused: _refusal_is_true,
    errors.StaleEpoch: _refusal_is_true,
    errors.GroupIncomplete: _incomplete_is_true,
    errors.DuplicateMember: _duplicate_is_true,
    errors.ServerUnreachable: _unreachable_is_true,
    errors.ProtocolError: _protocol_is_true,
    errors.VersionMismatch: _protocol_is_true,
}


def opened(process: "Process", before: float) -> bool:
    """Whether the process had heard before the time `before` that the group was open."""
    connects = [one for one in process.outcomes if one.what == "connect" and one.ended and not one.error]
    return any(one.ended < before for one in connects)


def newcomers_may_come_first(world: "World") -> bool:
    """Whether a full group of processes that knew of no open group may have reached a restarted server first."""
    return any(
        sum(not opened(one, gone) for one in world.processes) >= world.plan.size for gone, _ in world.server.outages
    )


def may_meet_another_beginning(world: "World") -> bool:
    """Whether newcomers may have begun the group anew, and then have met an earlier member at a still later server."""
    return len(world.server.outages) > 1 and newcomers_may_come_first(world)
