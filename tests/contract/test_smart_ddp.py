"""The contract of `client.smart_ddp`, also called `smart_DDP`: a synchronised model under DistributedDataParallel."""

import re

import pytest
import torch
from torch import nn

import client
from programs import contract_ddp_programs as programs
from programs.ddp_programs import Mode
from support.comparison import assert_close, share_of

MODES = {
    "default": Mode(shares=(1, 4)),
    "a graph that changes": Mode(options=(("static_graph", False),), branch=True),
    "no_sync": Mode(options=(("static_graph", False),), micro_batches=2),
}
PER_SAMPLE = ("output", "input gradient")


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_ranks_train_as_one_process_on_the_whole_batch(ranks, mode, either):
    spelling = "smart_ddp" if either else "smart_DDP"
    results = ranks(2, programs.under_smart_ddp, mode, either, spelling)
    whole = programs.on_the_whole_batch(mode)
    for rank, found in enumerate(results):
        assert_close(found, share_of(whole, rank, mode.shares, PER_SAMPLE))
    assert list(programs.broken(results)) == []


def test_it_converts_unless_told_not_to_and_assumes_a_static_graph_unless_told_it_changes(ranks):
    for found in ranks(2, programs.made_by_smart_ddp):
        assert found["made"] == {
            "{}": ("SynchronizedBatchNorm1d", True, False),
            "{'static_graph': False}": ("SynchronizedBatchNorm1d", False, True),
            "{'convert': False}": ("BatchNorm1d", True, False),
        }
        frozen, empty = found["refused"]
        assert "expected a parameter with requires_grad, got none among 4" in frozen
        assert "expected a parameter with requires_grad, got none among 0" in empty


@pytest.mark.parametrize(
    ("way", "is_broadcast"), [("converted by smart_ddp", False), ("left by smart_ddp", True)], ids=["converted", "left"]
)
def test_buffers_are_broadcast_before_each_forward_pass_only_where_the_model_is_not_converted(
    ranks, way, is_broadcast, connected
):
    """Buffers of synchronised layers are equal on all ranks without a broadcast; others would drift apart."""
    found = ranks(2, programs.means_after_an_evaluation, way, {}, connected)
    assert found == [[10.0, 10.0], [10.0, 10.0] if is_broadcast else [11.0, 11.0]]


@pytest.mark.parametrize("is_broadcast", [True, False])
@pytest.mark.parametrize("way", ["converted by smart_ddp", "left by smart_ddp"])
def test_the_caller_may_say_whether_buffers_are_broadcast(ranks, way, is_broadcast, connected):
    options = {"broadcast_buffers": is_broadcast}
    found = ranks(2, programs.means_after_an_evaluation, way, options, connected)
    assert found == [[10.0, 10.0], [10.0, 10.0] if is_broadcast else [11.0, 11.0]]


def test_without_a_process_group_it_says_what_to_call_and_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(RuntimeError, match=r"torch\.distributed\.init_process_group\(\)"):
        client.smart_ddp(model)
    assert type(model[1]) is nn.BatchNorm1d


@pytest.mark.parametrize("version", ["1.12.0", "1.12.0+cu113"])
def test_a_torch_whose_wrapper_is_broken_is_refused(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"(?s)expected any version but 1\.12\.0, .* got {re.escape(version)}"):
        client.smart_ddp(nn.Linear(2, 2))
