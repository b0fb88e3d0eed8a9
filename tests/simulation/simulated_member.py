"""One member of a simulated world: a greenlet that runs the real client, and a program for it."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, greenlet

from client.connection.connection import Connection
from client.connection.groups import Group
from client.connection.member import Member
from client.connection.registration import cause_of
from simulation import simulated_membership_rules as membership_rules
from simulation.simulated_network import BEACON_RECONNECT_SECONDS, SimulatedChannel
from simulation.simulated_network import SimulatedTransport as Transport
from simulation.simulated_plan import GATHERED, Call, Fault
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import FORWARD, GATHER, RoundKey
from statsd_bn.rows import Rows
from support.oracle import Brought, KeyCounter

if TYPE_CHECKING:
    from simulation.simulator import World


class Mishap(RuntimeError):
    """What a member's program raises on purpose."""


@dataclass
class Outcome:
    """How one wait of one member ended."""

    process: "Process"
    what: str
    group: str
    key: RoundKey | None
    started: float
    ended: float = 0.0
    error: BaseException | None = None


@dataclass(frozen=True)
class Span:
    """Turns of a program that a member takes part in: those of one pass over the data, or of the whole run."""

    base: int
    first: int
    end: int


class Process:
    """One life of one member: a greenlet, its transport, and its heartbeats."""

    def __init__(self, world: "World", number: int, life: int, epoch: int) -> None:
        self.world, self.number, self.life, self.epoch = world, number, life, epoch
        self.alive = True
        self.frozen_until = 0.0
        self.frozen_seconds = 0.0
        self.slowness = 0.0
        self.outcomes: list[Outcome] = []
        self.began = world.clock.now
        self.spans: list[Span] = []
        self.joined_late = False
        self.rounds = 0
        self.heard = self.began
        self.longest_silence = 0.0
        self.ended = float("inf")
        self.result: BaseException | str | None = None
        self.connection: Connection | None = None
        self._ticket = 0
        self._waits_on: SimulatedChannel | None = None
        self._introduced: set[bytes] = set()
        self._beacon: SimulatedChannel | None = None
        self._greenlet = greenlet(self._run)
        self._beat_at = float("inf")

    def __repr__(self) -> str:
        return f"member {self.number}.{self.life}"

    def start(self) -> None:
        self._greenlet.switch()

    def wait(self, seconds: float, channel: SimulatedChannel | None = None) -> None:
        """Called by the member: until a frame comes on its channel, or the time is over."""
        self._ticket += 1
        self._waits_on = channel
        self._beat()
        self.world.clock.after(max(seconds, 0.0), self._wake, self._ticket)
        self._greenlet.parent.switch()
        if not self.alive:
            raise GreenletExit

    def delivered(self, channel: SimulatedChannel) -> None:
        if channel is self._waits_on:
            self._wake(self._ticket)
        elif channel is self._beacon and self.world.clock.now >= self.frozen_until:
            self._listen()

    def _listen(self) -> None:
        """Does what the heartbeat's thread does with what it hears."""
        sessions = self.connection._sessions.all() if self.connection else []
        while self._beacon.inbox:
            frame = self._beacon.inbox.popleft()
            for session in sessions:
                for reply in session.overhear(frame) if session.is_known and not self.connection.closed else ():
                    self._beacon.send(reply)

    def connected_anew(self, channel: SimulatedChannel) -> None:
        if channel is self._beacon:
            self._introduced.clear()
            self._beat()
        elif channel is self._waits_on:
            # The wait looks a moment later whether its connection is another.
            self._wake(self._ticket)

    def hear(self) -> None:
        """The server has heard of it."""
        now = self.world.clock.now
        self.longest_silence = max(self.longest_silence, now - self.heard)
        self.heard = now

    def freeze(self, seconds: float) -> None:
        self.frozen_until = max(self.frozen_until, self.world.clock.now + seconds)
        self.frozen_seconds += seconds
        self.world.clock.at(self.frozen_until, self._beat)

    def end(self, *, silently: bool) -> None:
        """Killed, or its host vanished: not one more frame leaves it."""
        self.alive = False
        self.result = "killed"
        self.ended = self.world.clock.now
        self.world.network.vanish(self, silently=silently)
        if self._greenlet:
            self._greenlet.throw(GreenletExit)

    def _wake(self, ticket: int) -> None:
        if ticket != self._ticket or not self.alive:
            return
        if self.world.clock.now < self.frozen_until:
            self.world.clock.at(self.frozen_until, self._wake, ticket)
            return
        self._ticket += 1
        self._waits_on = None
        self._greenlet.switch()

    def _beat(self) -> None:
        """Does what `client/connection/heartbeat.py` does in a thread."""
        now = self.world.clock.now
        if not self.alive or self.connection is None or self.connection.closed or now < self.frozen_until:
            return
        self._listen()
        sessions = [session for session in self.connection._sessions.all() if session.is_known]
        for session in sessions:
            if now - session.spoke >= limits.HEARTBEAT_SECONDS or session.token not in self._introduced:
                session.spoke = now
                if self._beacon.link:
                    self._beacon.send(session.heartbeat())
                    self._introduced.add(session.token)
        if sessions:
            due = min(session.spoke for session in sessions) + limits.HEARTBEAT_SECONDS + 1e-6
            if due < self._beat_at or self._beat_at <= now:
                self._beat_at = due
                self.world.clock.at(due, self._beat)

    def _run(self) -> None:
        try:
            self._live()
        except GreenletExit:
            return
        except Mishap as error:
            self.result = error
            self.world.note(self, "failed", cause_of(error))
        except StatsdBNError as error:
            self.result = error
            self.world.note(self, "failed", cause_of(error))
        else:
            self.result = "done"
            self.world.note(self, "left")
        self._over()

    def _over(self) -> None:
        self.ended = self.world.clock.now
        if self._beacon:
            self.world.network.close(self._beacon)
        # A process that ends closes what is left of its sockets.
        self.world.network.vanish(self, silently=False)
        self.world.over(self)

    def _live(self) -> None:
        plan = self.world.plan
        for fault in self._faults("joins late"):
            self.wait(fault.seconds)
        who = Member("job", "world", self.epoch, self.number, plan.size, plan.deadline, repr(self), plan.min_members)
        self._beacon = SimulatedChannel(self.world.network, self, BEACON_RECONNECT_SECONDS)
        # Its heartbeats begin while it is being made.
        self.connection = Connection.__new__(Connection)
        self._observed("connect", "", None, lambda: self.connection.__init__(Transport(self.world.network, self), who))
        membership_rules.check_restarted(self.world, self)
        self.joined_late = self.connection.first_step > 0
        with self.connection:
            self._train()

    def _train(self) -> None:
        plan = self.world.plan
        if not plan.passes:
            first_step = self.connection.first_step
            self._take_part(Span(0, plan.index_of(first_step), plan.steps), first_step)
            return
        for number in range(len(plan.passes)) if not self.is_newcomer else [len(plan.passes) - 1]:
            if not self._pass(number):
                return

    @property
    def is_newcomer(self) -> bool:
        """Whether it has come later than the job began, in its place or in that of another."""
        return self.life > 0

    def _pass(self, number: int) -> bool:
        """One pass over the data, as `client.join` has it; returns whether there may be another."""
        turns = self.world.plan.passes[number]
        self._observed("come back", "world", None, lambda: self.connection.come_back(None))
        first_step = self.connection.first_step
        membership_rules.check_pass(self.world, self, number, first_step)
        if not self._take_part(Span(first_step, 0, turns[self.number % len(turns)]), first_step):
            return False
        self.world.left_a_round = self.world.clock.now
        self._observed("stay away", "world", None, lambda: self.connection.stay_away(None))
        return True

    def _take_part(self, span: Span, first_step: int) -> bool:
        """Runs turns of the program; returns whether it came to their end."""
        self.spans.append(span)
        membership_rules.check_newcomer(self.world, self, span)
        keys: dict[str, KeyCounter] = defaultdict(lambda: KeyCounter(first_step))
        for step in range(span.first, span.end):
            if self._faults("leaves early", step):
                return False
            self._step(keys, step)
        return True

    def _step(self, keys: dict[str, KeyCounter], step: int) -> None:
        walked: list[tuple[RoundKey, Call]] = []
        calls = self._calls_of(step)
        if self.world.plan.gathers:
            at_step, number = keys[""].forward(GATHERED)
            key = RoundKey("job", "world", self.epoch, at_step, GATHERED, number, GATHER)
            self._exchange(key, Call(GATHERED, 0), step)
        for place, call in enumerate(calls):
            self._think(step, place)
            at_step, number = keys[call.group].forward(call.layer)
            key = RoundKey("job", call.group or "world", self.epoch, at_step, call.layer, number, FORWARD)
            self._exchange(key, call, step)
            walked.append((key, call))
        if step in self.world.plan.dry:
            return
        for phase in self.world.plan.phases:
            for place, (key, call) in enumerate(reversed(walked)):
                self._think(step, len(calls) + place)
                keys[call.group].backward()
                self._exchange(key.of_phase(phase), call, step)

    def _calls_of(self, step: int) -> list[Call]:
        """The calls that this member makes; those of members whose programs are sound are the same."""
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

    def _think(self, step: int, place: int) -> None:
        if self._faults("raises", step, place):
            raise Mishap(f"out of memory in step {step}")
        seconds = self.world.plan.think * self.world.rng.random() + self.slowness
        if seconds:
            self.wait(seconds)

    def _faults(self, kind: str, step: int = 0, place: int | None = None) -> list[Fault]:
        if self.life:
            return []
        return [
            fault
            for fault in self.world.plan.faults
            if (fault.kind, fault.member) == (kind, self.number)
            and (kind == "joins late" or fault.step == step)
            and (place is None or fault.place == place)
        ]

    def _exchange(self, key: RoundKey, call: Call, turn: int) -> None:
        world = self.world
        rows = world.rows(self, key, call)
        brought = Brought(self.number, self.life, rows)
        world.ledger.bring(key, brought)
        world.brought_at[key] = world.clock.now
        members: Iterable[int] = world.plan.members_of(call.group)
        group = Group(call.group, len(members)) if call.group else None
        aggregate: Aggregate = self._observed(
            "exchange", call.group or "world", key, lambda: self._round(key, call.layer, rows, group)
        )
        if aggregate.key != key:
            world.find("keys follow the rule", f"{self}: expected {key}, got {aggregate.key}")
        if world.plan.min_members or world.plan.passes:
            members = membership_rules.check_coverage(world, self, aggregate, turn)
        elif list(aggregate.members) != list(members):
            world.find("membership changes only where it may", f"{self}: {aggregate.key} covers {aggregate.members}")
        if complaint := world.ledger.complaint(aggregate, members, brought):
            world.find("aggregates are exact", complaint)
        membership_rules.check_promptness(world, self, key)
        world.rounds += 1
        self.rounds += 1

    def _round(self, key: RoundKey, layer: str, rows: Rows, group: Group | None) -> Aggregate:
        if key.phase == GATHER:
            return self.connection._round(layer, rows, None, self.connection._world, GATHER)
        return self.connection.exchange(layer, rows, None if key.phase == FORWARD else key, group)

    def _observed(self, what: str, group: str, key: RoundKey | None, action: Callable[[], Any]) -> Any:
        outcome = Outcome(self, what, group, key, self.world.clock.now)
        self.outcomes.append(outcome)
        try:
            return action()
        except StatsdBNError as error:
            outcome.error = error
            raise
        finally:
            if self.alive:
                outcome.ended = self.world.clock.now
                self.world.judge(outcome)
