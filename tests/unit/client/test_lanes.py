"""Every lane looks the same: rows in, the aggregate of everybody's rows out."""

import numpy as np
import pytest

from client.lanes.in_process import LocalPipe
from client.lanes.zeromq import SlavePipe
from statsd_bn import Rows
from statsd_bn.round_key import BACKWARD
from support.memory_members import in_threads, run_members

# In float64, adding these in another order gives another last bit.
ROWS = np.array([0.1, 0.2, 0.3, 1e16, -1e16, 0.7]).reshape(6, 1, 1)


def rows_of(member: int, size: int) -> Rows:
    part = ROWS[member * size : (member + 1) * size]
    return Rows(tuple(range(1, size + 1)), part)


def test_a_slave_pipe_returns_the_sum_over_all_members():
    aggregates = run_members(3, lambda c: SlavePipe(c, "bn").run_slave(rows_of(c.rank, 2)))
    for aggregate in aggregates:
        assert (aggregate.replicas, aggregate.count) == (6, 9)
        assert aggregate.values.tobytes() == aggregates[0].values.tobytes()


def test_the_local_lane_adds_to_the_same_bits_as_the_master():
    local = LocalPipe("bn").run_slave(Rows((1,) * 6, ROWS))
    for members, size in ((1, 6), (2, 3), (3, 2), (6, 1)):
        found = run_members(members, lambda c, size=size: SlavePipe(c, "bn").run_slave(rows_of(c.rank, size)))
        assert {aggregate.values.tobytes() for aggregate in found} == {local.values.tobytes()}
    assert local.values.tobytes() != ROWS[::-1].sum(axis=0).tobytes()


def test_the_aggregate_names_its_round_and_backward_follows_it():
    def forward_and_backward(connection):
        pipe = SlavePipe(connection, "bn")
        forward = pipe.run_slave(rows_of(0, 1))
        return forward.key, pipe.run_slave(rows_of(0, 1), forward.key.of_phase(BACKWARD)).key

    for forward, backward in run_members(2, forward_and_backward):
        assert (forward.layer, forward.step, forward.phase) == ("bn", 0, "forward")
        assert (backward.layer, backward.step, backward.phase) == ("bn", 0, "backward")


@pytest.mark.parametrize("threads", [4])
def test_threads_of_one_member_may_exchange_at_the_same_time(threads):
    """In opposite orders on two members: with one socket for all, each would wait for the other, for ever."""

    def both_ways(connection):
        order = range(threads) if connection.rank == 0 else reversed(range(threads))
        programs = [
            lambda layer=layer: SlavePipe(connection, f"bn{layer}").run_slave(
                Rows((1,), np.full((1, 1, 1), float(layer)))
            )
            for layer in order
        ]
        return {float(aggregate.values[0, 0]) for aggregate in in_threads(programs)}

    assert run_members(2, both_ways) == [{0.0, 2.0, 4.0, 6.0}] * 2
