"""Answers that are not read: bounded in bytes, and kept apart by reader."""

import errno
import logging
import math
import socket
from collections.abc import Collection
from types import SimpleNamespace

import pytest
import zmq

from server.core.dispatcher import Dispatcher
from server.network import connections
from server.network.connections import (
    MAX_PEER_BYTES,
    MAX_TOTAL_BYTES,
    PROBE_SECONDS,
    SMALL_ANSWER_BYTES,
    Connection,
    ConnectionManager,
    ConnectionTable,
    ProbeScheduler,
    writable,
)


class Kernel:
    """Stands in for the kernel: peers in `stuck` do not read, so their sockets take no more bytes."""

    def __init__(self, *stuck: int) -> None:
        self.stuck = set(stuck)
        self.calls = 0
        self.table = ConnectionTable(math.inf, self.takes_more)

    def takes_more(self, descriptors: Collection[int]) -> set[int]:
        self.calls += 1
        return set(descriptors) - self.stuck

    def meet(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            self.table._connections[descriptor] = Connection(descriptor, inode=0)  # accepted
            self.table.set_peer(b"%d" % descriptor, descriptor)

    def sent(self, descriptor: int, size: int, times: int) -> int:
        return size * sum(self.table.may_send(b"%d" % descriptor, size) for _ in range(times))


def test_a_reading_client_receives_everything():
    kernel = Kernel()
    kernel.meet(1)
    assert kernel.sent(1, MAX_PEER_BYTES, 100) == 100 * MAX_PEER_BYTES
    assert kernel.sent(1, 1000, 10_000) == 10_000_000
    assert kernel.calls < 200, "seldom, because each look is a system call"


def test_a_client_that_does_not_read_receives_little():
    kernel = Kernel(1)
    kernel.meet(1, 2)
    assert kernel.sent(1, 1000, 10_000) <= MAX_PEER_BYTES
    assert kernel.sent(2, 1000, 10_000) == 10_000_000


def test_one_answer_of_any_size_is_sent():
    kernel = Kernel(1)
    kernel.meet(1)
    assert kernel.sent(1, 4 * MAX_PEER_BYTES, 3) == 4 * MAX_PEER_BYTES


def test_a_client_that_reads_again_receives_more():
    kernel = Kernel(1)
    kernel.meet(1)
    assert kernel.sent(1, MAX_PEER_BYTES, 3) == MAX_PEER_BYTES
    kernel.stuck.clear()
    assert kernel.sent(1, MAX_PEER_BYTES, 3) == 3 * MAX_PEER_BYTES


def test_many_clients_that_do_not_read_share_a_bound_and_readers_are_served():
    many = range(1000)
    kernel = Kernel(*many)
    kernel.meet(*many, 5000)
    size = sum(kernel.sent(number, MAX_PEER_BYTES, 3) for number in many)
    assert size <= 2 * MAX_TOTAL_BYTES
    assert kernel.sent(5000, SMALL_ANSWER_BYTES, 100) == 100 * SMALL_ANSWER_BYTES


def test_only_clients_that_do_not_read_are_disconnected_under_pressure():
    kernel = Kernel(*range(100))
    kernel.meet(*range(100), 5000)
    for number in range(100):
        kernel.sent(number, MAX_PEER_BYTES, 1)
    kernel.sent(5000, MAX_PEER_BYTES, 1)
    assert kernel.table.stalled() == [], "each has a moment to read"
    kernel.stuck.discard(7)
    cut = kernel.table.stalled()
    assert not {7, 5000} & set(cut)
    for number in cut:
        kernel.table.remove(number)
    assert kernel.table.stalled() == []
    assert kernel.sent(5000, MAX_PEER_BYTES, 10) == 10 * MAX_PEER_BYTES


def test_few_waiting_bytes_disconnect_no_client():
    kernel = Kernel(1)
    kernel.meet(1)
    kernel.sent(1, MAX_PEER_BYTES, 1)
    assert kernel.table.stalled() == kernel.table.stalled() == []


def test_a_connection_with_a_reused_descriptor_starts_fresh():
    kernel = Kernel(1)
    kernel.meet(1)
    kernel.sent(1, MAX_PEER_BYTES, 1)
    kernel.table.remove(1)
    kernel.meet(1)
    assert kernel.sent(1, MAX_PEER_BYTES, 1) == MAX_PEER_BYTES


def test_a_frame_that_is_read_after_its_descriptor_was_reused_resets_no_queue():
    kernel = Kernel(1)
    kernel.meet(1)
    kernel.sent(1, MAX_PEER_BYTES, 1)
    kernel.table.set_peer(b"earlier", 1)
    assert b"1" not in kernel.table.by_peer
    kernel.table.set_peer(b"1", 1)
    assert kernel.sent(1, MAX_PEER_BYTES, 1) == 0


def test_the_kernel_shows_whether_a_client_reads():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.0)
        assert writable([ours.fileno()]) == {ours.fileno()}
        with_room = True
        while with_room:
            try:
                ours.send(bytes(2**16))
            except BlockingIOError:
                with_room = False
        assert writable([ours.fileno()]) == set()
        number = ours.fileno()
    assert writable([number]) == {number}, "without a peer no bytes wait"


def test_without_an_ended_connection_no_probes_are_due():
    assert not ProbeScheduler().start_if_due(1e9)


def test_many_ended_connections_cost_one_pass_of_probes_shortly_after_the_first():
    probing = ProbeScheduler()
    for now in (10.0, 10.0 + PROBE_SECONDS / 2):
        probing.record_disconnect(now)
        assert not probing.start_if_due(now)
    assert probing.due == 10.0 + PROBE_SECONDS
    assert probing.start_if_due(10.0 + PROBE_SECONDS)
    assert probing.disconnected == 10.0 + PROBE_SECONDS / 2


def test_a_connection_that_ends_after_a_pass_of_probes_was_scheduled_gets_another_pass():
    probing = ProbeScheduler()
    probing.record_disconnect(10.0)
    probing.record_disconnect(10.02)
    assert probing.start_if_due(10.06)
    assert not probing.start_if_due(10.06)
    assert probing.start_if_due(10.02 + PROBE_SECONDS)
    assert probing.due == math.inf


class Refusing:
    def __init__(self, problem: int) -> None:
        self._problem = problem

    def send(self, *_: object) -> None:
        raise zmq.ZMQError(self._problem)


@pytest.mark.parametrize(("problem", "level"), [(zmq.EHOSTUNREACH, "INFO"), (errno.EAGAIN, "WARNING")])
def test_only_an_unread_answer_is_warned_of(monkeypatch, problem, level):
    lines = []
    log = SimpleNamespace(log=lambda number, text, *given: lines.append((logging.getLevelName(number), text % given)))
    monkeypatch.setattr(connections, "logger", log)
    dispatcher = Dispatcher(b"server-0", 0.0)
    ConnectionManager(SimpleNamespace(socket=Refusing(problem), monitor=None), dispatcher).send([(b"peer", b"frame")])
    assert [(name, "was dropped" in text) for name, text in lines] == [(level, True)]
    assert dispatcher.counters.dropped_answers == 1
