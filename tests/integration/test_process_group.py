"""Torch's process group without a server, after `convert_model` alone."""

import re
import socket
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import client
from client.transports import process_group
from client.transports.process_group import NamedProcessGroup
from programs import ddp_programs, process_group_programs
from programs.member_programs import state
from statsd_bn.text import unwrap
from support.whole_batch import Case, assert_equal, assert_equal_to_whole_batch, joined


def test_a_compiled_model_trains_as_on_the_whole_batch(ranks):
    mode, steps = ddp_programs.Mode(shares=(1, 5)), 20
    model, _ = ddp_programs.train_on_the_whole_batch(mode, steps)
    for found in ranks(2, process_group_programs.train_under_ddp, mode, steps, "aot_eager"):
        assert_equal(found, state(model), 1e-9)


@pytest.mark.parametrize("how", ["convert_model", "convert_sync_batchnorm", "nn.SyncBatchNorm", "copy", "pickle"])
def test_layers_synchronise_with_the_ranks_of_their_process_group(ranks, how):
    case = Case("2d", (3, 2))
    found = ranks(4, process_group_programs.in_pairs, case, how)
    assert_equal_to_whole_batch(joined(found[:2]), case)
    assert_equal_to_whole_batch(joined(found[2:]), case)


def test_torchs_layer_gets_its_process_group_back(ranks):
    assert ranks(2, process_group_programs.revert) == [True, True]


def test_ranks_in_different_layers_all_get_the_positions_of_all(ranks):
    for text in ranks(3, process_group_programs.come_to_different_layers, ["stem.bn", "head.bn", "stem.bn"]):
        first, *rows = text.splitlines()
        assert first == "RoundMismatch: deadlock: the ranks wait in different rounds"
        assert [row.split("  ") for row in rows[:3]] == [
            ["", "rank 0", "in forward of layer 'stem.bn', call 0, step 0, 3 channels, 2 vectors"],
            ["", "rank 2", "in forward of layer 'stem.bn', call 0, step 0, 3 channels, 2 vectors"],
            ["", "rank 1", "in forward of layer 'head.bn', call 0, step 0, 3 channels, 2 vectors"],
        ]


def test_a_mismatch_of_channels_has_the_numbers_on_all_ranks(ranks):
    for text in ranks(2, process_group_programs.come_with_channels, [4, 8]):
        assert "rank 0  in forward of layer 'bn', call 0, step 0, 4 channels, 2 vectors" in text
        assert "rank 1  in forward of layer 'bn', call 0, step 0, 8 channels, 2 vectors" in text


@pytest.mark.parametrize(
    ("what", "place", "number", "problem"),
    [
        ("layer", process_group.ROWS, 2**40, "expected 1 to 64 rows from rank 1, got 1099511627776"),
        ("layer", process_group.ROWS, -3, "expected 1 to 64 rows from rank 1, got -3"),
        ("layer", process_group.FIRST_ROW, -1, "expected counts from 0, got -1"),
        ("layer", process_group.FIRST_ROW, 2**60, "count: expected an integer in [0, 9007199254740992]"),
        ("gather", process_group.FIRST_ROW, -1, "expected 0 to 1099511627776 bytes from rank 1, got -1"),
        ("gather", process_group.FIRST_ROW, 2**50, "expected 0 to 1099511627776 bytes from rank 1"),
    ],
)
def test_numbers_that_no_rank_can_have_are_refused_by_all(ranks, what, place, number, problem):
    for text in ranks(2, process_group_programs.lie, what, place, number):
        assert text.startswith("ProtocolError: ")
        assert problem in text


def test_a_rank_of_a_smaller_process_group_is_named_as_in_the_job(ranks):
    _, *found = ranks(3, process_group_programs.spoil_in_a_pair)
    for members, text in found:
        assert members == [2]
        assert text.startswith("rank 2 sent non-finite values: ")
    _, *texts = ranks(3, process_group_programs.lie_in_a_pair)
    for text in texts:
        assert "expected 1 to 64 rows from rank 2, got 1000" in text


def test_a_rank_that_is_alone_in_its_process_group_is_named_as_in_the_job(ranks):
    healthy, error = ranks(2, process_group_programs.spoil_alone)
    assert healthy == "no error"
    assert error.startswith("rank 1 sent non-finite values: ")


def test_a_gather_beside_a_layer_is_a_mismatch_on_all_ranks(ranks):
    for text in ranks(2, process_group_programs.gather_beside_a_layer):
        assert text.startswith("RoundMismatch: deadlock: the ranks wait in different rounds")
        assert "rank 0  in forward of layer 'bn'" in text
        assert "rank 1  in gather of layer 'mp_sync()'" in text


def test_gathered_values_and_averaged_gradients_use_the_process_group_too(ranks):
    assert ranks(2, process_group_programs.gather_values) == [([0, 0, 1], 0, 2), ([0, 0, 1], 1, 2)]
    assert ranks(2, process_group_programs.average) == [([0.75, 1.5], 4)] * 2


def test_join_without_a_connection_is_an_error(ranks):
    for text in ranks(2, process_group_programs.join):
        assert text.splitlines()[0] == "client.join() cannot use a process group, which waits for all its ranks"


def test_a_compiled_layer_notices_a_later_process_group(pool, tmp_path):
    run = process_group_programs.compile_before_there_are_ranks
    futures = [pool.submit(run, str(tmp_path / "store"), rank) for rank in range(2)]
    rows = torch.tensor([[1.0, 2.0], [3.5, 5.0], [2.0, 4.0], [7.0, 10.0]], dtype=torch.float64)
    whole = nn.BatchNorm1d(2, affine=False).double()(rows).split(2)
    for rank, future in enumerate(futures):
        alone, together = future.result(timeout=60)
        np.testing.assert_allclose(together, whole[rank], rtol=1e-12)
        assert np.abs(alone - together).max() > 0.1


def test_a_destroyed_process_group_is_an_error(ranks):
    for text in ranks(2, process_group_programs.destroyed):
        assert "does not exist in this process, or was destroyed" in unwrap(text)


def test_a_rank_outside_of_its_process_group_gets_an_error(ranks):
    _, text = ranks(2, process_group_programs.outside)
    assert "this process is not a member of the layer's process group" in unwrap(text)


def test_group_and_process_group_together_are_an_error():
    with pytest.raises(ValueError, match="expected group or process_group, got both"):
        client.SynchronizedBatchNorm1d(3, group="local", process_group="left")


# Enough for the ranks to compare some twenty samples; with a server each sample takes a second.
LOOKED_SECONDS = 40.0


def test_a_rank_whose_data_differ_is_named_by_the_first_rank_without_a_server(ranks):
    (first, _), *others = ranks(3, process_group_programs.differ, LOOKED_SECONDS)
    (skew,) = (text for text in first if "skew" in text)
    here = re.escape(socket.gethostname())
    assert re.match(rf"process group '0': skew: rank 2 \({here}, pid \d+\): since step \d+ its activations vary", skew)
    assert all("skew" not in text for texts, _ in others for text in texts)
    logs = [first, *(texts for texts, _ in others)]
    spoilt = [text for texts in logs for text in texts if "first non-finite" in text]
    assert len(spoilt) == 3
    (who,) = {re.search(r"rank 1 \((.*?, pid \d+)\)", text)[1] for text in spoilt}
    assert who.startswith(f"{socket.gethostname()}, ")


def test_late_checks_ignore_a_destroyed_process_group():
    pipe = process_group.ProcessGroupPipe(NamedProcessGroup("gone", 2), "bn")
    assert pipe.places() == {}
    process_group.report_non_finite(pipe, mock.Mock())


@pytest.mark.parametrize("on_devices", [False, True])
def test_rank_0_reports_infinity_to_the_server(ranks, server, job, on_devices):
    program = process_group_programs.spoil_beside_a_connection
    (text,), _ = ranks(2, program, server.endpoint, job, on_devices=on_devices)
    assert ", forward, step 0, rank 1 (" in text
    assert text.endswith("4 of 4 channels (inf)")


def test_with_a_connection_the_server_gets_the_findings(ranks, server, job):
    (first, found), *_ = ranks(3, process_group_programs.differ, LOOKED_SECONDS, server.endpoint, job)
    skew, non_finite = found
    assert (skew["kind"], skew["rank"]) == ("skew", 2)
    assert "pid" in skew["text"]
    assert ", forward, step 0, rank 1 (" in non_finite
    assert non_finite.endswith("4 of 4 channels (inf)")
    assert not any("skew" in text for text in first)
