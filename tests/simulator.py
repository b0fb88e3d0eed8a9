"""The fault simulator: one seed is one world of members and a master, and whatever happens to them.

Members run the real client over a simulated transport, the master is the real dispatcher; see `simulated_network.py`
for time and network, `simulated_plan.py` for what happens, `oracle.py` for what must come out of a round, and
`simulated_rules.py` for what must be true of everything else. `scripts/simulate` runs many seeds.
"""

import contextlib
import logging
import os
import random
import sys
import time
import types
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

import simulated_rules as rules
from client.connection import Connection
from client.groups import Group
from client.registration import cause_of
from client.session import Member
from oracle import Brought, KeyCounter, Ledger
from simulated_network import BEACON_RECONNECT_SECONDS, Clock, Network, SimulatedChannel, SimulatedServer
from simulated_network import SimulatedTransport as Transport
from simulated_plan import Call, Fault, Plan, draw
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import BACKWARD, FORWARD, Aggregate, Contribution, RoundKey, Rows
from statsd_bn.wire import decode

TRACE_TOLD = 60

# A world in which more happens has messages that beget messages; the busiest others have a third of it.
MOST_EVENTS = 30_000

# A world that lasts longer than this has a wait without an end.
LONGEST_WORLD = 2000.0


class Finding(AssertionError):
    """A rule was broken; `str` tells the seed, the rule, and the end of the trace."""

    def __init__(self, seed: int, rule: str, complaint: str, trace: list[str]) -> None:
        told = "\n".join(trace[-TRACE_TOLD:])
        super().__init__(f"seed {seed}, {rule}: {complaint}\n{told}")
        self.seed, self.rule, self.complaint = seed, rule, complaint


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


@dataclass
class Fact:
    """Something that really happened to a member, which an error may name."""

    when: float
    member: int
    how: str
    cause: str = ""
    until: float = 0.0


@dataclass
class Tally:
    """What happened in many worlds."""

    worlds: int = 0
    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        self.worlds += other.worlds
        self.rounds += other.rounds
        self.faults += other.faults
        self.errors += other.errors


class Process:
    """One life of one member: a greenlet, its transport, and its heartbeats."""

    def __init__(self, world: "World", number: int, life: int, epoch: int) -> None:
        self.world, self.number, self.life, self.epoch = world, number, life, epoch
        self.alive = True
        self.frozen_until = 0.0
        self.frozen_seconds = 0.0
        self.slowness = 0.0
        self.outcomes: list[Outcome] = []
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

    def freeze(self, seconds: float) -> None:
        self.frozen_until = max(self.frozen_until, self.world.clock.now + seconds)
        self.frozen_seconds += seconds
        self.world.clock.at(self.frozen_until, self._beat)

    def end(self, *, silently: bool) -> None:
        """Killed, or its host vanished: not one more frame leaves it."""
        self.alive = False
        self.result = "killed"
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
        """Does what `client/heartbeat.py` does in a thread."""
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
        with self.connection:
            self._train()

    def _train(self) -> None:
        keys: dict[str, KeyCounter] = defaultdict(KeyCounter)
        for step in range(self.world.plan.steps):
            if self._faults("leaves early", step):
                return
            self._step(keys, step)

    def _step(self, keys: dict[str, KeyCounter], step: int) -> None:
        walked: list[tuple[RoundKey, Call]] = []
        calls = self._calls_of(step)
        for place, call in enumerate(calls):
            self._think(step, place)
            at_step, number = keys[call.group].forward(call.layer)
            key = RoundKey("job", call.group or "world", self.epoch, at_step, call.layer, number, FORWARD)
            self._exchange(key, call)
            walked.append((key, call))
        if step in self.world.plan.dry:
            return
        for place, (key, call) in enumerate(reversed(walked)):
            self._think(step, len(calls) + place)
            keys[call.group].backward()
            self._exchange(replace(key, phase=BACKWARD), call)

    def _calls_of(self, step: int) -> list[Call]:
        """The calls that this member makes; those of members whose programs are sound are the same."""
        calls = [call for call in self.world.plan.calls if self.number in self.world.plan.members_of(call.group)]
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

    def _exchange(self, key: RoundKey, call: Call) -> None:
        world = self.world
        rows = world.rows(self, key, call)
        brought = Brought(self.number, self.life, rows)
        world.ledger.bring(key, brought)
        members: Iterable[int] = world.plan.members_of(call.group)
        group = Group(call.group, len(members)) if call.group else None
        asked = None if key.phase == FORWARD else key
        aggregate: Aggregate = self._observed(
            "exchange", call.group or "world", key, lambda: self.connection.exchange(call.layer, rows, asked, group)
        )
        if aggregate.key != key:
            world.find("keys follow the rule", f"{self}: expected {key}, got {aggregate.key}")
        if world.plan.min_members:
            members = rules.check_coverage(world, self, aggregate)
        elif list(aggregate.members) != list(members):
            world.find("membership changes only where it may", f"{self}: {aggregate.key} covers {aggregate.members}")
        if complaint := world.ledger.complaint(aggregate, members, brought):
            world.find("aggregates are exact", complaint)
        world.rounds += 1

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


class World:
    """Everything of one seed."""

    def __init__(self, seed: int) -> None:
        self.plan: Plan = draw(seed)
        self.seed = seed
        self.rng = random.Random(seed + 2**40)
        self.trace: list[tuple[Any, ...]] = []
        self.clock = Clock()
        self.network = Network(self.clock, self.rng, self.plan.weather, self.trace)
        self.server = SimulatedServer(self.clock, self.network, self.rng, self.trace)
        self.server.on_receive = self._heard
        self.server.on_tick = lambda: rules.check_memory(self)
        self.ledger = Ledger()
        self.facts: list[Fact] = []
        self.processes: list[Process] = []
        self.heard: dict[int, float] = {}
        self.longest_silence: dict[int, float] = {}
        self.rounds = 0
        self._events = 0
        self._finding: Finding | None = None
        self._numbers = self._draw_numbers()

    def run(self) -> Tally:
        """Runs the world to its end.

        Raises:
            Finding: a rule is broken.
        """
        with virtual(self):
            self.server.start()
            for number in range(self.plan.size):
                self._spawn(number, 0, 0, self.rng.random() * 0.05)
            for fault in self.plan.faults:
                if fault.when:
                    self.clock.at(0.06 + fault.when, self._befall, fault)
            self._run_until(self._all_over)
            rules.check_end(self)
            expiry = self.clock.now + self.plan.deadline + limits.SILENCE_SECONDS + 3.0
            self._run_until(lambda: self.clock.now > expiry or rules.is_empty(self))
            rules.check_nothing_is_left(self)
        return self._tally()

    def find(self, rule: str, complaint: str) -> None:
        """A rule is broken; whoever notices it, the run ends with it."""
        if self._finding is None:
            self._finding = Finding(self.seed, rule, complaint, self.told())
        raise self._finding

    def told(self) -> list[str]:
        """The trace, for people."""
        return [f"{self.plan}", *(_told(entry) for entry in self.trace)]

    def note(self, process: Process, how: str, cause: str = "", seconds: float = 0.0) -> None:
        fact = Fact(self.clock.now, process.number, how, cause, self.clock.now + seconds)
        self.facts.append(fact)
        if how in rules.ENDS and process.number in self.heard:
            self._hear(process.number)
        self.trace.append((self.clock.now, how, process, cause))

    def judge(self, outcome: Outcome) -> None:
        self.trace.append((self.clock.now, "error" if outcome.error else "has", outcome.process, outcome.error or ""))
        rules.check_outcome(self, outcome)

    def over(self, process: Process) -> None:
        """A process has ended by itself; a launcher may start the whole job again, with the next epoch."""
        failed = process.result != "done"
        if failed and self.plan.relaunch and process.life == 0:
            self._spawn(process.number, 1, 1, 0.5 + self.rng.random())

    def rows(self, process: Process, key: RoundKey, call: Call) -> Rows:
        counts = self.plan.replicas[process.number]
        name = (process.number, process.life, process.epoch, key.group, key.step, key.layer, key.call, key.phase)
        size = len(counts) * 2 * call.channels
        start = zlib.crc32(repr(name).encode()) % (len(self._numbers) - size)
        return Rows(counts, self._numbers[start : start + size].reshape(len(counts), 2, call.channels))

    def _draw_numbers(self) -> Any:
        rng = random.Random(self.seed + 2**41)
        widest = 300 if self.plan.oddities else 30
        numbers = np.array([(rng.random() - 0.5) * 2.0 ** rng.randint(-widest, widest) for _ in range(211)])
        if self.plan.oddities:
            for odd in (float("nan"), float("inf"), -float("inf"), 5e-324, -0.0, 1.7e308, 1.7e308):
                numbers[rng.randrange(len(numbers))] = odd
        return numbers

    def _spawn(self, number: int, life: int, epoch: int, seconds: float) -> None:
        process = Process(self, number, life, epoch)
        self.processes.append(process)
        self.clock.after(seconds, process.start)

    def _run_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.clock.step()
            self._events += 1
            if self._events > MOST_EVENTS:
                self.find("messages do not beget messages without end", f"{self._events} events")
            if self._finding:
                raise self._finding
            if self.clock.now > LONGEST_WORLD:
                self.find("every wait ends", f"at {self.clock.now} s {[p for p in self.processes if not p.result]}")

    def _all_over(self) -> bool:
        return all(process.result is not None for process in self.processes) and self.server.up

    def _befall(self, fault: Fault) -> None:
        if fault.kind.startswith("server"):
            self._befall_server(fault)
            return
        process = next((p for p in reversed(self.processes) if p.number == fault.member and p.result is None), None)
        if process is None:
            return
        self.network.count(fault.kind)
        if fault.kind in {"killed", "vanished"}:
            self.note(process, fault.kind)
            process.end(silently=fault.kind == "vanished")
            if self.plan.relaunch and process.life == 0:
                self._spawn(process.number, 1, 1, 0.5 + self.rng.random())
        elif fault.kind == "frozen":
            self.note(process, "frozen", seconds=fault.seconds)
            process.freeze(fault.seconds)
        elif fault.kind == "cut":
            self.note(process, "cut", seconds=fault.seconds)
            self.network.cut(process, fault.seconds)
        elif fault.kind == "slow":
            self.note(process, "slow")
            process.slowness = fault.seconds

    def _befall_server(self, fault: Fault) -> None:
        if not self.server.up:
            return
        self.network.count(fault.kind)
        if fault.kind == "server naps":
            self.server.nap(fault.seconds)
            return
        self.server.kill() if fault.kind == "server killed" else self.server.stop()
        self.clock.after(max(fault.seconds, 0.3), self.server.start)

    @property
    def contributions(self) -> int:
        return sum(entry[1] == "to server" and _kind(entry[3]) is Contribution for entry in self.trace)

    @property
    def aggregates(self) -> int:
        return sum(entry[1] == "to member" and _kind(entry[3]) is Aggregate for entry in self.trace)

    def _heard(self, process: Process, _frame: bytes) -> None:
        self._hear(process.number)

    def _hear(self, number: int) -> None:
        silence = self.clock.now - self.heard.get(number, self.clock.now)
        self.longest_silence[number] = max(silence, self.longest_silence.get(number, 0.0))
        self.heard[number] = self.clock.now

    def _tally(self) -> Tally:
        faults = Counter(self.network.faults)
        faults.update(fault.kind for fault in self.plan.faults if fault.kind not in faults and not fault.when)
        errors = [outcome.error for process in self.processes for outcome in process.outcomes]
        return Tally(1, self.rounds, faults, Counter(type(error).__name__ for error in errors if error))


def _told(entry: tuple[Any, ...]) -> str:
    when, what, *rest = entry
    return f"{when:10.5f} {what} " + " ".join(_message(one) if type(one) is bytes else str(one) for one in rest)


def _kind(frame: bytes) -> type:
    return type(decode(frame))


def _message(frame: bytes) -> str:
    try:
        message = decode(frame)
    except StatsdBNError as error:
        return f"<{error}>"
    text = " ".join(repr(message).split())
    return text if len(text) < 400 else f"{text[:400]}..."


@contextlib.contextmanager
def virtual(world: World) -> Iterator[None]:
    """The client's clock, chance and tokens are the world's."""

    def sleep(seconds: float) -> None:
        process = next(process for process in world.processes if process._greenlet is getcurrent())
        process.wait(seconds)

    def now() -> float:
        return world.clock.now

    fakes = {
        time: types.SimpleNamespace(monotonic=now, perf_counter=now, sleep=sleep),
        random: world.rng,
        os: types.SimpleNamespace(urandom=world.rng.randbytes, getpid=lambda: 1, environ={}),
    }
    clients = [module for name, module in sys.modules.items() if name.startswith("client.")]
    changed = [
        (module, name, real)
        for module in clients
        for name, real in vars(module).items()
        if isinstance(real, types.ModuleType) and real in fakes
    ]
    logger = logging.getLogger("statsd_bn")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    for module, name, real in changed:
        setattr(module, name, fakes[real])
    try:
        yield
    finally:
        for module, name, real in changed:
            setattr(module, name, real)
        logger.setLevel(level)


def run(seed: int) -> Tally:
    """Runs one world."""
    return World(seed).run()
