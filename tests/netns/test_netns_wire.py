"""The wire of the network tests, between sockets instead of network namespaces: it does what it is told to packets."""

import socket
import time

import pytest

from netns.netns_wire import Weather, Wire

ADDRESSES = [bytes([10, 77, 0, number]) for number in (1, 2)]
ONE, OTHER = ADDRESSES
SIZE = 200


@pytest.fixture
def ends():
    """What each host's kernel would hold, by address, and the wire."""
    pairs = {address: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for address in ADDRESSES}
    for inner, outer in pairs.values():
        inner.settimeout(0)
        outer.settimeout(0.3)
    with Wire({address: inner.fileno() for address, (inner, _) in pairs.items()}, seed=0) as wire:
        yield {address: outer for address, (_, outer) in pairs.items()}, wire
    for inner, outer in pairs.values():
        inner.close()
        outer.close()


def packet(receiver, number):
    return bytes(16) + receiver + number.to_bytes(4, "big")


def send(hosts, sender, receiver, number=SIZE):
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


def test_a_clean_wire_carries_everything_in_order(ends):
    hosts, wire = ends
    assert send(hosts, ONE, OTHER) == list(range(SIZE))
    assert (wire.carried, wire.dropped) == (SIZE, 0)


def test_what_is_lost_does_not_arrive(ends):
    hosts, wire = ends
    wire.weather = Weather(lost=0.2)
    arrived = send(hosts, ONE, OTHER)
    assert arrived == sorted(set(arrived))
    assert SIZE - len(arrived) == wire.dropped
    assert 20 <= wire.dropped <= 60


def test_what_is_doubled_arrives_twice(ends):
    hosts, wire = ends
    wire.weather = Weather(doubled=0.2)
    arrived = send(hosts, ONE, OTHER)
    assert set(arrived) == set(range(SIZE))
    assert 20 <= len(arrived) - SIZE <= 60


def test_what_is_held_back_is_overtaken(ends):
    hosts, wire = ends
    wire.weather = Weather(held=0.2)
    arrived = send(hosts, ONE, OTHER)
    assert sorted(arrived) == list(range(SIZE))
    assert arrived != sorted(arrived)


def test_delay_is_what_it_is_told(ends):
    hosts, wire = ends
    wire.weather = Weather(delay=0.1, jitter=0.02)
    began = time.monotonic()
    hosts[ONE].send(packet(OTHER, 0))
    hosts[OTHER].recv(100)
    assert time.monotonic() - began >= 0.08


def test_a_cut_goes_one_way_and_heals(ends):
    hosts, wire = ends
    wire.cut([(ONE, OTHER)])
    assert send(hosts, ONE, OTHER, 5) == []
    assert send(hosts, OTHER, ONE, 5) == list(range(5))
    wire.cut([])
    assert send(hosts, ONE, OTHER, 5) == list(range(5))


def test_a_packet_to_nobody_is_left_alone(ends):
    hosts, wire = ends
    hosts[ONE].send(packet(b"\xe0\0\0\x16", 0))
    assert send(hosts, ONE, OTHER, 3) == [0, 1, 2]
    assert wire.carried == 3
