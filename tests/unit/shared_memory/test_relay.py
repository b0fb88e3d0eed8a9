"""The relay: members of one host meet in memory, and one carries their rows to the server, to the same bits."""

import re
import threading

import numpy as np
import pytest

from client.conversation.member import RELAY, ZEROMQ
from client.lanes import agreement, carried_round
from client.lanes.shared_memory import SharedMemoryPipe
from client.lanes.zeromq import SlavePipe
from client.shared_memory import passing, region
from statsd_bn import Rows
from statsd_bn.errors import ReplicaLost, RoundMismatch
from statsd_bn.messages import Carried, Contribution
from statsd_bn.round_key import BACKWARD, MEMORY
from statsd_bn.wire import decode
from support.memory_members import MemoryMaster, outcome, run_members, wait_until
from support.pretended_hosts import run_on_hosts
from unit.shared_memory.lane_rows import frames_of

pytestmark = pytest.mark.skipif(bool(passing.why_not()), reason=passing.why_not())


def rows_of(rank: int, size: int) -> Rows:
    """Rows whose sum depends on the order of adding."""
    chance = np.random.default_rng(rank)
    values = chance.standard_normal((size, 2, 3)) * 10.0 ** chance.integers(-8, 8, (size, 2, 3))
    return Rows(tuple(range(1, size + 1)), values)


def rounds(connection, kind=SharedMemoryPipe, size=2, number=6):
    pipe = kind(connection, "bn")
    found = []
    for _ in range(number):
        forward = pipe.run_slave(rows_of(connection.rank, size))
        backward = pipe.run_slave(rows_of(connection.rank, size), forward.key.of_phase(BACKWARD))
        found += [(one.key, one.replicas, one.count, one.members, one.values.tobytes()) for one in (forward, backward)]
    return found


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 2, 2, 2]])
def test_it_gives_the_keys_and_bits_of_the_server(monkeypatch, hosts):
    relayed = run_on_hosts(monkeypatch, hosts, rounds)
    over_server = run_members(len(hosts), lambda c: rounds(c, SlavePipe), lane=ZEROMQ)
    assert relayed == over_server


def test_the_server_hears_of_each_host_once_a_round(monkeypatch):
    monkeypatch.setattr(carried_round, "ESCALATE_SECONDS", 20.0)
    monkeypatch.setattr(carried_round, "CARRY_SECONDS", 40.0)
    master = MemoryMaster()
    frames = frames_of(master)
    run_on_hosts(monkeypatch, [0, 0, 0, 1, 1, 1], rounds, master)
    said = [one for one in map(decode, frames) if isinstance(one, Carried | Contribution) and one.key.layer != MEMORY]
    assert sum(isinstance(one, Contribution) for one in said) == 6  # to the first round
    carried = [one.key for one in said if isinstance(one, Carried)]
    # Two that come at the same moment may both carry.
    assert all(2 <= carried.count(key) <= 6 for key in carried)
    assert len(carried) <= 1.2 * 2 * 11


def test_whoever_is_alone_on_its_host_speaks_for_itself(monkeypatch, caplog):
    caplog.set_level("INFO", logger="statsd_bn.client")

    def program(connection):
        rounds(connection)
        return connection.lane, connection.why_not_faster

    relayed, _, alone = run_on_hosts(monkeypatch, [0, 0, 1], program)
    elsewhere = "rank 2: it cannot reach the memory of the others; it is on another host, or in a container"
    assert relayed == (RELAY, elsewhere)
    assert alone == (ZEROMQ, f"no other rank of the group is on this host; {elsewhere}")
    text = "exchanges rows in the memory of each host, and from there over the server; not all in one memory: "
    assert f"group 'world' {text}{elsewhere}" in caplog.text
    # It is what they have asked for; only the one that is alone has not got it.
    assert [one.levelname for one in caplog.records if text in one.getMessage()] == ["INFO"] * 2
    assert [one.levelname for one in caplog.records].count("WARNING") == 1


def test_with_one_member_on_each_host_nothing_changes(monkeypatch):
    master = MemoryMaster()
    frames = frames_of(master)

    def program(connection):
        rounds(connection)
        return connection.lane, connection.why_not_faster

    why = "rank 1: it cannot reach the memory of the others; it is on another host, or in a container"
    assert run_on_hosts(monkeypatch, [0, 1], program, master) == [(ZEROMQ, why)] * 2
    assert not any(isinstance(decode(frame), Carried) for frame in frames)


@pytest.mark.parametrize("lane", ["auto", "shared_memory"])
def test_members_that_do_not_ask_for_it_stay_at_the_server(monkeypatch, lane):
    def program(connection):
        rounds(connection)
        return connection.lane, connection.why_not_faster

    why = "rank 2: it cannot reach the memory of the others; it is on another host, or in a container"
    assert run_on_hosts(monkeypatch, [0, 0, 1], program, lane=lane) == [(ZEROMQ, why)] * 3


def test_who_has_not_asked_for_it_is_named(monkeypatch):
    asked = iter(["relay", "auto", "relay"])
    ready = agreement._ready
    monkeypatch.setattr(agreement, "_ready", lambda offer, key, _: ready(offer, key, next(asked)))

    def program(connection):
        rounds(connection)
        return connection.lane, connection.why_not_faster

    (lane, why), *others = run_on_hosts(monkeypatch, [0, 0, 1], program)
    assert lane == ZEROMQ
    assert others == [(lane, why)] * 2
    assert re.match(r"lane 'relay' needs all ranks to ask for it, and rank \d does not; rank 2: it cannot reach", why)


def test_members_with_different_keys_do_not_speak_for_each_other(monkeypatch):
    ready = agreement._ready
    monkeypatch.setattr(agreement, "_ready", lambda offer, _, lane: ready(offer, threading.current_thread().name, lane))

    def program(connection):
        found = rounds(connection)
        return found, connection.lane, connection.why_not_faster.partition(";")[0]

    found = run_on_hosts(monkeypatch, [0, 0, 1], program)
    assert [one[1:] for one in found[:2]] == [(ZEROMQ, "the ranks on this host have different keys")] * 2
    assert len({str(one[0]) for one in found}) == 1


@pytest.mark.parametrize("loses", ["question", "answer"])
def test_a_lost_message_costs_time_and_no_bit(monkeypatch, loses):
    monkeypatch.setattr(carried_round, "CARRY_SECONDS", 0.06)
    expected = run_members(4, lambda c: rounds(c, SlavePipe), lane=ZEROMQ)
    master = MemoryMaster()
    receive, lost = master.transport._receive, []

    def watched(peer, frame):
        if isinstance(decode(frame), Carried) and len(lost) < 5:
            lost.append(frame)
            if loses == "answer":
                return [reply for reply in receive(peer, frame) if reply[0] != peer]
            return []
        return receive(peer, frame)

    master.transport._receive = watched
    assert run_on_hosts(monkeypatch, [0, 0, 1, 1], rounds, master) == expected
    assert len(lost) == 5


def test_one_that_has_spoken_for_itself_may_be_carried_as_well(monkeypatch):
    """As when it has waited for long; it is answered for itself."""
    monkeypatch.setattr(carried_round, "ESCALATE_SECONDS", 0.0)
    expected = run_members(4, lambda c: rounds(c, SlavePipe), lane=ZEROMQ)
    assert run_on_hosts(monkeypatch, [0, 0, 1, 1], rounds) == expected


def outcomes(monkeypatch, hosts, program, master=None):
    """What each member's program returns or raises; an exception ends its connection, as in a script."""
    seen = {}

    def member(connection):
        seen[connection.rank] = found = outcome(lambda: program(connection))
        if isinstance(found, Exception):
            raise found

    outcome(lambda: run_on_hosts(monkeypatch, hosts, member, master))
    return [seen[rank] for rank in range(len(hosts))]


def test_a_member_that_leaves_ends_the_wait_of_all(monkeypatch):
    def program(connection):
        pipe = SharedMemoryPipe(connection, "bn")
        pipe.run_slave(rows_of(connection.rank, 1))
        if connection.rank == 1:
            raise ZeroDivisionError("augmentation")
        return pipe.run_slave(rows_of(connection.rank, 1))

    found = outcomes(monkeypatch, [0, 0, 0, 1, 1], program)
    assert isinstance(found.pop(1), ZeroDivisionError)
    for error in found:
        assert isinstance(error, ReplicaLost), error
        assert "augmentation" in str(error)


@pytest.mark.parametrize("odd", [0, 2], ids=["in company", "host against host"])
def test_members_in_different_layers_are_told_so(monkeypatch, odd):
    master = MemoryMaster()

    def program(connection):
        SharedMemoryPipe(connection, "bn").run_slave(rows_of(connection.rank, 1))
        if connection.rank == 0:
            threading.Thread(target=watch).start()
        is_odd = connection.rank == odd or (odd == 2 and connection.rank == 3)
        return SharedMemoryPipe(connection, "odd" if is_odd else "even").run_slave(rows_of(connection.rank, 1))

    def watch():
        wait_until(lambda: len(master.report("world")["waiting"]) == 2 and not missing())
        for _ in range(4):
            master.pass_time(0.5)

    def missing():
        waiting = [set(range(4)) - set(one["missing"]) for one in master.report("world")["waiting"]]
        return set(range(4)) - set().union(*waiting)

    for error in outcomes(monkeypatch, [0, 0, 1, 1], program, master):
        assert isinstance(error, RoundMismatch), error
        assert "odd" in str(error)
        assert "even" in str(error)


def test_members_with_other_channel_counts_are_told_the_numbers(monkeypatch):
    def program(connection):
        SharedMemoryPipe(connection, "bn").run_slave(rows_of(connection.rank, 1))
        channels = 4 + connection.rank // 2
        return SharedMemoryPipe(connection, "bn").run_slave(Rows((1,), np.ones((1, 2, channels))))

    errors = outcomes(monkeypatch, [0, 0, 1, 1], program)
    mismatches = [error for error in errors if isinstance(error, RoundMismatch)]
    assert mismatches
    assert all("channels" in str(error) for error in mismatches)
    assert all(isinstance(error, RoundMismatch | ReplicaLost) for error in errors)


@pytest.mark.parametrize(
    "orders", [["ab", "ba", "ab", "ba"], ["ab", "ab", "ba", "ba"]], ids=["in company", "host against host"]
)
def test_threads_that_come_in_another_order_on_each_member_all_get_their_rounds(monkeypatch, orders):
    def program(connection):
        SharedMemoryPipe(connection, "bn").run_slave(rows_of(connection.rank, 1))
        found = {}

        def run(name):
            value = 1.0 if name == "a" else 10.0
            for _ in range(5):
                aggregate = SharedMemoryPipe(connection, name).run_slave(Rows((1,), np.full((1, 2, 1), value)))
                found.setdefault(name, []).append(aggregate.values[0, 0])

        threads = [threading.Thread(target=run, args=[name]) for name in orders[connection.rank]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found

    assert run_on_hosts(monkeypatch, [0, 0, 1, 1], program) == [{"a": [4.0] * 5, "b": [40.0] * 5}] * 4


def test_rows_that_do_not_fit_go_over_the_server(monkeypatch):
    channels = region.SLOT_BYTES // 8

    def program(connection):
        pipe = SharedMemoryPipe(connection, "bn")
        value = 0.1 * (connection.rank + 1)
        found = [pipe.run_slave(Rows((2,), np.full((1, 2, size), value))) for size in (1, channels, 1)]
        return [(one.count, one.values.shape, set(one.values.ravel())) for one in found]

    expected = [(6, (2, size), {0.1 + 0.2 + 0.1 * 3}) for size in (1, channels, 1)]
    assert run_on_hosts(monkeypatch, [0, 0, 1], program) == [expected] * 3


def test_members_of_one_host_may_have_different_numbers_of_replicas(monkeypatch):
    def program(connection):
        return rounds(connection, size=1 + connection.rank)

    expected = run_members(3, lambda c: rounds(c, SlavePipe, 1 + c.rank), lane=ZEROMQ)
    assert run_on_hosts(monkeypatch, [0, 0, 1], program) == expected
