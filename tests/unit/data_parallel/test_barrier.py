"""Replica threads meet, or raise at once with the reason."""

import threading

import pytest

from client.data_parallel.barrier import Barrier
from statsd_bn.errors import ReplicaLost, RoundMismatch, RoundTimeout
from support.memory_members import in_threads, outcome


def double_all(offers):
    return [2 * offer for offer in offers]


def test_the_offers_are_combined_once_in_replica_order():
    barrier = Barrier(3, 20.0)
    calls = []

    def combine(offers):
        calls.append(offers)
        return [f"{offer} of {len(offers)}" for offer in offers]

    programs = [
        lambda replica=replica: barrier.wait(replica, "bn", f"offer {replica}", combine) for replica in (2, 0, 1)
    ]
    assert in_threads(programs) == ["offer 2 of 3", "offer 0 of 3", "offer 1 of 3"]
    assert calls == [["offer 0", "offer 1", "offer 2"]]


def test_replicas_at_different_layers_get_an_error_before_the_deadline():
    barrier = Barrier(2, 3600.0)

    def meet(replica, place):
        return outcome(lambda: barrier.wait(replica, place, None, double_all))

    for error in in_threads([lambda: meet(0, "layer 'a'"), lambda: meet(1, "layer 'b'")]):
        assert isinstance(error, RoundMismatch)
        assert "replica 0 waits at layer 'a'; replica 1 waits at layer 'b'" in str(error)


def test_a_replica_that_raises_frees_its_siblings_with_the_cause():
    barrier = Barrier(3, 3600.0)
    cause = MemoryError("too large")

    def wait(replica):
        return outcome(lambda: barrier.wait(replica, "bn", None, double_all))

    for error in in_threads([lambda: wait(0), lambda: wait(1), lambda: barrier.fail(2, cause)])[:2]:
        assert isinstance(error, ReplicaLost)
        assert str(error) == "replica 2 failed with MemoryError: too large"
        assert error.__cause__ is cause


def test_an_exception_of_combining_is_raised_in_every_replica():
    barrier = Barrier(2, 3600.0)

    def refuse(_offers):
        raise ValueError("one value per channel")

    waits = [lambda number=number: outcome(lambda: barrier.wait(number, "bn", 0, refuse)) for number in range(2)]
    assert [str(error) for error in in_threads(waits)] == ["one value per channel"] * 2


def test_a_missing_sibling_is_awaited_until_the_deadline():
    barrier = Barrier(2, 0.05)
    with pytest.raises(RoundTimeout, match=r"replica 0 waited 0.05 s at bn; .*\[0\] of 2 replicas"):
        barrier.wait(0, "bn", None, double_all)


def test_a_replica_after_a_failed_sibling_does_not_wait():
    barrier = Barrier(3, 3600.0)
    barrier.fail(2, MemoryError("too large"))
    for replica in (0, 1):
        with pytest.raises(ReplicaLost, match="replica 2 failed"):
            barrier.wait(replica, "bn", None, double_all)


def test_the_deadline_covers_the_wait_for_siblings_and_not_the_combining():
    barrier = Barrier(2, 0.05)
    late = threading.Event()

    def slowly(offers):
        late.wait(0.2)
        return double_all(offers)

    programs = [lambda number=number: barrier.wait(number, "bn", number, slowly) for number in range(2)]
    assert in_threads(programs) == [0, 2]
