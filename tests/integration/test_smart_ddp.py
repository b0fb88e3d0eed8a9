"""smart_ddp: synchronised layers under DistributedDataParallel, with the arguments for the device."""

import pytest
import torch
from torch import nn

import client
from client.training import smart_ddp
from client.training.smart_ddp import arguments_for
from programs import ddp_programs
from statsd_bn.errors import ConfigurationError
from statsd_bn.text import unwrap
from support.sentences import says
from support.whole_batch import assert_equal

STORE = "store"


def test_a_graph_that_changes_fails_with_a_static_graph(members, tmp_path):
    """A branch that the first step does not use, as in yolov5#10410."""
    for error in members(2, ddp_programs.train, str(tmp_path / STORE)):
        assert "not compatible with static_graph" in error


def test_micro_batches_under_no_sync_move_the_statistics_once(members, tmp_path):
    sizes = (1, 3)
    whole = nn.BatchNorm1d(3).double()
    whole(torch.cat(ddp_programs.micro_batches(sizes)))
    expected = {name: buffer.numpy() for name, buffer in whole.named_buffers()}
    for found in members(2, ddp_programs.train_in_micro_batches, str(tmp_path / STORE), sizes):
        assert_equal(found, expected, 1e-12)


def test_refusals_and_warnings_with_a_process_group(members, tmp_path):
    for refusal, kind, warned in members(2, ddp_programs.wrap, str(tmp_path / STORE)):
        assert "expected all parameters on one device, got cpu, meta" in unwrap(refusal)
        assert kind == "BatchNorm1d"
        assert len(warned) == 1
        assert warned[0].startswith("ddp_programs.py: convert_model left 1 layer unsynchronised: '1' (Special")


@pytest.mark.parametrize("version", ["1.11.0", "1.12.1", "1.12.1+cu113", "1.120.0", "2.6.0+cpu", "2.13.0"])
def test_every_torch_except_1_12_0_is_accepted(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(RuntimeError, match=r"^process group: expected"):  # the next check
        client.smart_ddp(nn.Linear(2, 2))


def test_on_cuda_the_device_is_that_of_the_local_rank():
    assert arguments_for(torch.device("cuda", 1), {"LOCAL_RANK": "1"}, static_graph=True) == {
        "static_graph": True,
        "find_unused_parameters": False,
        "device_ids": [1],
        "output_device": 1,
    }


@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu"])
def test_without_cuda_no_device_ids_are_given(kind):
    found = arguments_for(torch.device(kind), {"LOCAL_RANK": "1"}, static_graph=False)
    assert found == {"static_graph": False, "find_unused_parameters": True}


def test_a_model_on_another_cuda_device_is_refused():
    with pytest.raises(
        ValueError, check=says(r"expected its parameters on cuda:1, the device of LOCAL_RANK 1, got cuda:0")
    ):
        arguments_for(torch.device("cuda", 0), {"LOCAL_RANK": "1"}, static_graph=True)


@pytest.mark.parametrize("environ", [{}, {"LOCAL_RANK": ""}, {"LOCAL_RANK": "-1"}, {"LOCAL_RANK": "first"}])
def test_on_cuda_a_local_rank_is_required(environ):
    with pytest.raises(ConfigurationError, match="LOCAL_RANK: expected"):
        arguments_for(torch.device("cuda", 0), environ, static_graph=True)


class Counting(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("seen", torch.zeros(()))


SIZE = 2


@pytest.mark.parametrize(
    ("layers", "may_differ"),
    [
        ([client.SynchronizedBatchNorm1d(3)], False),
        ([client.SynchronizedBatchNorm1d(3, track_running_stats=False)], False),
        ([client.SynchronizedBatchNorm1d(3, group=client.Group("all", SIZE))], False),
        ([client.SynchronizedBatchNorm1d(3, group=client.Group("one", 1))], True),
        ([client.SynchronizedBatchNorm1d(3, group="local")], True),
        ([client.SynchronizedBatchNorm1d(3), nn.BatchNorm1d(3)], True),
        ([client.convert_model(Counting())], True),
    ],
)
def test_buffers_are_broadcast_if_they_may_differ(monkeypatch, layers, may_differ):
    monkeypatch.setattr(smart_ddp.distributed, "get_world_size", lambda: SIZE)
    assert smart_ddp._may_differ(nn.Sequential(nn.Linear(3, 3), *layers)) == may_differ
