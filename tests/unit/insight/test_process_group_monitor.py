"""Without a server, the first rank of a process group compares the ranks' data."""

import logging
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from torch import distributed

from client.transports import process_group_monitor
from client.transports.process_group_monitor import Rounds, SkewLog
from statsd_bn.round_key import FORWARD, RoundKey
from statsd_bn.skew_samples import SkewSampler

RANKS = [4, 5, 7]


def round_of(sampler, now, scale):
    data = np.random.default_rng(int(now)).normal(0, 1, (3, 32, 8))
    data[2] *= scale
    values = np.stack([data.sum(axis=1), (data**2).sum(axis=1)], axis=1)
    key = RoundKey("torch", "process group", 0, int(now), "stem.bn", 0, FORWARD)
    sampler.observe(now, key, [32] * 3, (1, 1, 1), values)


def warnings(caplog, scale):
    log, sampler = SkewLog("pair", RANKS, {7: "host-b, pid 812"}), SkewSampler()
    with caplog.at_level(logging.WARNING, "statsd_bn.client"):
        for second in range(1, 60):
            round_of(sampler, float(second), scale)
            log.compare(second + 0.5, sampler.drain(second + 0.5))
    return [record.getMessage() for record in caplog.records]


def test_a_member_with_different_data_is_reported_once(caplog):
    (text,) = warnings(caplog, 25.0)
    assert text.startswith("process group 'pair': skew: rank 7 (host-b, pid 812): since step 1 its activations vary 6")
    assert text.endswith(" times as much as the others' in stem.bn")


def test_equal_members_give_no_warning(caplog):
    assert warnings(caplog, 1.0) == []


def looking():
    return [thread for thread in threading.enumerate() if thread.name == "statsd_bn skew"]


@pytest.fixture
def attached(monkeypatch):
    """Returns a function that makes the `Rounds` of a process group's rank `index`, without a connection."""
    monkeypatch.setattr(distributed, "get_process_group_ranks", lambda _: RANKS)

    def attach(index):
        rounds = Rounds()
        rounds.attach(SimpleNamespace(group_name="pair", rank=lambda: index), None)
        return rounds

    return attach


def test_the_comparing_thread_ends_with_the_process_group(monkeypatch, attached):
    monkeypatch.setattr(process_group_monitor, "SECONDS", 0.01)
    before = len(looking())
    rounds = attached(0)
    assert len(looking()) == before + 1
    del rounds
    until = time.monotonic() + 10
    while len(looking()) > before:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("index", [1, 2])
def test_only_the_first_rank_compares(attached, index):
    assert attached(index).sampler is None
