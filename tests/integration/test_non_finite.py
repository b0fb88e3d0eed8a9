"""NaN and infinity: whose they were is told once, or refused, on each lane."""

import math
import socket
from dataclasses import replace

import numpy as np
import pytest
import torch

import client
from client.autograd import non_finite
from client.conversation.member import ZEROMQ
from client.lanes.zeromq import SlavePipe
from programs import non_finite_programs
from programs.non_finite_programs import three_steps
from statsd_bn import Rows
from statsd_bn.errors import NonFinite
from support.lanes import LANES
from support.memory_members import MemoryMaster

RANKS = 3


@pytest.fixture
def steps_over(over):
    """Runs three steps in as many processes over a lane."""

    def run(lane, *arguments, **given):
        return over(lane, RANKS, three_steps, *arguments, **given)

    return run


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(
    ("value", "phase", "bearers"),
    [
        (math.nan, "forward", [2]),
        (-math.inf, "forward", [0, 2]),
        (math.inf, "backward", [1]),
        *(
            pytest.param(value, phase, bearers, marks=pytest.mark.long)
            for value, phase, bearers in [
                (math.nan, "forward", [0, 2]),
                (math.inf, "forward", [1]),
                (math.nan, "backward", [1]),
                (math.nan, "backward", [0, 2]),
                (math.inf, "backward", [0, 2]),
            ]
        ),
    ],
)
def test_the_first_one_is_told_with_its_ranks(steps_over, lane, value, phase, bearers):
    found = steps_over(lane, value, phase, bearers, "warn")
    names = [f"rank {rank} ({socket.gethostname()}, pid {pid})" for rank, (*_, pid) in enumerate(found)]
    for rank, (told, raised, moved, _) in enumerate(found):
        ((level, text),) = told
        is_own = rank in bearers
        assert level == ("ERROR" if is_own else "WARNING")
        assert f"layer {non_finite_programs.NAME}, {phase}, step 1, " in text
        if is_own:
            assert names[rank] in text
            assert ("and 1 more" in text) == (len(bearers) == 2)
        else:
            assert f", {', '.join(names[bearer] for bearer in bearers)}, " in text
        assert text.endswith(f"1 of 4 channels ({'NaN' if math.isnan(value) else 'inf'})") or phase == "backward"
        assert (raised, moved) == ([], 3)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_all_ranks_may_raise_before_anything_has_moved(steps_over, lane, phase):
    found = steps_over(lane, math.nan, phase, [1], "raise", on_nonfinite="raise")
    name = f"rank 1 ({socket.gethostname()}, pid {found[1][-1]})"
    for told, raised, moved, _ in found:
        ((step, fields, text),) = raised
        assert (told, step, fields["members"], fields["names"], fields["phase"]) == ([], 1, [1], [name], phase)
        assert (fields["spoilt_channels"], fields["channels"], fields["kinds"]) == (1, 4, ["NaN"])
        assert text.startswith("rank 1 brought values that are not finite: ")
        assert f"\n  {name}\n" in text
        assert moved == (2 if phase == "forward" else 3)


@pytest.mark.parametrize("lane", LANES)
def test_it_may_be_ignored(steps_over, lane):
    found = steps_over(lane, math.nan, "forward", [1], "ignore", on_nonfinite="ignore")
    assert [of_rank[:-1] for of_rank in found] == [([], [], 3)] * RANKS


@pytest.mark.parametrize("lane", LANES)
def test_what_is_masked_is_no_finding(steps_over, lane):
    found = steps_over(lane, math.nan, "forward", [1], "raise", "masked", on_nonfinite="raise")
    assert [of_rank[:-1] for of_rank in found] == [([], [], 3)] * RANKS


@pytest.mark.parametrize("lane", LANES)
def test_a_training_with_a_scaler_begins_with_steps_that_overflow_and_are_left_out(steps_over, lane):
    found = steps_over(lane, 1.0, "forward", [], "raise", "with a scaler", on_nonfinite="raise")
    for told, raised, moved, _ in found:
        assert [level for level, _ in told] == ["INFO"]
        assert "backward, step 0" in told[0][1]
        assert (raised, moved) == ([], 3)


@pytest.mark.parametrize("lane", LANES)
def test_scaled_gradients_overflow_on_purpose(steps_over, lane):
    found = steps_over(lane, math.inf, "backward", [1], "raise", "scaled", on_nonfinite="raise")
    for told, raised, *_ in found:
        ((level, text),) = told
        assert (level, raised) == ("INFO", [])
        assert "its GradScaler skips such a step" in text


def test_a_scaler_that_has_scaled_nothing_explains_nothing(steps_over):
    found = steps_over(ZEROMQ, math.inf, "backward", [1], "warn", "with an idle scaler")
    assert [[level for level, _ in told] for told, *_ in found] == [["WARNING"], ["ERROR"], ["WARNING"]]


class LossScaler:
    """As DeepSpeed's."""


def test_whoever_scales_gradients_is_known_by_name_and_use():
    used, idle, off = (torch.amp.GradScaler("cpu", enabled=is_on) for is_on in (True, True, False))
    for scaler in (used, off):
        scaler.scale(torch.ones(()))
    things = [used, idle, off, LossScaler(), torch.ones(())]
    assert [non_finite._is_scaler(thing) for thing in things] == [True, False, False, True, False]


@pytest.mark.parametrize(
    ("how", "lane"),
    [
        *(("checkpointed", lane) for lane in LANES),
        # A compiler takes seconds in each process.
        *(pytest.param("compiled", lane, marks=pytest.mark.long) for lane in LANES),
    ],
)
def test_it_is_told_of_calls_of_any_kind(steps_over, lane, how):
    for phase in ("forward", "backward"):
        found = steps_over(lane, math.nan, phase, [1], "warn", how)
        assert [[level for level, _ in told] for told, *_ in found] == [["WARNING"], ["ERROR"], ["WARNING"]]


@pytest.mark.parametrize(("policy", "told"), [("warn", 1), ("raise", 1), ("ignore", 0)])
def test_the_metrics_have_it(policy, told):
    def bring(connection, value: float) -> None:
        connection.member = replace(connection.member, on_nonfinite=policy)
        lane, rows = SlavePipe(connection, "bn"), Rows((1,), np.full((1, 2, 1), value))
        try:
            non_finite.check(lane, rows, lane.run_slave(rows))
        except NonFinite:
            assert policy == "raise"

    with MemoryMaster().connect(0, 1) as connection:
        for value, expected in ((1.0, 0), (math.nan, told), (1.0, told)):
            bring(connection, value)
            assert connection.metrics()["statsd_bn/non_finite"] == expected


def test_of_several_replicas_of_a_process_the_one_is_named(caplog):
    model = client.DataParallelWithCallback(client.SynchronizedBatchNorm1d(4), device_ids=["cpu"] * 4)
    model.module.layer_name = "bn"
    x = torch.randn(8, 4)
    x[4, 1] = math.inf  # the third replica's
    with client.connect(), caplog.at_level("INFO", "statsd_bn.client"):
        model(x)
        model(x)
    told = [record for record in caplog.records if "non-finite" in record.getMessage()]
    assert [record.levelname for record in told] == ["ERROR"]
    text = told[0].getMessage()
    assert text.startswith("first non-finite: layer bn, forward, rank 0 (")
    assert text.endswith(", replica 2), 1 of 4 channels (inf)")
