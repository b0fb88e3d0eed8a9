"""The faults of the chaos tests: each function causes one, and raises a `Finding` for a broken promise."""

import functools
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from chaos.chaos_proxy import DIRECTIONS, DOWN, ENDS, UP, Proxy
from chaos.chaos_world import WORLD, Members, Server, require
from programs.chaos_programs import Report
from statsd_bn.errors import GroupIncomplete, ReplicaLost, RoundTimeout

# Steps of a run with at most 20 faults, so four for each.
STEPS = 80

# Steps allowed only after the fault, so that survivors have work left.
STEPS_AFTER = 2

# Chance that a fault comes before all have recovered from the previous fault, and the most seconds between these two.
TROUBLED_AGAIN = 0.25
COMING_BACK_SECONDS = 0.3

# More steps than any member reaches before a loss.
ENDLESS = 10**6

# A deadline that a test can wait for.
SHORT_DEADLINE = 5.0

# Limit of the wait for a fault that takes effect only on a further frame.
STILL_SECONDS = 2.0

# Longer than a member may be silent, which is 3.5 s.
LONG_STALL_SECONDS = 5.0


@dataclass(frozen=True)
class Result:
    """Seconds from each fault to recovery or report; whether the weights equal an undisturbed run's, if compared."""

    seconds: list[float] = field(default_factory=list)
    identical: bool | None = None


def undisturbed() -> list[str]:
    """The members' digests after a run without faults."""
    return list(_undisturbed())


@functools.cache
def _undisturbed() -> tuple[str, ...]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder)) as server,
        Members([server.endpoint] * WORLD, "undisturbed", STEPS) as members,
    ):
        members.allow(STEPS)
        return tuple(_digests(members))


def killed_member(chance: random.Random, folder: Path, times: int = 1) -> Result:
    """A member is killed; the errors of all others name its rank."""
    return _lose(chance, folder, times, signal.SIGKILL)


def frozen_member(chance: random.Random, folder: Path, times: int = 1) -> Result:
    """A member is stopped by a signal; the others' errors name its rank, and so does its own when it continues."""
    return _lose(chance, folder, times, signal.SIGSTOP)


def _lose(chance: random.Random, folder: Path, times: int, number: signal.Signals) -> Result:
    seconds = []
    with Server(folder) as server:
        for turn in range(times):
            victim = chance.randrange(WORLD)
            with Members([server.endpoint] * WORLD, f"lost {turn}", ENDLESS) as members:
                _train_a_while(members, chance)
                seconds.append(_known(members, victim, functools.partial(members.send_signal, victim, number)))
                if number == signal.SIGSTOP:
                    members.send_signal(victim, signal.SIGCONT)
                    _require_lost(members.report(victim), victim)
                    members.let_go(victim)
                members.let_go(*members.others(victim))
    return Result(seconds)


def briefly_frozen_member(chance: random.Random, folder: Path, times: int = 2) -> Result:
    """A member is stopped for a second, without effect."""
    with Server(folder) as server, Members([server.endpoint] * WORLD, "brief", STEPS) as members:

        def freeze() -> float:
            victim = chance.randrange(WORLD)
            members.send_signal(victim, signal.SIGSTOP)
            time.sleep(1.0)
            members.send_signal(victim, signal.SIGCONT)
            return time.monotonic()

        return _go_through(members, chance, times, freeze)


def looping_member(chance: random.Random, folder: Path, times: int = 1) -> Result:
    """A member loops in Python: it is alive, so the others wait until their deadline, and their error names it."""
    seconds = []
    with Server(folder) as server:
        for turn in range(times):
            victim, step = chance.randrange(WORLD), chance.randrange(1, 20)
            trouble = (victim, "loop", step)
            with Members([server.endpoint] * WORLD, f"loop {turn}", ENDLESS, SHORT_DEADLINE, trouble) as members:
                stuck = _train_up_to(members, step)
                for member in members.others(victim):
                    report = members.report(member)
                    _require_error(report, RoundTimeout)
                    require(report.what.fields["missing"] == [victim], f"{report.what} does not name member {victim}")
                    seconds.append(report.at - stuck - SHORT_DEADLINE)
                members.let_go(*members.others(victim))
    return Result(seconds)


def failing_member(chance: random.Random, folder: Path, times: int = 1) -> Result:
    """A member raises and leaves; the errors of all others name its rank."""
    seconds = []
    with Server(folder) as server:
        for turn in range(times):
            victim, step = chance.randrange(WORLD), chance.randrange(1, 20)
            with Members([server.endpoint] * WORLD, f"fail {turn}", ENDLESS, trouble=(victim, "fail", step)) as members:
                members.allow(ENDLESS)
                failed = members.report(victim)
                _require_error(failed, ValueError)
                began = time.monotonic()
                members.let_go(victim)
                seconds.append(_known(members, victim, lambda began=began: began))
                members.let_go(*members.others(victim))
    return Result(seconds)


def killed_master(chance: random.Random, folder: Path, times: int = 20) -> Result:
    """The server is killed and started again; some kills come while the members still recover."""
    endpoint = f"ipc://{folder}/server"
    with Server(folder, endpoint) as server, Members([endpoint] * WORLD, "master", STEPS) as members:

        def kill() -> float:
            server.restart()
            return server.listening

        return _go_through(members, chance, times, kill)


def cut_connections(chance: random.Random, folder: Path, times: int = 20) -> Result:
    """The connections of some members end, orderly or by reset."""

    def cut(proxies: list[Proxy], _: Server) -> float:
        end = chance.choice(ENDS)
        for proxy in proxies:
            proxy.cut(end)
        return time.monotonic()

    return _through_proxies(chance, folder, times, cut)


def halved_streams(chance: random.Random, folder: Path, times: int = 10) -> Result:
    """A frame arrives in part, up or down, and its connection ends."""
    troubled = set()

    def halve(proxies: list[Proxy], _: Server) -> float:
        direction, end = chance.choice(DIRECTIONS), chance.choice(ENDS)
        before = [proxy.halved for proxy in proxies]
        for proxy in proxies:
            proxy.halve(direction, end)
        troubled.update(proxies)
        # Members that have done all allowed steps get no frames; then the halved chunk belongs to the next step.
        expiry = time.monotonic() + STILL_SECONDS
        while any(proxy.halved == count for proxy, count in zip(proxies, before, strict=True)):
            if time.monotonic() > expiry:
                break
            time.sleep(0.001)
        return time.monotonic()

    result = _through_proxies(chance, folder, times, halve)
    halved = sum(proxy.halved for proxy in troubled)
    require(halved >= times // 2, f"expected at least {times // 2} frames to be halved, got {halved}")
    return result


def stalled_streams(chance: random.Random, folder: Path, times: int = 3) -> Result:
    """The connections of some members stay open, and carry nothing for half a second to two seconds."""

    def stall(proxies: list[Proxy], _: Server) -> float:
        seconds = chance.uniform(0.5, 2.0)
        directions = chance.choice([(UP,), (DOWN,), DIRECTIONS])
        for proxy in proxies:
            proxy.stall(seconds, *directions)
        time.sleep(seconds)
        return time.monotonic()

    return _through_proxies(chance, folder, times, stall)


def everything(chance: random.Random, folder: Path, times: int = 20) -> Result:
    """Cuts, halves and stalls, and a server that is killed, in one run."""

    def anything(proxies: list[Proxy], server: Server) -> float:
        kind = chance.choice(["cut", "halve", "stall", "kill"])
        for proxy in proxies:
            if kind == "cut":
                proxy.cut(chance.choice(ENDS))
            elif kind == "halve":
                proxy.halve(chance.choice(DIRECTIONS), chance.choice(ENDS))
            elif kind == "stall":
                proxy.stall(chance.uniform(0.1, 1.0))
        if kind == "kill":
            server.restart()
        return time.monotonic()

    # Another program could take the port between two lives of the server.
    return _through_proxies(chance, folder, times, anything, endpoint=f"ipc://{folder}/server")


def member_that_is_cut_off(chance: random.Random, folder: Path, times: int = 1) -> Result:
    """A member's frames are held back for too long, on open connections; all errors name its rank."""
    seconds = []
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder))
        for turn in range(times):
            victim = chance.randrange(WORLD)
            with Proxy(server.endpoint, chance) as proxy:
                endpoints = [proxy.endpoint if member == victim else server.endpoint for member in range(WORLD)]
                with Members(endpoints, f"cut off {turn}", ENDLESS) as members:
                    _train_a_while(members, chance)
                    stall = functools.partial(proxy.stall, LONG_STALL_SECONDS)
                    seconds.append(_known(members, victim, stall))
                    _require_lost(members.report(victim), victim)
                    members.let_go(*members.all)
    return Result(seconds)


def killed_member_and_master(chance: random.Random, folder: Path, times: int = 1) -> Result:
    """A member and the server are killed almost together; the errors of the others name the lost rank."""
    seconds = []
    with Server(folder, f"ipc://{folder}/server") as server:
        for turn in range(times):
            victim = chance.randrange(WORLD)
            with Members([server.endpoint] * WORLD, f"both {turn}", ENDLESS, SHORT_DEADLINE) as members:
                _train_a_while(members, chance)
                orders = [server.restart, functools.partial(members.send_signal, victim, signal.SIGKILL)]
                chance.shuffle(orders)
                began = time.monotonic()
                orders[0]()
                time.sleep(chance.uniform(0, 0.05))
                orders[1]()
                for member in members.others(victim):
                    report = members.report(member)
                    _require_error(report, ReplicaLost, RoundTimeout, GroupIncomplete)
                    fields = report.what.fields
                    names = [fields["member"]] if isinstance(report.what, ReplicaLost) else fields["missing"]
                    require(names == [victim], f"{report.what!r} does not name member {victim}")
                    seconds.append(report.at - began)
                members.let_go(*members.others(victim))
    return Result(seconds)


SCENARIOS: list[Callable[..., Result]] = [
    *(killed_member, frozen_member, briefly_frozen_member, looping_member, failing_member, killed_master),
    *(cut_connections, halved_streams, stalled_streams, everything, member_that_is_cut_off, killed_member_and_master),
]


def _through_proxies(
    chance: random.Random, folder: Path, times: int, trouble: Callable[..., float], endpoint: str = "tcp://127.0.0.1:*"
) -> Result:
    """Runs members behind a proxy each, and troubles some of these."""
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder, endpoint))
        proxies = [stack.enter_context(Proxy(server.endpoint, chance)) for _ in range(WORLD)]
        members = stack.enter_context(Members([proxy.endpoint for proxy in proxies], "proxied", STEPS))

        def trouble_some() -> float:
            return trouble(chance.sample(proxies, chance.randint(1, WORLD)), server)

        return _go_through(members, chance, times, trouble_some)


def _go_through(members: Members, chance: random.Random, times: int, trouble: Callable[[], float]) -> Result:
    """Calls `trouble`, which returns its end time, at random moments; the weights must equal an undisturbed run's."""
    at_once = STEPS // times - STEPS_AFTER
    seconds = []
    is_coming_back = False
    for turn in range(times):
        members.allow(at_once)
        if is_coming_back:
            time.sleep(chance.uniform(0, COMING_BACK_SECONDS))
        else:
            goal = turn * (at_once + STEPS_AFTER) + chance.randrange(at_once)
            members.wait_until(lambda steps, goal=goal: min(steps) >= goal, f"trouble {turn} of {times}")
            time.sleep(chance.uniform(0, 0.01))
        over = trouble()
        before = members.steps
        members.allow(STEPS_AFTER)
        is_coming_back = turn < times - 1 and chance.random() < TROUBLED_AGAIN
        if not is_coming_back:
            members.wait_until(functools.partial(_all_went_on, before), f"after trouble {turn} of {times}")
            seconds.append(time.monotonic() - over)
    members.allow(STEPS)
    digests = _digests(members)
    require(digests == undisturbed(), "the weights differ from an undisturbed run")
    return Result(seconds, identical=True)


def _all_went_on(before: list[int], now: list[int]) -> bool:
    return all(step > former for step, former in zip(now, before, strict=True))


def _digests(members: Members) -> list[str]:
    """Waits until all members have trained, and lets them exit; returns their digests."""
    digests = [members.report(member).what for member in members.all]
    require(all(isinstance(digest, str) for digest in digests), f"the run ended with {digests}")
    members.let_go(*members.all)
    return digests


def _train_a_while(members: Members, chance: random.Random) -> None:
    members.allow(ENDLESS)
    members.wait_until(lambda steps: min(steps) > 0, "the first step")
    time.sleep(chance.uniform(0.05, 0.8))


def _train_up_to(members: Members, step: int) -> float:
    """Waits until all members have done `step` steps; returns the time."""
    members.allow(ENDLESS)
    members.wait_until(lambda steps: min(steps) >= step, f"the way to step {step}")
    return time.monotonic()


def _known(members: Members, victim: int, trouble: Callable[[], float | None]) -> float:
    """Seconds from the fault until all other members report the loss of `victim`."""
    began = time.monotonic()
    began = trouble() or began
    reports = [members.report(member) for member in members.others(victim)]
    for report in reports:
        _require_lost(report, victim)
    return max(report.at for report in reports) - began


def _require_lost(report: Report, victim: int) -> None:
    _require_error(report, ReplicaLost)
    require(report.what.fields["member"] == victim, f"{report.what!r} is not about member {victim}")
    require(f"rank {victim} (" in str(report.what), f"{report.what!r} does not name member {victim}")


def _require_error(report: Report, *kinds: type[Exception]) -> None:
    names = " or ".join(kind.__name__ for kind in kinds)
    require(isinstance(report.what, kinds), f"expected {names}, got {report.what!r}")
