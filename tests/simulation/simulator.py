"""The fault simulator: one seed is one world of members and a server, and its faults.

Members run the client's real state machines and the server is the real dispatcher, as plain functions of virtual time.
"""

import contextlib
import logging
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from simulation import simulated_membership_rules as membership_rules
from simulation import simulated_rules as rules
from simulation.simulated_member import Outcome, Process
from simulation.simulated_memory import SimulatedMemory, check_waits
from simulation.simulated_network import Clock, Network, SimulatedServer, is_sound
from simulation.simulated_plan import Call, Fault, Plan, draw
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError
from statsd_bn.reduction import Rows
from statsd_bn.round_key import GATHER, RoundKey
from statsd_bn.wire import decode
from support.oracle import Ledger

if TYPE_CHECKING:
    from server.group.master import SyncMaster

TRACE_ENTRIES = 60

# The rows of a world are parts of a sequence of this many numbers.
NR_NUMBERS = 211

# A world with more events has messages that cause messages without end; the busiest correct ones have a third as many.
MOST_EVENTS = 30_000

# Above all levels of a log.
SILENT = logging.CRITICAL + 1

# A world that lasts longer than this has a wait without an end.
LONGEST_WORLD = 2000.0


class Finding(AssertionError):
    """A broken rule; the text has the seed, the rule, and the end of the trace."""

    def __init__(self, seed: int, rule: str, complaint: str, trace: list[str]) -> None:
        end_of_trace = "\n".join(trace[-TRACE_ENTRIES:])
        super().__init__(f"seed {seed}, {rule}: {complaint}\n{end_of_trace}")
        self.seed, self.rule, self.complaint = seed, rule, complaint


@dataclass
class Fact:
    """Something that really happened to a member, which an error may name."""

    when: float
    member: int
    how: str
    cause: str = ""
    until: float = 0.0


@dataclass
class Counters:
    worlds: int = 0
    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Counters") -> None:
        self.worlds += other.worlds
        self.rounds += other.rounds
        self.faults += other.faults
        self.errors += other.errors


class World:
    def __init__(self, seed: int) -> None:
        self.plan: Plan = draw(seed)
        self.seed = seed
        self.rng = random.Random(seed + 2**40)
        self.trace: list[tuple[Any, ...]] = []
        self.clock = Clock()
        self.network = Network(self.clock, self.rng, self.plan.weather, self.trace)
        # Rounds: the time of the last contribution, and the members according to the server and to the receivers.
        self.contributed_at: dict[RoundKey, float] = {}
        self.left_a_round = 0.0
        self.sent: dict[RoundKey, tuple[int, ...]] = {}
        self.covers_since: dict[RoundKey, float] = {}
        self.sent_at: dict[RoundKey, float] = {}
        self.arrived: dict[tuple[SyncMaster | None, RoundKey], set[int]] = {}
        self.covered: list[membership_rules.Covered] = []
        self.pass_began: dict[int, int] = {}
        self.server = SimulatedServer(self.clock, self.network, self.rng, self.trace)
        self.server.on_receive = self._on_receive
        self._membership_changes = bool(self.plan.min_members or self.plan.passes)
        self.server.on_start = self._server_starts
        if self._membership_changes:
            self.server.on_answer = lambda frame: membership_rules.note_sent(self, frame)
        self.server.on_tick = self._check
        self.ledger = Ledger()
        self.facts: list[Fact] = []
        self.processes: list[Process] = []
        # Members registered since the server's restart, with the time; the first error of each timed-out round.
        self.returned: dict[Process, float] = {}
        self.timeouts: dict[RoundKey, str] = {}
        self.rounds = 0
        self.memories: list[SimulatedMemory] = []
        # The rounds after which members have agreed on memory.
        self.agreements: set[RoundKey] = set()
        self._events = 0
        self._finding: Finding | None = None
        self._numbers = self._draw_numbers()

    def run(self) -> Counters:
        with quiet():
            self.server.start()
            for number in range(self.plan.size):
                self._spawn(number, 0, 0, self.rng.random() * 0.05)
            self._still_there = self.processes[0]
            for fault in self.plan.faults:
                if fault.when:
                    self.clock.at(0.06 + fault.when, self._inject, fault)
            self._run_until(self._all_over)
            rules.check_end(self)
            membership_rules.check_no_step_grows(self)
            expiry = self.clock.now + self.plan.deadline + limits.SILENCE_SECONDS + 3.0
            self._run_until(lambda: self.clock.now > expiry or rules.is_empty(self))
            rules.check_nothing_is_left(self)
        return self._counters()

    def offer_memory(self, members: int) -> int:
        """Makes memory for a group with this number of members; returns the memory's index in `memories`."""
        self.memories.append(SimulatedMemory(self, members))
        return len(self.memories) - 1

    def report(self, rule: str, complaint: str) -> None:
        """Report a broken rule; it ends the run."""
        if self._finding is None:
            self._finding = Finding(self.seed, rule, complaint, self.trace_lines())
        raise self._finding

    def fall_apart(self) -> None:
        """Drops the references among the world's parts, which frees them faster than garbage collection."""
        for part in (*self.processes, self.server, self.network, self.clock, self):
            vars(part).clear()

    def trace_lines(self) -> list[str]:
        return [f"{self.plan}", *(_describe(entry) for entry in self.trace)]

    def note(self, process: Process, how: str, cause: str = "", seconds: float = 0.0) -> None:
        fact = Fact(self.clock.now, process.number, how, cause, self.clock.now + seconds)
        self.facts.append(fact)
        self.trace.append((self.clock.now, how, process, cause))

    def judge(self, outcome: Outcome) -> None:
        self.trace.append((self.clock.now, "error" if outcome.error else "has", outcome.process, outcome.error or ""))
        rules.check_outcome(self, outcome)

    def process_ended(self, process: Process) -> None:
        """A process has ended; a launcher may restart the job with the next epoch."""
        failed = process.result != "done"
        if failed and self.plan.relaunch and process.life == 0:
            self._spawn(process.number, 1, 1, 0.5 + self.rng.random())
        early = failed or self.plan.has("leaves early")
        if early and self.plan.min_members:
            self._replace(process)

    def _replace(self, process: Process) -> None:
        """Plans a newcomer in the place of a process that has ended; it starts only if others still run."""
        if self.plan.replaced_after and process.life == 0:
            self.clock.after(self.plan.replaced_after * (0.5 + self.rng.random()), self._start_newcomer, process.number)

    def _start_newcomer(self, number: int) -> None:
        if all(process.result is not None for process in self.processes):
            return
        self.network.count("newcomers")
        self._spawn(number, 1 + max((one.life for one in self.processes if one.number == number), default=0), 0, 0.0)

    def rows(self, process: Process, key: RoundKey, call: Call) -> Rows:
        counts = self.plan.replicas[process.number % self.plan.size]
        vectors, channels = 2, call.channels
        if key.phase == GATHER:
            # Each member has another number of channels.
            counts, vectors, channels = (0,), 1, 1 + process.number
        name = (process.number, process.life, process.epoch, key.group, key.step, key.layer, key.call, key.phase)
        size = len(counts) * vectors * channels
        start = zlib.crc32(repr(name).encode()) % (len(self._numbers) - size)
        return Rows(counts, self._numbers[start : start + size].reshape(len(counts), vectors, channels))

    def _draw_numbers(self) -> Any:
        rng = np.random.Generator(np.random.PCG64(self.seed + 2**41))
        widest = 300 if self.plan.oddities else 30
        numbers = np.ldexp(rng.random(NR_NUMBERS) - 0.5, rng.integers(-widest, widest + 1, NR_NUMBERS))
        if self.plan.oddities:
            for odd in (float("nan"), float("inf"), -float("inf"), 5e-324, -0.0, 1.7e308, 1.7e308):
                numbers[rng.integers(NR_NUMBERS)] = odd
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
                self.report("messages do not cause messages without end", f"{self._events} events")
            if self._finding:
                raise self._finding
            if self.clock.now > LONGEST_WORLD:
                self.report("every wait ends", f"at {self.clock.now} s {[p for p in self.processes if not p.result]}")

    def _all_over(self) -> bool:
        # Runs after each event, so it first checks the process that was still running at the last check.
        if not self.server.up or self._still_there.result is None:
            return False
        there = next((process for process in self.processes if process.result is None), None)
        self._still_there = there or self._still_there
        return there is None

    def _inject(self, fault: Fault) -> None:
        if fault.kind.startswith("server"):
            self._inject_server_fault(fault)
            return
        if fault.kind == "comes":
            self._start_newcomer(fault.member)
            return
        process = next((p for p in reversed(self.processes) if p.number == fault.member and p.result is None), None)
        if process is None:
            return
        self.network.count(fault.kind)
        if fault.kind in {"killed", "vanished"}:
            self.note(process, fault.kind)
            process.kill(silently=fault.kind == "vanished")
            if self.plan.relaunch and process.life == 0:
                self._spawn(process.number, 1, 1, 0.5 + self.rng.random())
            self._replace(process)
        elif fault.kind == "frozen":
            self.note(process, "frozen", seconds=fault.seconds)
            process.freeze(fault.seconds)
        elif fault.kind == "cut":
            self.note(process, "cut", seconds=fault.seconds)
            self.network.cut(process, fault.seconds)
        elif fault.kind == "slow":
            self.note(process, "slow")
            process.slowness = fault.seconds

    def _inject_server_fault(self, fault: Fault) -> None:
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
        return sum(entry[1] == "to server" and rules.kind_of(entry[3]) == rules.CONTRIBUTION for entry in self.trace)

    @property
    def aggregates(self) -> int:
        return sum(entry[1] == "to member" and rules.kind_of(entry[3]) == rules.AGGREGATE for entry in self.trace)

    def _on_receive(self, process: Process, frame: bytes) -> None:
        # The sender of a damaged frame is unknown to the server, and stack reports do not count as heartbeats.
        is_registered = not self.plan.weather.corrupted or is_sound(frame)
        if is_registered and rules.kind_of(frame) != rules.WHEREABOUTS:
            process.record_frame()
        if self._membership_changes:
            membership_rules.note_arrival(self, frame)
        if self.server.outages:
            rules.note_return(self, process, frame)

    def _check(self) -> None:
        rules.check_memory(self)
        check_waits(self)

    def _server_starts(self) -> None:
        self.arrived.clear()
        self.returned.clear()

    def _counters(self) -> Counters:
        faults = Counter(self.network.faults)
        faults.update(fault.kind for fault in self.plan.faults if fault.kind not in faults and not fault.when)
        errors = [outcome.error for process in self.processes for outcome in process.outcomes]
        return Counters(1, self.rounds, faults, Counter(type(error).__name__ for error in errors if error))


def _describe(entry: tuple[Any, ...]) -> str:
    when, what, *rest = entry
    return f"{when:10.5f} {what} " + " ".join(_message(one) if type(one) is bytes else str(one) for one in rest)


def _message(frame: bytes) -> str:
    try:
        message = decode(frame)
    except StatsdBNError as error:
        return f"<{error}>"
    text = " ".join(repr(message).split())
    return text if len(text) < 400 else f"{text[:400]}..."


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logger = logging.getLogger("statsd_bn")
    level = logger.level
    # Each change of level clears the caches of all loggers, so many worlds share one change.
    if level != SILENT:
        logger.setLevel(SILENT)
    try:
        yield
    finally:
        if level != SILENT:
            logger.setLevel(level)


def run(seed: int) -> Counters:
    world = World(seed)
    counters = world.run()
    world.fall_apart()
    return counters
