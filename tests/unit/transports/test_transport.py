"""The transport over shared memory gives the server's bits; the server learns only of long waits."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from client.ops.native import NativeExchange
from client.ops.statistics import Running
from client.session.protocol.member import OVER_SERVER, SHARED_MEMORY
from client.transports import group_memory, negotiation, server, shared_memory
from client.transports.server import SlavePipe
from client.transports.shared_memory import SharedMemoryPipe
from statsd_bn import Rows
from statsd_bn.errors import ReplicaLost, RoundMismatch
from statsd_bn.messages import Contribution, RoundDone
from statsd_bn.round_key import BACKWARD
from statsd_bn.wire import decode
from support.memory_members import MemoryMaster, in_threads, outcome, run_members, wait_until
from unit.transports.transport_rows import ROWS, frames_of, rows_of

pytestmark = pytest.mark.skipif(bool(group_memory.unavailable_reason()), reason=group_memory.unavailable_reason())


def forward_and_backward(pipe: SlavePipe, rank: int, size: int, rounds: int):
    found = []
    for _ in range(rounds):
        forward = pipe.run_slave(rows_of(rank, size))
        backward = pipe.run_slave(rows_of(rank, size), forward.key.of_phase(BACKWARD))
        found += [(one.key, one.replicas, one.count, one.members, one.values.tobytes()) for one in (forward, backward)]
    return found


@pytest.mark.parametrize(("members", "size"), [(2, 3), (3, 2), (6, 1)])
def test_shared_memory_gives_the_keys_and_bits_of_the_server(members, size):
    def program(kind):
        return lambda c: forward_and_backward(kind(c, "bn"), c.rank, size, 4)

    in_memory = run_members(members, program(SharedMemoryPipe), transport=SHARED_MEMORY)
    over_server = run_members(members, program(SlavePipe), transport=OVER_SERVER)
    assert in_memory == over_server


@pytest.mark.parametrize("late_rank", [None, 0, 1])
def test_a_layer_in_one_call_of_the_core_equals_that_over_the_server(late_rank):
    """They are equal also if a member waits so long that it escalates, before or after the sum is complete."""
    x = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(0))

    def program(kind):
        def run(connection):
            layer, found = nn.BatchNorm2d(3), []
            running = Running(layer.running_mean, layer.running_var, layer.num_batches_tracked, 0.1)
            pipe = kind(connection, "bn")
            pipe.run_slave(rows_of(connection.rank, 1))
            for _ in range(3):
                exchange = NativeExchange(pipe, "bn", 1e-5, "plus", running=running)
                if connection.rank == late_rank:
                    time.sleep(0.15)
                y = exchange.normalise(x[connection.rank].unsqueeze(-1), layer.weight.detach(), None)
                gradients = exchange.gradients(y.exp(), x[connection.rank].unsqueeze(-1), None, (True, False, True))
                found += [y, *gradients[::2], exchange.moments.count]
            return [*found, *(buffer.clone() for buffer in layer.buffers())]

        return run

    in_memory = run_members(2, program(SharedMemoryPipe), transport=SHARED_MEMORY)
    over_server = run_members(2, program(SlavePipe), transport=OVER_SERVER)
    torch.testing.assert_close(in_memory, over_server, rtol=0, atol=0)
    assert in_memory[0][-1] == 3


def test_fast_rounds_do_not_reach_the_server(monkeypatch):
    monkeypatch.setattr(shared_memory, "ESCALATE_SECONDS", 20.0)
    master = MemoryMaster()
    counts = {}

    def program(connection):
        pipe = SharedMemoryPipe(connection, "bn")
        pipe.run_slave(rows_of(connection.rank, 1))
        if connection.rank == 0:
            counts["frames"] = frames_of(master)
        for _ in range(20):
            pipe.run_slave(rows_of(connection.rank, 1))
        if connection.rank == 0:
            counts["before the end"] = len(counts["frames"])
        pipe.run_slave(rows_of(connection.rank, 1))
        return connection.rounds

    assert run_members(2, program, master, transport=SHARED_MEMORY) == [22, 22]
    assert counts["before the end"] == 0


@pytest.mark.parametrize("late_rank", [0, 1])
def test_all_members_report_a_long_wait_and_its_end_to_the_server(late_rank):
    """If only the waiting member sent RoundDone and the frame was lost, the server would still count it as waiting."""
    master = MemoryMaster()
    late = threading.Event()

    def program(connection):
        pipe = SharedMemoryPipe(connection, "bn")
        pipe.run_slave(rows_of(connection.rank, 1))
        if connection.rank == late_rank:
            late.wait(20)
            frames = frames_of(master)
        else:
            threading.Thread(target=watch).start()
        found = pipe.run_slave(rows_of(connection.rank, 1))
        if connection.rank == late_rank:
            wait_until(lambda: len(settled(frames, found.key)) == 2)
        return found.values.tobytes(), connection.session(None).transport.bypassed_rounds

    def watch():
        wait_until(lambda: bool(master.report("world")["waiting"]))
        late.set()

    def settled(frames, key):
        reports = [one for one in map(decode, list(frames)) if isinstance(one, RoundDone)]
        return {one.session for one in reports if one.key == key}

    found, counted = zip(*run_members(2, program, master, transport=SHARED_MEMORY), strict=True)
    assert found == ((ROWS[0] + ROWS[1]).tobytes(),) * 2
    assert not master.report("world")["waiting"]
    # A member that sent its rows to the server does not count the round as one in memory.
    assert counted == tuple(int(rank == late_rank) for rank in range(2))


def test_a_member_that_leaves_ends_the_wait_of_the_others():
    def program(connection):
        pipe = SharedMemoryPipe(connection, "bn")
        pipe.run_slave(rows_of(connection.rank, 1))
        if connection.rank == 2:
            raise ZeroDivisionError("augmentation")
        return pipe.run_slave(rows_of(connection.rank, 1))

    first, second, third = _outcomes(3, program)
    assert isinstance(third, ZeroDivisionError)
    for error in (first, second):
        assert isinstance(error, ReplicaLost)
        assert "augmentation" in str(error)


def test_members_in_different_layers_get_the_servers_error():
    master = MemoryMaster()
    has_passed = threading.Event()

    def program(connection):
        SharedMemoryPipe(connection, "bn").run_slave(rows_of(connection.rank, 1))
        if connection.rank == 0:
            threading.Thread(target=watch).start()
        return SharedMemoryPipe(connection, f"bn of {connection.rank}").run_slave(rows_of(connection.rank, 1))

    def watch():
        wait_until(lambda: len(master.report("world")["waiting"]) == 2)
        for _ in range(4):
            master.pass_time(0.5)
        has_passed.set()

    for error in _outcomes(2, program, master):
        assert isinstance(error, RoundMismatch)
        assert "bn of 0" in str(error)
        assert "bn of 1" in str(error)
    assert has_passed.wait(20)


def test_too_large_rows_use_the_server():
    channels = 2**15  # twice as many as a slot has room for

    def program(connection):
        pipe = SharedMemoryPipe(connection, "bn")
        found = []
        for size in (1, channels, 1):
            rows = Rows((2,), np.full((1, 2, size), 0.1 * (connection.rank + 1)))
            found.append(pipe.run_slave(rows))
        return [(one.count, one.values.shape, set(one.values.ravel())) for one in found]

    expected = [(4, (2, size), {0.1 + 0.2}) for size in (1, channels, 1)]
    assert run_members(2, program, transport=SHARED_MEMORY) == [expected, expected]


def test_threads_in_another_order_on_each_member_all_get_their_rounds():
    """For example two models in two threads: rounds in different orders use the server."""

    def program(connection):
        SharedMemoryPipe(connection, "bn").run_slave(rows_of(connection.rank, 1))
        names = ["a", "b"] if connection.rank else ["b", "a"]
        found = {}

        def run(name):
            value = 1.0 if name == "a" else 10.0
            found[name] = SharedMemoryPipe(connection, name).run_slave(Rows((1,), np.full((1, 2, 1), value)))

        threads = [threading.Thread(target=run, args=[name]) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return {name: one.values[0, 0] for name, one in found.items()}

    assert run_members(2, program, transport=SHARED_MEMORY) == [{"a": 2.0, "b": 20.0}] * 2


def one_round(connection) -> bytes:
    threading.current_thread().name = f"member {connection.rank}"
    return SharedMemoryPipe(connection, "bn").run_slave(rows_of(connection.rank, 1)).values.tobytes()


def test_a_memory_name_other_than_text_is_refused(monkeypatch, caplog):
    class Name(str):
        __slots__ = ()

        def encode(self):
            return b"\xff\xfe"

    def misnamed(size):
        offer = group_memory.MemoryOffer(size)
        offer.name = Name()
        return offer

    monkeypatch.setattr(negotiation, "MemoryOffer", misnamed)
    caplog.set_level("INFO", logger="statsd_bn.client")

    assert len(set(run_members(2, one_round, transport=SHARED_MEMORY))) == 1
    assert "rank 1: it cannot open the shared memory" in caplog.text


def _outcomes(n, program, master=None):
    master = master or MemoryMaster()

    def member(number):
        def run():
            with master.connect(number, n, transport=SHARED_MEMORY) as connection:
                return program(connection)

        return outcome(run)

    return in_threads([lambda number=number: member(number) for number in range(n)])


def test_threads_of_one_member_find_the_memory_once(monkeypatch):
    """The other member runs the layers one after the other in a single thread."""
    searches, agree = [], negotiation.negotiate

    def counted(connection, group):
        searches.append(connection.rank)
        return agree(connection, group)

    monkeypatch.setattr(shared_memory, "negotiate", counted)

    def program(connection):
        def run(name):
            return SharedMemoryPipe(connection, name).run_slave(rows_of(connection.rank, 1)).count

        return [run(name) for name in "ab"] if connection.rank else in_threads([lambda n=name: run(n) for name in "ab"])

    assert run_members(2, program, transport=SHARED_MEMORY) == [[2, 2], [2, 2]]
    assert sorted(searches) == [0, 1]


def test_the_step_is_the_same_however_long_a_thread_waits_in_memory():
    """A member reports a long wait to the server while another of its threads starts a step."""
    has_begun, go_on = threading.Event(), threading.Event()

    def program(connection):
        pipes = {name: SharedMemoryPipe(connection, name) for name in "abc"}
        row = rows_of(connection.rank, 1)
        forward = pipes["a"].run_slave(row)

        def late():
            has_begun.set()
            pipes["a"].run_slave(row, forward.key.of_phase(BACKWARD))

        if connection.rank:
            assert go_on.wait(30)
            late()
            steps = [pipes["b"].run_slave(row).key.step]
        else:
            waiting = threading.Thread(target=late)
            waiting.start()
            assert has_begun.wait(30)
            following = threading.Thread(target=lambda: steps.append(pipes["b"].run_slave(row).key.step))
            steps = []
            following.start()
            time.sleep(2 * server.ESCALATE_SECONDS)  # to make the wait long; no event marks that
            go_on.set()
            waiting.join(30)
            following.join(30)
        return [*steps, pipes["c"].run_slave(row).key.step]

    assert run_members(2, program, transport=SHARED_MEMORY) == [[1, 1], [1, 1]]


def test_members_out_of_step_do_not_share_memory_again():
    """Rounds of each member's two threads collide in memory; from then on all rounds use the server."""
    turns = threading.Barrier(2)

    def program(connection):
        found = {}

        def run(name):
            one = SharedMemoryPipe(connection, name).run_slave(Rows((1,), np.full((1, 2, 1), float(ord(name)))))
            found[name] = one.values[0, 0]

        run("0")
        threads = []
        # Each pair of threads arrives at one turn with different rounds; then each member runs the other's rounds.
        for names in (("X", "Y"), ("Z", "W"), (None, "X"), (None, "Z"), ("V", "V"), ("Y", None), ("W", None)):
            turns.wait(30)
            if name := names[connection.rank]:
                threads.append(threading.Thread(target=run, args=[name]))
                threads[-1].start()
            time.sleep(3 * server.ESCALATE_SECONDS)  # to fix the order of the threads
        for thread in threads:
            thread.join(30)
        return found

    expected = {name: 2.0 * ord(name) for name in "0XYZWV"}
    assert run_members(2, program, transport=SHARED_MEMORY) == [expected, expected]


def test_a_connection_is_freed_after_rounds_in_memory():
    connections = []

    def program(connection):
        connections.append(weakref.ref(connection))
        return SharedMemoryPipe(connection, "bn").run_slave(rows_of(connection.rank, 1)).count

    assert run_members(2, program, transport=SHARED_MEMORY) == [2, 2]
    gc.collect()
    assert [connection() for connection in connections] == [None, None]


def test_a_member_that_knows_of_the_broken_job_uses_the_server():
    """A member declared lost by the server may still meet the others in memory, and the server cannot reach it."""
    master = MemoryMaster()
    connections = in_threads([lambda n=n: master.connect(n, 2, transport=SHARED_MEMORY) for n in range(2)])

    def run(connection):
        return SharedMemoryPipe(connection, "bn").run_slave(rows_of(connection.rank, 1)).count

    in_threads([lambda c=c: run(c) for c in connections])
    connections[0].broken_job.report(ReplicaLost("on purpose"))
    frames = frames_of(master)
    in_threads([lambda c=c: run(c) for c in connections])
    assert len([frame for frame in frames if isinstance(decode(frame), Contribution)]) == 2


def test_the_others_learn_of_the_end_although_a_callback_raises():
    master = MemoryMaster()
    connection = master.connect(0, 1)
    called = []
    connection.close_callbacks += [lambda: called.append("first"), lambda: 1 / 0, lambda: called.append("last")]
    with pytest.raises(ZeroDivisionError):
        connection.close()
    assert called == ["first", "last"]
    assert master.members("world") == []
