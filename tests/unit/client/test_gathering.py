"""A gather gives every member the bytes of all members, of any content and length."""

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.session.connection import Connection
from client.session.protocol.all_gather import VALUE_BYTES, _Parcel, _widths, gather
from client.transports.server import SlavePipe
from statsd_bn import Rows, limits
from statsd_bn.errors import ProtocolError, RoundFailed, RoundMismatch
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import BACKWARD, GATHER
from support.memory_members import MemoryMaster, in_threads, outcome, run_members, wait_until
from support.strategies import key

ROW = Rows((1,), np.ones((1, 2, 3)))

# BEYOND_FIRST: one byte more than a member sends in the first round. BEYOND_THREE: more than two further rounds hold.
BEYOND_FIRST = VALUE_BYTES * 1024 + 1
BEYOND_THREE = 2 * VALUE_BYTES * limits.MAX_CHANNELS + 5


@pytest.mark.parametrize(
    "sizes",
    [(0, 0), (1, 0), (7, 8, 9), (8192, BEYOND_FIRST), (0, BEYOND_THREE, 3, BEYOND_FIRST), (BEYOND_THREE, BEYOND_THREE)],
)
def test_each_member_gets_the_bytes_of_all(sizes):
    sent = {member: os.urandom(size) for member, size in enumerate(sizes)}
    results = run_members(len(sizes), lambda connection: connection.all_gather("all", sent[connection.rank]))
    assert results == [sent] * len(sizes)


def test_nan_bits_are_unchanged():
    # Signalling NaN, a negative zero, a subnormal number.
    sent = bytes.fromhex("010000000000f07f" + "0000000000000080" + "0100000000000000") * 400
    assert run_members(2, lambda connection: connection.all_gather("all", sent)) == [{0: sent, 1: sent}] * 2


def test_little_data_takes_one_round():
    def rounds(connection: Connection) -> int:
        connection.all_gather("all", bytes(1000))
        return connection.rounds

    assert run_members(3, rounds) == [1, 1, 1]


def test_after_a_backward_round_a_gather_begins_a_step():
    def steps(connection: Connection) -> list[int]:
        forward = SlavePipe(connection, "bn").run_slave(ROW)
        SlavePipe(connection, "bn").run_slave(ROW, forward.key.of_phase(BACKWARD))
        connection.all_gather("all", b"")
        return [forward.key.step, SlavePipe(connection, "bn").run_slave(ROW).key.step]

    assert run_members(2, steps) == [[0, 1], [0, 1]]


def test_members_that_gather_different_values_get_an_error():
    master = MemoryMaster()
    connections = in_threads([lambda n=n: master.connect(n, 2) for n in range(2)])

    def gather(connection: Connection) -> Any:
        return outcome(lambda: connection.all_gather(f"thing {connection.rank}", b""))

    def let_time_pass() -> None:
        wait_until(lambda: len(master.report("world")["waiting"]) == 2)
        master.pass_time(1.0)

    *errors, _ = in_threads([*(lambda one=one: gather(one) for one in connections), let_time_pass])
    assert [type(error) for error in errors] == [RoundMismatch] * 2
    assert "thing 0" in str(errors[1])


def test_a_member_lost_after_the_first_round_is_left_out():
    master = MemoryMaster()
    connections = in_threads([lambda n=n: master.connect(n, 3, min_members=1) for n in range(3)])
    lost = connections.pop()
    sent = [bytes([n]) * BEYOND_FIRST for n in range(2)]

    def leave_after_the_first_round() -> None:
        part = np.array([BEYOND_FIRST, 0], "<i8").view("<f8")
        SlavePipe(lost, "all").run_slave(Rows((0,), part[np.newaxis, np.newaxis]), phase=GATHER)
        lost.close(cause="OutOfMemoryError: full")

    survivors = [lambda one=one: one.all_gather("all", sent[one.rank]) for one in connections]
    first, second, _ = in_threads([*survivors, leave_after_the_first_round])
    assert first == second == {0: sent[0], 1: sent[1]}


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (Rows((0,), np.zeros((1, 2, 3))), "expected 1 row of 1 vector from each rank, got 1 of 2 from rank 1"),
        (Rows((0, 0), np.zeros((2, 1, 3))), "expected 1 row of 1 vector from each rank, got 2 of 1 from rank 1"),
        (Rows((0,), np.zeros((1, 1, limits.MAX_CHANNELS))), "expected at most 65536 values of all ranks, got 65539"),
    ],
)
def test_the_master_refuses_rows_unfit_for_a_gather(rows, what):
    master = MemoryMaster()
    connections = in_threads([lambda n=n: master.connect(n, 2) for n in range(2)])
    sound = Rows((0,), np.zeros((1, 1, 3)))

    def first() -> Any:
        return outcome(lambda: SlavePipe(connections[0], "all").run_slave(sound, phase=GATHER))

    def second() -> Any:
        wait_until(lambda: bool(master.report("world")["waiting"]))
        return outcome(lambda: SlavePipe(connections[1], "all").run_slave(rows, phase=GATHER))

    for error in in_threads([first, second]):
        assert type(error) is RoundFailed
        assert what in str(error)


@pytest.mark.parametrize(
    ("integers", "what"),
    [
        ([8, 1], "expected 1 of 1 values from rank 0, got 0"),
        ([8, 2, 0, 0], "expected 2 of 1 values from rank 0, got 2"),
        ([-1, 0], "expected 0 to 1099511627776 bytes from rank 0, got -1"),
        ([2**63 - 1, 0], "expected 0 to 1099511627776 bytes from rank 0, got 9223372036854775807"),
        ([8, -1, 5], "expected -1 of 1 values from rank 0, got 0"),
        ([8, 0, 5], "expected no values after the last rank's, got 1"),
    ],
)
def test_an_invalid_first_round_is_refused(integers, what):
    with pytest.raises(ProtocolError, match=what):
        gather(lambda _: _aggregate(integers), b"", 0, 1)


@pytest.mark.parametrize(
    ("further", "problem"),
    [
        (([7, 7],), "expected 1 values of all members, got 2"),
        (([7, 7], 0, 1), "expected no others than rank 0, got rank 1 as well"),
    ],
)
def test_a_further_round_of_another_width_or_with_another_member_is_refused(further, problem):
    rounds = iter([_aggregate([16, 1, 7]), _aggregate(*further)])
    with pytest.raises(ProtocolError, match=problem):
        gather(lambda _: next(rounds), bytes(16), 0, 1)


def _aggregate(integers: list[int], *members: int) -> Aggregate:
    return Aggregate(key(), 1, 0, Members.of(members or [0]), np.array([integers], "<i8").view("<f8"))


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=64).filter(any))
def test_no_round_is_wider_than_a_frame_allows_and_every_round_brings_something(left):
    widths = _widths({member: _Parcel(0, [], words) for member, words in enumerate(left)})
    assert sum(widths.values()) <= limits.MAX_CHANNELS
    assert all(width >= 1 for width in widths.values())
    assert all(width <= max(1, words) for width, words in zip(widths.values(), left, strict=True))
