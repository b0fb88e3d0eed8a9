"""The plan of a world, drawn from its seed: members, their programs, and faults."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from simulation.simulated_network import Weather
from statsd_bn.round_key import BACKWARD

# Faults of one member.
MEMBER_FAULTS = ("killed", "vanished", "frozen", "slow", "cut")
PROGRAM_FAULTS = ("raises", "skips", "swaps", "leaves early", "joins late")
SERVER_FAULTS = ("server killed", "server stopped", "server naps")

# Freezes and cuts up to these seconds lose no member: heartbeats come every second, 3.5 s of silence are allowed, and
# a cut heartbeat socket reconnects within 0.3 s.
HARMLESS_FREEZE = 2.0
HARMLESS_CUT = 0.15

SECOND_BACKWARD = "second backward"

# The gather at the start of each turn in some worlds.
GATHERED = "gathered"


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong: with the clock at `when`, or in a program at `step` and `place`."""

    kind: str
    member: int = 0
    when: float = 0.0
    seconds: float = 0.0
    step: int = 0
    place: int = 0


@dataclass(frozen=True)
class Call:
    """One forward round of one layer, and the backward round that belongs to it; or one gather."""

    layer: str
    channels: int
    group: str = ""


@dataclass(frozen=True)
class Plan:
    seed: int
    replicas: tuple[tuple[int, ...], ...]
    calls: tuple[Call, ...]
    groups: dict[str, tuple[int, ...]]
    steps: int
    deadline: float
    think: float
    weather: Weather
    faults: tuple[Fault, ...] = ()
    relaunch: bool = False
    min_members: int = 0
    oddities: bool = False
    dry: frozenset[int] = field(default_factory=frozenset)
    phases: tuple[str, ...] = (BACKWARD,)
    passes: tuple[tuple[int, ...], ...] = ()
    replaced_after: float = 0.0
    gathers: bool = False
    in_memory: bool = False

    @property
    def size(self) -> int:
        return len(self.replicas)

    def members_of(self, group: str) -> tuple[int, ...]:
        return self.groups[group] if group else tuple(range(self.size))

    @property
    def has_newcomers(self) -> bool:
        """Whether processes may come that were not there at the beginning."""
        return self.has("comes") or self.replaced_after > 0

    def index_of(self, step: int) -> int:
        """The first turn of the program with rounds of this step; dry turns do not count."""
        index = 0
        while step and index < self.steps:
            step -= index not in self.dry
            index += 1
        return index

    def has(self, *kinds: str) -> bool:
        return any(fault.kind in kinds for fault in self.faults)

    @property
    def is_harmless(self) -> bool:
        """Whether every member must get every aggregate in spite of the faults."""
        # A newcomer may take the place of a late member. A member that has ended a pass waits for slow ones; if it is
        # frozen meanwhile, a restarted server does not wait for it.
        is_late_for_restart = self.has("frozen") and self.has("server killed", "server stopped")
        if self.has("comes") or self.leaves_too_few or (self.passes and (self.has("slow") or is_late_for_restart)):
            return False
        if self.groups and any(self._delays_others(fault) for fault in self.faults):
            return False
        # A frozen member cannot reconnect after a cut, so the server takes it for lost.
        if self._members_with("frozen") & self._members_with("cut"):
            return False
        late = sum(fault.seconds for fault in self.faults if fault.kind == "joins late")
        return all(_is_harmless(fault) for fault in self.faults) and late < self.deadline and not self.weather.corrupted

    def _delays_others(self, fault: Fault) -> bool:
        """Whether a slow member's rounds in one group may take longer than the deadline of another group's round."""
        rounds = len(self.calls) * (1 + len(self.phases))
        return fault.kind == "slow" and rounds * (fault.seconds + self.think) >= self.deadline

    def _members_with(self, kind: str) -> set[int]:
        return {fault.member for fault in self.faults if fault.kind == kind}

    @property
    def is_faultless(self) -> bool:
        return not self.faults and self.weather.is_fair and not self.leaves_too_few

    @property
    def leaves_too_few(self) -> bool:
        """Whether members that end their last pass may leave fewer than `min_members` others."""
        return bool(self.passes) and self.min_members > 1


def _is_harmless(fault: Fault) -> bool:
    if fault.kind == "frozen":
        return fault.seconds <= HARMLESS_FREEZE
    if fault.kind == "cut":
        return fault.seconds <= HARMLESS_CUT
    if fault.kind == "joins late":
        return True
    return fault.kind in {"slow", *SERVER_FAULTS}


def draw(seed: int) -> Plan:
    """Draws the plan of a seed's world."""
    rng = random.Random(seed)
    size = rng.choice((1, 2, 2, 2, 3, 3, 4, 5))
    groups = _draw_groups(rng, size)
    layers = [Call(f"bn{n}", rng.randint(2, 4) if rng.random() < 0.8 else 8, _group(rng, groups)) for n in range(3)]
    calls = [rng.choice(layers[: rng.randint(1, 3)]) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    if groups:
        # A member that has no round with the others would end and leave the group before they have begun.
        calls[0] = replace(calls[0], group="")
    plan = Plan(
        seed=seed,
        replicas=tuple(_draw_counts(rng) for _ in range(size)),
        calls=tuple(calls),
        groups=groups,
        steps=rng.choice((2, 2, 3, 3, 4, 6)),
        deadline=rng.choice((8.0, 15.0, 30.0, 30.0, 60.0)),
        think=rng.choice((0.0, 0.01, 0.1, 0.5)),
        weather=Weather(latency=rng.choice((0.0002, 0.001, 0.02))),
        oddities=rng.random() < 0.05,
        dry=frozenset(step for step in range(6) if rng.random() < 0.03),
    )
    plan = _draw_policy(random.Random(seed + 2**42), _draw_faults(rng, plan))
    rng = random.Random(seed + 2**43)
    plan = _with(plan, gathers=random.Random(seed + 2**44).random() < 0.2)
    plan = _draw_newcomers(rng, _draw_passes(rng, _with(plan, phases=_draw_phases(rng))))
    return _with(plan, in_memory=_draw_memory(random.Random(seed + 2**46), plan))


def _with(plan: Plan, **changes: Any) -> Plan:
    """Does what `dataclasses.replace` does, without a call for each of the other fields."""
    changed = object.__new__(Plan)
    vars(changed).update(vars(plan), **changes)
    return changed


def _draw_memory(rng: random.Random, plan: Plan) -> bool:
    """Draws whether rounds run in memory: more often with groups, since rounds in memory and at the server then mix."""
    # If frames are damaged, the members of a group may not agree on its memory.
    return not plan.weather.corrupted and rng.random() < (0.8 if plan.groups else 0.35)


def _draw_phases(rng: random.Random) -> tuple[str, ...]:
    """Mostly a plain training step; now and then a second backward pass of a kept graph, or a second derivative."""
    further = rng.choice(("backward 2", SECOND_BACKWARD, "second backward 2"))
    if rng.random() < 0.9:
        return (BACKWARD,)
    return (BACKWARD, SECOND_BACKWARD, further) if further == "second backward 2" else (BACKWARD, further)


def _draw_passes(rng: random.Random, plan: Plan) -> Plan:
    """In some worlds the members have different numbers of batches in each pass over their data."""
    if plan.groups or plan.has("skips", "swaps") or plan.relaunch or rng.random() < 0.85:
        return plan
    passes = tuple(tuple(rng.choice((0, 1, 1, 2, 3)) for _ in plan.replicas) for _ in range(rng.choice((1, 2, 2, 3))))
    return _with(plan, passes=passes, deadline=max(plan.deadline, 60.0))


def _draw_newcomers(rng: random.Random, plan: Plan) -> Plan:
    """Adds newcomers, with the number of a member or a new one, and replacements of processes that end early."""
    if not plan.min_members:
        some_end = plan.has("killed", "vanished") and not plan.relaunch
        return _with(plan, replaced_after=rng.choice((0.05, 0.6, 2.0))) if some_end and rng.random() < 0.5 else plan
    if rng.random() < 0.4:
        return plan
    numbers = [rng.randrange(plan.size + 2) for _ in range(rng.choice((0, 1, 1, 2)))]
    newcomers = tuple(Fault("comes", number, when=rng.random() * _length(plan)) for number in numbers)
    return _with(plan, faults=plan.faults + newcomers, replaced_after=rng.choice((0.0, 0.05, 0.6, 2.0)))


def _draw_policy(rng: random.Random, plan: Plan) -> Plan:
    """Makes some worlds elastic: only worlds of several members, without further groups, skips or swaps."""
    if plan.size == 1 or plan.groups or plan.has("skips", "swaps") or rng.random() < 0.6:
        return plan
    return _with(plan, min_members=rng.choice((1, 1, max(1, plan.size - 1), plan.size)), relaunch=False)


def _draw_groups(rng: random.Random, size: int) -> dict[str, tuple[int, ...]]:
    if size < 3 or rng.random() < 0.7:
        return {}
    members = rng.sample(range(size), rng.randint(2, size))
    return {"some": tuple(sorted(members))}


def _group(rng: random.Random, groups: dict[str, tuple[int, ...]]) -> str:
    return rng.choice(("", *groups)) if groups else ""


def _draw_counts(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((0, 1, 2, 7, 18, 1000)) for _ in range(rng.choice((1, 1, 1, 2, 3))))


def _draw_faults(rng: random.Random, plan: Plan) -> Plan:
    """Most worlds have one fault or a few, some have none, and some have faults of all kinds."""
    mood = rng.random()
    if mood < 0.12:
        return plan
    if mood < 0.35:
        return _with(plan, weather=_bad_weather(rng, plan.weather, 0.08), deadline=max(plan.deadline, 30.0))
    if mood < 0.5:
        faults = [_server_fault(rng, plan, "server killed") for _ in range(rng.choice((1, 1, 2, 3)))]
        weather = _bad_weather(rng, plan.weather, 0.04) if rng.random() < 0.3 else plan.weather
        return _with(plan, faults=tuple(faults), weather=weather, deadline=max(plan.deadline, 30.0))
    if mood < 0.9:
        return _with(
            plan, faults=tuple(_any_fault(rng, plan) for _ in range(rng.choice((1, 1, 1, 2)))),
            relaunch=rng.random() < 0.25,
        )  # fmt: skip
    weather = replace(_bad_weather(rng, plan.weather, 0.1), corrupted=rng.choice((0.0, 0.0, 0.02)))
    faults = tuple(_any_fault(rng, plan) for _ in range(rng.randint(2, 5)))
    return _with(plan, faults=faults, weather=weather, relaunch=rng.random() < 0.3)


def _bad_weather(rng: random.Random, weather: Weather, worst: float) -> Weather:
    kinds = rng.sample(("dropped", "doubled", "delayed", "reordered"), rng.randint(1, 4))
    chances = {kind: worst * rng.random() for kind in kinds}
    return replace(weather, longest_delay=rng.choice((0.05, 0.5, 1.5)), **chances)


def _any_fault(rng: random.Random, plan: Plan) -> Fault:
    kind = rng.choice((*MEMBER_FAULTS, *PROGRAM_FAULTS, *SERVER_FAULTS))
    if kind in SERVER_FAULTS:
        return _server_fault(rng, plan, kind)
    fault = Fault(
        kind,
        rng.randrange(plan.size),
        when=rng.random() * _length(plan),
        step=rng.randrange(plan.steps),
        place=rng.randrange(2 * len(plan.calls)),
    )
    return replace(fault, seconds=_seconds(rng, kind, plan))


def _seconds(rng: random.Random, kind: str, plan: Plan) -> float:
    if kind == "frozen":
        return rng.choice((0.5, 1.5, 3.0, 5.0, 6.0, plan.deadline + 10.0))
    if kind == "cut":
        return rng.choice((0.0, 0.1, 0.15, 1.0, 5.0))
    if kind == "joins late":
        return rng.random() * 6.0
    return rng.random() * 3.0


def _server_fault(rng: random.Random, plan: Plan, kind: str) -> Fault:
    seconds = rng.choice((0.01, 0.1, 0.5, 1.2, 2.5)) if kind != "server naps" else rng.choice((0.3, 0.9, 2.0, 4.0, 6.0))
    return Fault(kind, when=rng.random() * _length(plan), seconds=seconds)


def _length(plan: Plan) -> float:
    """How long the world lasts, roughly, if nothing goes wrong."""
    return 2 * len(plan.calls) * plan.steps * (2 * plan.weather.latency + plan.think) + 0.01
