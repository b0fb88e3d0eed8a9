"""NaN and infinity: reported once with their ranks, or refused, over every transport."""

import math
import socket
from dataclasses import replace

import numpy as np
import pytest
import torch

import client
from client.ops import non_finite
from client.transports.server import SlavePipe
from client.transports.transport import LocalPipe
from programs import non_finite_programs
from programs.non_finite_programs import three_steps
from statsd_bn import Rows
from statsd_bn.errors import NonFinite
from support.memory_members import MemoryMaster
from support.transports import TRANSPORTS

RANKS = 3


@pytest.fixture
def steps_over(over):
    def run(transport, *arguments, **given):
        return over(transport, RANKS, three_steps, *arguments, **given)

    return run


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("value", "bearers"),
    [
        (math.nan, [2]),
        (-math.inf, [0, 2]),
        pytest.param(math.nan, [0, 2], marks=pytest.mark.long),
        pytest.param(math.inf, [1], marks=pytest.mark.long),
    ],
)
def test_the_first_non_finite_round_is_reported_with_its_ranks(steps_over, transport, value, bearers):
    found = steps_over(transport, value, "forward", bearers, "warn")
    names = [f"rank {rank} ({socket.gethostname()}, pid {pid})" for rank, (*_, pid) in enumerate(found)]
    for rank, (lines, raised, moved, _) in enumerate(found):
        ((level, text),) = lines
        is_own = rank in bearers
        assert level == ("ERROR" if is_own else "WARNING")
        assert f"layer {non_finite_programs.NAME!r}, forward, step 1, " in text
        if is_own:
            assert names[rank] in text
            assert ("and 1 more" in text) == (len(bearers) == 2)
        else:
            assert f", {', '.join(names[bearer] for bearer in bearers)}, " in text
        assert text.endswith(f"1 of 4 channels ({'NaN' if math.isnan(value) else 'inf'})")
        assert (raised, moved) == ([], 3)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_under_raise_all_ranks_raise_before_running_statistics_move(steps_over, transport):
    found = steps_over(transport, math.nan, "forward", [1], "raise", on_nonfinite="raise")
    name = f"rank 1 ({socket.gethostname()}, pid {found[1][-1]})"
    for lines, raised, moved, _ in found:
        ((step, fields, text),) = raised
        assert (lines, step, fields["members"], fields["names"], fields["phase"]) == ([], 1, [1], [name], "forward")
        assert (fields["non_finite_channels"], fields["channels"], fields["kinds"]) == (1, 4, ["NaN"])
        assert text.startswith("rank 1 sent non-finite values: ")
        assert f"\n  {name}\n" in text
        assert moved == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_under_ignore_nothing_is_reported(steps_over, transport):
    found = steps_over(transport, math.nan, "forward", [1], "ignore", on_nonfinite="ignore")
    assert [of_rank[:-1] for of_rank in found] == [([], [], 3)] * RANKS


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_masked_values_are_no_finding(steps_over, transport):
    found = steps_over(transport, math.nan, "forward", [1], "raise", "masked", on_nonfinite="raise")
    assert [of_rank[:-1] for of_rank in found] == [([], [], 3)] * RANKS


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("policy", ["warn", "raise"])
@pytest.mark.parametrize("how", ["with a scaler", "plain"])
def test_gradients_that_overflow_are_logged_once_and_raise_nothing(steps_over, transport, policy, how):
    value, bearers = (1.0, []) if how == "with a scaler" else (math.inf, [1])
    for lines, raised, moved, _ in steps_over(transport, value, "backward", bearers, policy, how, on_nonfinite=policy):
        ((level, text),) = lines
        assert (level, raised, moved) == ("INFO", [], 3)
        assert f"backward, step {0 if how == 'with a scaler' else 1}, " in text
        assert text.endswith("; a GradScaler skips such a step")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_non_finite_gradients_are_reported_before_their_consequences(steps_over, transport):
    found = steps_over(transport, math.nan, "backward", [1], "warn", "and then forward")
    for rank, (lines, *_) in enumerate(found):
        levels = ["INFO", "WARNING", "ERROR"]
        places = [" backward, step 1, ", " backward, step 1, ", " forward, step 2, "]
        assert [level for level, _ in lines] == levels
        assert all(place in text for place, (_, text) in zip(places, lines, strict=True))
        assert "rank 1" in lines[1][1]
        assert f" rank {rank} (" in lines[2][1]


@pytest.mark.parametrize(
    ("how", "transport"),
    [
        *(("checkpointed", transport) for transport in TRANSPORTS),
        # A compiler takes seconds in each process.
        *(pytest.param("compiled", transport, marks=pytest.mark.long) for transport in TRANSPORTS),
    ],
)
def test_nan_is_reported_for_checkpointed_and_compiled_calls(steps_over, transport, how):
    for phase, levels in (("forward", ["WARNING", "ERROR", "WARNING"]), ("backward", ["INFO"] * RANKS)):
        found = steps_over(transport, math.nan, phase, [1], "warn", how)
        assert [[level for level, _ in lines] for lines, *_ in found] == [[level] for level in levels]


@pytest.mark.parametrize(("policy", "count"), [("warn", 1), ("raise", 1), ("ignore", 0)])
def test_the_metrics_count_non_finite_rounds_unless_they_are_ignored(policy, count):
    def contribute(connection, value: float) -> None:
        connection.member = replace(connection.member, on_nonfinite=policy)
        transport, rows = SlavePipe(connection, "bn"), Rows((1,), np.full((1, 2, 1), value))
        try:
            non_finite.check(transport, rows, transport.run_slave(rows))
        except NonFinite:
            assert policy == "raise"

    with MemoryMaster().connect(0, 1) as connection:
        for value, expected in ((1.0, 0), (math.nan, count), (1.0, count)):
            contribute(connection, value)
            assert connection.metrics()["statsd_bn/non_finite"] == expected


@pytest.mark.parametrize(("policy", "raises"), [("warn", False), ("raise", True)])
def test_only_a_forward_round_under_raise_is_refused(monkeypatch, policy, raises):
    monkeypatch.setenv("STATSD_BN_ON_NONFINITE", policy)
    transport = LocalPipe("bn")
    found = [non_finite.raises(transport, transport.key(0, 0, phase)) for phase in ("forward", "backward")]
    assert found == [raises, False]


def test_the_replica_with_infinity_is_named(caplog):
    model = client.DataParallelWithCallback(client.SynchronizedBatchNorm1d(4), device_ids=["cpu"] * 4)
    model.module.layer_name = "bn"
    x = torch.randn(8, 4)
    x[4, 1] = math.inf  # the third replica's
    with client.connect(), caplog.at_level("INFO", "statsd_bn.client"):
        model(x)
        model(x)
    records = [record for record in caplog.records if "non-finite" in record.getMessage()]
    assert [record.levelname for record in records] == ["ERROR"]
    text = records[0].getMessage()
    assert text.startswith("first non-finite: layer 'bn', forward, rank 0 (")
    assert text.endswith(", replica 2), 1 of 4 channels (inf)")
