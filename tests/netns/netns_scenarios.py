"""Faults of the network between hosts: up to 3.5 s of silence change no result; after that errors name the rank."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chaos.chaos_world import require
from netns.netns_world import Host, Members, Network, Server

WORLD = 3
NAME = "statsd-bn-server"

# Steps of a run that succeeds, and more steps than a failing run reaches.
STEPS = 40
ENDLESS = 10**6

# The members' `round_timeout`, for a member that no longer reaches the server.
DEADLINE = 8.0

# Extra time of a member before it gives up on a silent server.
GRACE_SECONDS = 5.0

# Most time until all know of a silent member: 3.5 s of silence, a tick each quarter of a second, TCP's retransmissions.
KNOWN_SECONDS = 10.0

SHORT_PARTITION, LONG_PARTITION = 1.5, 5.0


@dataclass(frozen=True)
class Result:
    seconds: float  # from the fault to the end of the run, or until the last survivor reports the loss
    packets: int  # forwarded
    dropped: int  # lost on purpose
    identical: bool | None  # to the weights of an undisturbed run; None if the run fails


def partition_that_heals() -> Result:
    """A member is cut off for a short time, without effect."""
    with Network(WORLD + 1) as network:
        server, *hosts = network.hosts
        with Server(server), Members(hosts, server.ip, STEPS, 60.0) as members:
            members.wait_for_step(5)
            began = time.monotonic()
            network.isolate(hosts[1])
            time.sleep(SHORT_PARTITION)
            network.part()
            return _identical(network, members.results(), STEPS, time.monotonic() - began)


def partition_that_heals_too_late() -> Result:
    """A member is silent for too long; all others report the loss, and so does the member when it is back."""
    return _lose(lambda network, victim: network.isolate(victim), heals=True)


def partition_for_ever() -> Result:
    """A member is silent for ever; the others report it, and the member itself gives up."""
    return _lose(lambda network, victim: network.isolate(victim), heals=False)


def nothing_comes_from_a_member() -> Result:
    """A member receives packets, but the packets that it sends are lost."""
    return _lose(lambda network, victim: network.part((victim, network.hosts[0])), heals=False)


def nothing_goes_to_a_member() -> Result:
    """A member's packets arrive, and it receives none; without acknowledgements its TCP stops sending."""
    return _lose(lambda network, victim: network.part((network.hosts[0], victim)), heals=False)


def master_that_moves() -> Result:
    """The server ends, and a new one starts on another host, to which the server's name then points."""
    with Network(WORLD + 2) as network:
        first, second, *hosts = network.hosts
        _name(hosts, first)
        with Server(first) as server, Members(hosts, NAME, STEPS, 60.0) as members:
            members.wait_for_step(5)
            began = time.monotonic()
            server.kill()
            _name(hosts, second)
            with Server(second):
                return _identical(network, members.results(), STEPS, time.monotonic() - began)


SCENARIOS: dict[str, Callable[[], Result]] = {
    "partition of 1.5 s": partition_that_heals,
    "partition of 5 s": partition_that_heals_too_late,
    "partition for ever": partition_for_ever,
    "nothing comes from a member": nothing_comes_from_a_member,
    "nothing goes to a member": nothing_goes_to_a_member,
    "master moves to another address": master_that_moves,
}


@functools.cache
def undisturbed(steps: int) -> tuple[str, ...]:
    """The members' digests after a run without faults."""
    with Network(WORLD + 1) as network:
        server, *hosts = network.hosts
        with Server(server), Members(hosts, server.ip, steps, 60.0) as members:
            return _digests(members.results())


def _lose(trouble: Callable[[Network, Host], None], *, heals: bool) -> Result:
    with Network(WORLD + 1) as network:
        server, *hosts = network.hosts
        with Server(server), Members(hosts, server.ip, ENDLESS, DEADLINE) as members:
            members.wait_for_step(5)
            began = time.monotonic()
            trouble(network, hosts[1])
            if heals:
                time.sleep(LONG_PARTITION)
                network.part()
            found = members.results()
        victim, *others = found[1], found[0], *found[2:]
        for result in others:
            require(result.get("error") == "ReplicaLost", f"expected ReplicaLost of member 1, got {result}")
            require(result["fields"]["member"] == 1, f"expected the name of member 1, got {result}")
        known = max(result["at"] for result in others) - began
        require(known <= KNOWN_SECONDS, f"the others knew only after {known:.1f} s")
        require("error" in victim, f"the member that was cut off ended with {victim}")
        given_up = victim["at"] - began
        require(given_up <= DEADLINE + GRACE_SECONDS + KNOWN_SECONDS, f"it gave up only after {given_up:.1f} s")
        return Result(known, network.wire.carried, network.wire.dropped, None)


def _identical(network: Network, found: list[dict[str, Any]], steps: int, seconds: float) -> Result:
    carried, dropped = network.wire.carried, network.wire.dropped
    require(_digests(found) == undisturbed(steps), "the weights differ from an undisturbed run")
    return Result(seconds, carried, dropped, identical=True)


def _digests(found: list[dict[str, Any]]) -> tuple[str, ...]:
    require(all("digest" in result for result in found), f"expected that all train to the end, got {found}")
    return tuple(result["digest"] for result in found)


def _name(hosts: list[Host], server: Host) -> None:
    for host in hosts:
        host.hosts.write_text(f"127.0.0.1 localhost\n{server.ip} {NAME}\n")
