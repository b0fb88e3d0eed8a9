"""One member reports figures of rounds in shared memory to the server, which names a member with scaled data."""

import re
import time

import numpy as np
import pytest

from client.session.protocol.heartbeats import HeartbeatScheduler
from client.session.protocol.member import SHARED_MEMORY
from client.transports import group_memory
from client.transports.shared_memory import SharedMemoryPipe
from statsd_bn import Rows
from statsd_bn import skew_samples as samples
from statsd_bn.messages import SkewStats
from statsd_bn.round_key import BACKWARD
from statsd_bn.skew import compute_figures
from statsd_bn.wire import decode
from support.memory_members import MemoryMaster, run_members
from unit.transports.transport_rows import frames_of

pytestmark = pytest.mark.skipif(bool(group_memory.unavailable_reason()), reason=group_memory.unavailable_reason())

LAYERS = ["stem", "block.0", "head"]
STEPS, VALUES, CHANNELS = 30, 64, 5


@pytest.fixture(autouse=True)
def always_due(monkeypatch):
    monkeypatch.setattr(samples, "SECONDS", 1e-6)
    monkeypatch.setattr(samples, "SETTLE_SECONDS", 0.0)


def rows_of(rank, step, layer, replicas=1, scale=1.0):
    rng = np.random.default_rng([rank, step, LAYERS.index(layer)])
    data = rng.normal(0, 1, (replicas, 8, 1, CHANNELS)) + rng.normal(0, 1, (replicas, 8, VALUES // 8, CHANNELS))
    data = scale * data.reshape(replicas, VALUES, CHANNELS)
    return Rows((VALUES,) * replicas, np.stack([data.sum(axis=1), (data**2).sum(axis=1)], axis=1))


class Report:
    """Sends a member's figures after each of its steps, and advances the clock by a second for each frame."""

    def __init__(self, master, connection):
        self._master, self._scheduler = master, HeartbeatScheduler()
        self._session = connection.session(None)

    def beat(self):
        for session in self._scheduler.sessions_due(time.monotonic(), [self._session]):
            self._scheduler.mark_sent(session)
        for frame in self._scheduler.skew_frames(time.monotonic(), [self._session]):
            with self._master.channel_pool._master:
                self._master.now += 1.0
                self._master.channel_pool._receive(b"beacon", frame)


def train(members, master, *, replicas=1, scales=None):
    def program(connection):
        reporter = Report(master, connection)
        for step in range(STEPS):
            scale = (scales or {}).get(connection.rank, 1.0)
            for layer in LAYERS:
                rows = rows_of(connection.rank, step, layer, replicas, scale)
                key = SharedMemoryPipe(connection, layer).run_slave(rows).key
            SharedMemoryPipe(connection, layer).run_slave(rows, key.of_phase(BACKWARD))
            reporter.beat()
        assert connection.transport == SHARED_MEMORY
        # Reported within the program: the server drops the group when its last member leaves.
        return master.report("world") if connection.rank == 0 else connection.session(None).transport.samples

    report, *others = run_members(members, program, master, transport=SHARED_MEMORY)
    assert others == [None] * (members - 1)
    return report


def digests(frames):
    return [message for message in map(decode, list(frames)) if isinstance(message, SkewStats)]


@pytest.mark.parametrize(("members", "replicas"), [(3, 1), (4, 1), (3, 2)])
def test_a_member_whose_data_are_scaled_is_named_with_the_earliest_layer(members, replicas):
    master = MemoryMaster()
    (finding,) = train(members, master, replicas=replicas, scales={1: 6.0})["findings"]
    assert (finding["kind"], finding["rank"], finding["layer"]) == ("skew", 1, LAYERS[0])
    assert re.match(
        r"rank 1 \(thread 1\): since step 0 its activations vary \d+ times as much as the others' in stem\b",
        finding["text"],
    )


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_figures_are_those_of_the_rows_of_each_step(replicas):
    master = MemoryMaster()
    frames = frames_of(master)
    train(3, master, replicas=replicas)
    stats = digests(frames)
    # The first round of the group travels over the server.
    assert [one.names for one in stats] == [LAYERS[1:], *[LAYERS] * (STEPS - 1)]
    steps = [one.step for one in stats]
    assert steps == sorted(set(steps))
    for n, one in enumerate(stats):
        for layer, found in zip(one.names, one.values, strict=True):
            rows = [rows_of(rank, n, layer, replicas) for rank in range(3)]
            counts = np.full(3, float(VALUES * replicas))
            expected = compute_figures(counts, np.stack([each.values.sum(axis=0) for each in rows]))
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_rows_that_are_not_finite_are_reported_at_once_and_not_in_skew_stats():
    master = MemoryMaster()
    frames = frames_of(master)

    def program(connection):
        reporter = Report(master, connection)
        for step in range(3):
            rows = rows_of(connection.rank, step, "stem")
            if step == 1 and connection.rank == 2:
                rows.values[0, 1, 0] = np.nan
            pipe = SharedMemoryPipe(connection, "stem")
            pipe.run_slave(rows, pipe.run_slave(rows).key.of_phase(BACKWARD))
            if step == 1:
                text, *_ = master.report("world")["non_finite"]  # before any heartbeat
            reporter.beat()
        return text

    texts = run_members(3, program, master, transport=SHARED_MEMORY)
    assert set(texts) == {"first non-finite: layer 'stem', forward, step 1, rank 2 (thread 2), 1 of 5 channels (NaN)"}
    # The first step used the server, and the second one had values that were not finite.
    assert [one.step for one in digests(frames)] == [2]
