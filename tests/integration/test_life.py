"""Modules that are copied, pickled, saved, shared, moved, averaged or forked train as a module on the whole batch."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import client
from programs import life_programs
from programs.life_programs import STEPS
from statsd_bn.text import unwrap
from support.transports import HOST_TRANSPORTS, PROCESS_GROUP
from support.whole_batch import assert_equal

TOLERANCE = 1e-9

RENEWALS = [
    *(life_programs.deepcopied, life_programs.pickled, life_programs.saved_whole),
    *(life_programs.saved_as_state_through_torchs_layers, life_programs.shared, life_programs.moved),
    life_programs.reverted_and_converted_again,
]


@pytest.mark.parametrize("renew", RENEWALS, ids=lambda renew: renew.__name__)
def test_a_renewed_model_goes_on_training_as_on_the_whole_batch(members, renew):
    expected = life_programs.train(None, renew)
    for found in members(2, life_programs.train, renew):
        assert_equal(found, expected, TOLERANCE)


def test_only_one_member_need_have_renewed_its_model(members):
    """A copy keeps the layer name, so its rounds match the others'."""
    expected = life_programs.train(None, life_programs.deepcopied)
    for found in members(2, life_programs.train_where_member_0_copies):
        assert_equal(found, expected, TOLERANCE)


def test_an_averaged_model_in_eval_sends_nothing(members):
    expected, expected_outputs, _ = life_programs.train_with_averages(None)
    found = members(2, life_programs.train_with_averages)
    for state, _, rounds in found:
        assert rounds == STEPS * 2 * 2, "steps, layers, phases"
        assert_equal(state, expected, TOLERANCE)
    outputs = found[0][1]
    assert len(outputs) == len(expected_outputs) == STEPS * 2 * 2, "steps, times, averages"
    for output, whole in zip(outputs, expected_outputs, strict=True):
        torch.testing.assert_close(output, whole)


@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
def test_forked_workers_load_and_evaluate_without_their_parents_connection(over, transport):
    expected, expected_output = life_programs.train_with_a_plain_loader()
    found = over(transport, 2, life_programs.train_with_forked_workers)
    for state, _, errors, process in found:
        assert_equal(state, expected, TOLERANCE)
        assert len(errors) == STEPS
        for error in errors:
            assert error.startswith("ConnectionClosed: ")
            what = "process group" if transport == PROCESS_GROUP else "connection"
            assert re.search(rf"was forked from process {process} and cannot use its {what}", unwrap(error))
    for step, whole in enumerate(expected_output):
        torch.testing.assert_close(torch.cat([evaluated[step] for _, evaluated, _, _ in found]), whole)


@pytest.mark.parametrize("target", [torch.float64, torch.bfloat16, torch.device("meta"), torch.device("cpu")], ids=str)
def test_after_conversion_it_moves_as_torchs_layer_does(target):
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    ours = client.convert_model(copy.deepcopy(plain))
    expected, found = plain.to(target).state_dict(), ours.to(target).state_dict()
    assert {name: (value.dtype, value.device) for name, value in found.items()} == {
        name: (value.dtype, value.device) for name, value in expected.items()
    }


def test_a_pickle_holds_the_layers_settings_and_no_connection(server, job):
    layer = client.SynchronizedBatchNorm2d(3, eps=1e-3, momentum=None, affine=False, eps_mode="clamp").eval()
    layer.layer_name = "stem.bn"
    without = pickle.dumps(layer)
    with client.connect(server.endpoint, job=job):
        assert pickle.dumps(layer) == without
        for twin in (pickle.loads(without), copy.deepcopy(layer)):  # noqa: S301 - our own bytes
            assert repr(twin) == repr(layer)
            assert (twin.layer_name, twin.eps_mode, twin.training) == ("stem.bn", "clamp", False)


@pytest.mark.parametrize("renew", RENEWALS[:3], ids=lambda renew: renew.__name__)
def test_a_model_under_data_parallel_can_be_copied_and_saved_after_it_has_trained(renew):
    expected = life_programs.network()
    model = client.DataParallelWithCallback(client.convert_model(life_programs.network()), ["cpu"] * 3)
    for step in range(STEPS):
        for each in (expected, model):
            life_programs.take_step(None, each, life_programs.shard(None, step))
        model = renew(model)
    assert_equal(life_programs.state(model.module), life_programs.state(expected), TOLERANCE)


@pytest.mark.parametrize("renew", RENEWALS[:3], ids=lambda renew: renew.__name__)
def test_a_patched_data_parallel_can_be_copied_and_saved(renew):
    original = nn.DataParallel(nn.Sequential(client.SynchronizedBatchNorm1d(3)))
    client.patch_replication_callback(original)
    twin = renew(original)
    assert twin.replicate.args[0].__self__ is twin
    original.device_ids = None  # the copy must not use it
    twin.device_ids = ["cpu"]
    x = torch.randn(4, 3)
    # Torch's own replicate needs an accelerator; for one replica the module itself will do.
    client.execute_replication_callbacks([twin.module])
    (output,) = twin.parallel_apply([twin.module], [(x,)], [{}])
    torch.testing.assert_close(output, nn.BatchNorm1d(3)(x))
