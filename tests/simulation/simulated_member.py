"""One member of a simulated world: a program whose waits run the client's real state machines."""

from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from client.diagnostics.collectives import TorchGroup
from client.diagnostics.sampler import ThreadSample
from client.native.library import CLOSED
from client.session import groups
from client.session.groups import Group
from client.session.protocol.member import Member
from client.session.protocol.registration import Registration, cause_of
from client.session.protocol.round_trip import RoundTrip
from client.session.protocol.session import LastRoundDone, Session
from client.transports.group_memory import GroupMemory
from client.transports.shared_memory import MemoryRound
from client.transports.transport import key_digest
from simulation import simulated_membership_rules as membership_rules
from simulation import simulated_rules as rules
from simulation.simulated_memory import LISTEN_SECONDS
from simulation.simulated_network import SimulatedSession
from simulation.simulated_plan import GATHERED, Call, Fault
from simulation.simulated_process import SimulatedProcess
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import WORLD, Aggregate, Participation
from statsd_bn.reduction import Rows
from statsd_bn.round_key import FORWARD, GATHER, MEMORY_GATHER, RoundKey
from statsd_bn.skew_samples import SkewSampler
from support.oracle import KeyCounter, MemberRows

if TYPE_CHECKING:
    from simulation.simulator import World

ENDPOINT = "simulated://"

# A part of a program: it yields a number of seconds or a state machine to wait for, and is sent the result.
Part = Generator[Any, Any, Any]


class ProgramError(RuntimeError):
    """An intended error of a member's program."""


@dataclass
class Outcome:
    process: "Process"
    what: str
    group: str
    key: RoundKey | None
    started: float
    ended: float = 0.0
    error: BaseException | None = None


@dataclass(frozen=True)
class Span:
    """The turns of a member: of one pass over the data, or of the whole run."""

    base: int
    first: int
    end: int


class Process(SimulatedProcess):
    def __init__(self, world: "World", number: int, life: int, epoch: int) -> None:
        super().__init__(world.clock, world.network)
        self.world, self.number, self.life, self.epoch = world, number, life, epoch
        self.outcomes: list[Outcome] = []
        self.began = world.clock.now
        self.spans: list[Span] = []
        self.has_connected = False
        self.joined_late = False
        # Whether others have begun the group anew since this member was in it.
        self.is_of_before = False
        self.rounds = 0
        # Start of the current silence; infinite before the first frame to the server.
        self._silent_since = float("inf")
        self._longest_silence = 0.0
        self.ended = float("inf")
        self.result: BaseException | str | None = None
        # Shared memory by group.
        self._memories: dict[str, GroupMemory] = {}
        self._last_round_done = LastRoundDone()
        self._world = groups.group_named(WORLD, world.plan.size)
        # Faults befall only a member's first life.
        self._own_faults = [fault for fault in world.plan.faults if fault.member == number and not life]

    def __repr__(self) -> str:
        return f"member {self.number}.{self.life}"

    def record_frame(self) -> None:
        self._longest_silence = self.longest_silence
        self._silent_since = self.world.clock.now

    @property
    def longest_silence(self) -> float:
        """The longest time in seconds for which the server did not hear of this process while it lived."""
        return max(self._longest_silence, min(self.world.clock.now, self.ended) - self._silent_since)

    def is_through(self, key: RoundKey, then: float) -> bool:
        """Whether this process lives, ended the round before `then`, and was not frozen after `then`."""
        if self.result is not None or self.frozen_until > then:
            return False
        return any(outcome.key == key and 0.0 < outcome.ended < then for outcome in self.outcomes)

    def kill(self, *, silently: bool) -> None:
        """Ends the process as by SIGKILL, or `silently` with its host; no further frame leaves it."""
        self.result = "killed"
        self.ended = self.world.clock.now
        self.end(silently=silently)

    def _run(self) -> Part:
        try:
            yield from self._live()
        except (ProgramError, StatsdBNError) as error:
            self.result = error
            self.leave(cause_of(error))
            self.world.note(self, "failed", cause_of(error))
        else:
            self.result = "done"
            self.leave("")
            self.world.note(self, "left")
        self.ended = self.world.clock.now
        for memory in self._memories.values():
            memory.abandon()
        # A process that ends closes its sockets.
        self.world.network.vanish(self, silently=False)
        self.world.process_ended(self)

    def _live(self) -> Part:
        for fault in self._faults("joins late"):
            yield fault.seconds
        self.has_connected = True
        self.open_beacon()
        session = yield from self._observed("connect", "", None, self._session(self._world))
        membership_rules.check_restarted(self.world, self)
        self.joined_late = session.first_step > 0
        yield from self._train(session)

    def _train(self, session: Session) -> Part:
        plan = self.world.plan
        if not plan.passes:
            first_step = session.first_step
            yield from self._take_part(Span(0, plan.index_of(first_step), plan.steps), first_step)
            return
        for number in range(len(plan.passes)) if not self.is_newcomer else [len(plan.passes) - 1]:
            if not (yield from self._pass(session, number)):
                return

    @property
    def is_newcomer(self) -> bool:
        """Whether this process started later than the job's first processes, as a replacement or a further member."""
        return self.life > 0

    def _pass(self, session: Session, number: int) -> Part:
        """One pass over the data, as `client.join` has it; returns whether there may be another."""
        turns = self.world.plan.passes[number]
        yield from self._observed("come back", "world", None, self._change_stand(session, Participation.REJOINING))
        first_step = session.first_step
        membership_rules.check_pass(self.world, self, number, first_step)
        if not (yield from self._take_part(Span(first_step, 0, turns[self.number % len(turns)]), first_step)):
            return False
        self.world.left_a_round = self.world.clock.now
        yield from self._observed("stay away", "world", None, self._change_stand(session, Participation.PAUSED))
        return True

    def _take_part(self, span: Span, first_step: int) -> Part:
        """Runs turns of the program; returns whether all of them ran."""
        self.spans.append(span)
        membership_rules.check_newcomer(self.world, self, span)
        keys: dict[str, KeyCounter] = defaultdict(lambda: KeyCounter(first_step))
        for step in range(span.first, span.end):
            if self._faults("leaves early", step):
                return False
            yield from self._step(keys, step)
        return True

    def _step(self, keys: dict[str, KeyCounter], step: int) -> Part:
        walked: list[tuple[RoundKey, Call]] = []
        calls = self._calls_of(step)
        if self.world.plan.gathers:
            at_step, number = keys[""].forward(GATHERED)
            key = RoundKey("job", "world", self.epoch, at_step, GATHERED, number, GATHER)
            yield from self._exchange(key, Call(GATHERED, 0), step)
        for place, call in enumerate(calls):
            yield from self._think(step, place)
            at_step, number = keys[call.group].forward(call.layer)
            key = RoundKey("job", call.group or "world", self.epoch, at_step, call.layer, number, FORWARD)
            yield from self._exchange(key, call, step)
            walked.append((key, call))
        if step in self.world.plan.dry:
            return
        for phase in self.world.plan.phases:
            for place, (key, call) in enumerate(reversed(walked)):
                yield from self._think(step, len(calls) + place)
                keys[call.group].backward()
                yield from self._exchange(key.of_phase(phase), call, step)

    def _calls_of(self, step: int) -> list[Call]:
        """The calls of this member; without faults they are the same on all members."""
        plan = self.world.plan
        calls = [call for call in plan.calls if not call.group or self.number in plan.members_of(call.group)]
        for fault in self._faults("skips", step):
            if calls:
                del calls[fault.place % len(calls)]
        for fault in self._faults("swaps", step):
            if len(calls) > 1:
                place = fault.place % (len(calls) - 1)
                calls[place], calls[place + 1] = calls[place + 1], calls[place]
        return calls

    def _think(self, step: int, place: int) -> Part:
        if self._faults("raises", step, place):
            raise ProgramError(f"out of memory in step {step}")
        seconds = self.world.plan.think * self.world.rng.random() + self.slowness
        if seconds:
            yield seconds

    def _faults(self, kind: str, step: int = 0, place: int | None = None) -> list[Fault]:
        if not self._own_faults:
            # Most members have none, and each step asks several times.
            return self._own_faults
        return [
            fault
            for fault in self._own_faults
            if fault.kind == kind
            and (kind == "joins late" or fault.step == step)
            and (place is None or fault.place == place)
        ]

    def _exchange(self, key: RoundKey, call: Call, turn: int) -> Part:
        world = self.world
        rows = world.rows(self, key, call)
        contribution = MemberRows(self.number, self.life, rows)
        world.ledger.record(key, contribution)
        world.contributed_at[key] = world.clock.now
        members: Iterable[int] = world.plan.members_of(call.group)
        group = Group(call.group, len(members)) if call.group else self._world
        aggregate: Aggregate = yield from self._observed(
            "exchange", group.name, key, self._round(key, call.layer, rows, group)
        )
        if aggregate.key != key:
            world.report("keys follow the rule", f"{self}: expected {key}, got {aggregate.key}")
        if world.plan.min_members or world.plan.passes:
            members = membership_rules.check_coverage(world, self, aggregate, turn)
        elif list(aggregate.members) != list(members):
            world.report("membership changes only where it may", f"{self}: {aggregate.key} covers {aggregate.members}")
        complaint = world.ledger.complaint(aggregate, members, contribution)
        if complaint and not membership_rules.is_a_doubles(self, aggregate, members):
            world.report("aggregates are exact", complaint)
        membership_rules.check_promptness(world, self, key)
        world.rounds += 1
        self.rounds += 1

    def sample(self) -> ThreadSample:
        """A simulated member computes: it is never in a collective of torch, and has launched none."""
        group = TorchGroup("0", tuple(range(self.world.plan.size)), 0)
        return ThreadSample(f"program.py:{self.number} run", torch_group=group)

    def receive_notice(self, text: str) -> None:
        rules.check_whereabouts(self.world, text)

    def _round(self, key: RoundKey, layer: str, rows: Rows, group: Group) -> Part:
        """Does what `Connection.round` and `over_server` do, and for layers what `SharedMemoryPipe` does."""
        session = yield from self._session(group)
        if key.phase in {FORWARD, GATHER}:
            key = session.forward_key(layer, key.phase)
        session.steps.record_phase(key.phase)
        memory = self._memories.get(group.name) if key.phase != GATHER and not session.has_uneven_inputs else None
        if memory and memory.arrive(key_digest(key), rows, self.world.clock.now) != CLOSED:
            found = yield from self._round_in_memory(session, key, rows, memory)
            if isinstance(found, Aggregate):
                self.world.network.count("in memory")
                return found
            return (yield found)
        aggregate = yield self._trip(session, key, rows)
        if key.phase != GATHER:
            yield from self._agree(group, session, key)
        return aggregate

    def _trip(self, session: Session, key: RoundKey, rows: Rows) -> RoundTrip:
        return RoundTrip(session, ENDPOINT, key, rows, self.world.rng.random)

    def _round_in_memory(self, session: Session, key: RoundKey, rows: Rows, memory: GroupMemory) -> Part:
        def begin_trip() -> RoundTrip:
            return self._trip(session, key, rows)

        try:
            return (yield MemoryRound(session, key, memory, self.world.clock.now, begin_trip, LISTEN_SECONDS))
        except StatsdBNError:
            memory.abandon()
            raise

    def _agree(self, group: Group, session: Session, key: RoundKey) -> Part:
        """Does what `negotiation.negotiate` does, where the members of a group share memory."""
        plan = self.world.plan
        if not plan.in_memory or plan.min_members or session.has_uneven_inputs or group.name in self._memories:
            return
        self.world.agreements.add(key)
        members = list(session.members)
        me = members.index(self.number)
        offered = self.world.offer_memory(len(members)) if me == 0 else 0
        offers = yield from self._gather(session, float(offered))
        yield from self._gather(session, 0.0)
        memory = self.world.memories[int(offers[0])].of_member(self, me)
        self._memories[group.name] = session.transport.memory = memory
        session.transport.samples = SkewSampler() if me == 0 else None

    def _gather(self, session: Session, value: float) -> Part:
        key = session.forward_key(MEMORY_GATHER, GATHER)
        aggregate = yield self._trip(session, key, Rows((0,), np.full((1, 1, 1), value)))
        return aggregate.values[0]

    def _session(self, group: Group) -> Part:
        if session := self.sessions.get(group.name):
            return session
        session = self.sessions[group.name] = self._new_session(group)
        try:
            yield Registration(session, ENDPOINT, session.member.seconds_to_join)
        except StatsdBNError as error:
            del self.sessions[group.name]
            self.send([session.leave(cause_of(error))])
            raise
        self.beat()
        return session

    def _new_session(self, group: Group) -> Session:
        plan = self.world.plan
        who = Member("job", "world", self.epoch, self.number, plan.size, plan.deadline, repr(self), plan.min_members)
        token = self.world.rng.randbytes(limits.TOKEN_BYTES)
        return SimulatedSession(token, who.in_group(group.name, group.size), self._last_round_done)

    def _change_stand(self, session: Session, participation: Participation) -> Part:
        session.participation = participation
        session.has_uneven_inputs = True
        return (yield Registration(session, ENDPOINT, session.member.round_timeout))

    def _observed(self, what: str, group: str, key: RoundKey | None, part: Part) -> Part:
        outcome = Outcome(self, what, group, key, self.world.clock.now)
        self.outcomes.append(outcome)
        try:
            result = yield from part
        except StatsdBNError as error:
            outcome.error = error
            self._judge(outcome)
            raise
        self._judge(outcome)
        return result

    def _judge(self, outcome: Outcome) -> None:
        outcome.ended = self.world.clock.now
        self.world.judge(outcome)
