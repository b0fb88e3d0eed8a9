"""Hosts in network namespaces (`scripts/test netns` runs all scenarios), and their wire between plain sockets."""

import os
import socket
import time
from pathlib import Path

import pytest

from netns.netns_scenarios import SCENARIOS
from netns.netns_wire import Wire
from netns.netns_world import reason_to_skip

ADDRESSES = [bytes([10, 77, 0, number]) for number in (1, 2)]
ONE, OTHER = ADDRESSES


@pytest.fixture
def ends():
    pairs = {address: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for address in ADDRESSES}
    for inner, outer in pairs.values():
        inner.settimeout(0)
        outer.settimeout(0.3)
    with Wire({address: inner.fileno() for address, (inner, _) in pairs.items()}) as wire:
        yield {address: outer for address, (_, outer) in pairs.items()}, wire
    for inner, outer in pairs.values():
        inner.close()
        outer.close()


def packet(receiver, number):
    return bytes(16) + receiver + number.to_bytes(4, "big")


def send(hosts, sender, receiver, number):
    """Sends numbered packets and returns the numbers that arrive."""
    arrived = []
    hosts[receiver].settimeout(0.3)
    for each in range(number):
        hosts[sender].send(packet(receiver, each))
        time.sleep(0.0002)
    try:
        while True:
            arrived.append(int.from_bytes(hosts[receiver].recv(100)[20:], "big"))
    except TimeoutError:
        return arrived


def test_a_cut_goes_one_way_and_heals(ends):
    hosts, wire = ends
    wire.cut([(ONE, OTHER)])
    assert send(hosts, ONE, OTHER, 5) == []
    assert send(hosts, OTHER, ONE, 5) == list(range(5))
    wire.cut([])
    assert send(hosts, ONE, OTHER, 5) == list(range(5))


def test_a_packet_to_an_unknown_address_passes(ends):
    hosts, wire = ends
    hosts[ONE].send(packet(b"\xe0\0\0\x16", 0))
    assert send(hosts, ONE, OTHER, 3) == [0, 1, 2]
    assert wire.carried == 3


@pytest.mark.long
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")
def test_a_member_that_is_cut_off_for_ever_is_named():
    assert SCENARIOS["partition for ever"]().identical is None
    # Namespaces with another process id belong to other test runs.
    ours = f"statsd-bn-{os.getpid()}-*"
    assert not [*Path("/run/netns").glob(ours), *Path("/etc/netns").glob(ours)]
