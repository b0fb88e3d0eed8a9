"""Every transport has the same interface: rows go in, the aggregate of all rows comes out."""

import numpy as np
import pytest

from client.transports.server import SlavePipe
from client.transports.transport import LocalPipe
from statsd_bn import Rows
from support.memory_members import in_threads, run_members

# In float64 the sum of these values depends on the order of addition.
ROWS = np.array([0.1, 0.2, 0.3, 1e16, -1e16, 0.7]).reshape(6, 1, 1)


def rows_of(member: int, size: int) -> Rows:
    part = ROWS[member * size : (member + 1) * size]
    return Rows(tuple(range(1, size + 1)), part)


def test_the_local_transport_adds_to_the_same_bits_as_the_master():
    local = LocalPipe("bn").run_slave(Rows((1,) * 6, ROWS))
    for members, size in ((1, 6), (2, 3), (3, 2), (6, 1)):
        found = run_members(members, lambda c, size=size: SlavePipe(c, "bn").run_slave(rows_of(c.rank, size)))
        assert {aggregate.values.tobytes() for aggregate in found} == {local.values.tobytes()}
    assert local.values.tobytes() != ROWS[::-1].sum(axis=0).tobytes()


@pytest.mark.parametrize("threads", [4])
def test_threads_of_one_member_may_exchange_at_the_same_time(threads):
    """Two members exchange in opposite orders: with one socket for all threads, they would wait for ever."""

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
