"""recalibrate sets exact population statistics for any distribution of the batches, or raises and changes nothing."""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore

import client
from client.ops.checkpointing import exchange_cache
from client.training import recalibration
from client.transports import choose
from client.transports.transport import LocalPipe
from programs import recalibration_programs as programs
from programs.recalibration_programs import statistics
from statsd_bn import limits
from statsd_bn.text import unwrap
from support.sentences import says

# Members with unequal numbers of unequal batches, the last with none.
SIZES = [[3, 7], [2, 4, 9, 5], []]


def close(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def layer(channels=3, **arguments):
    made = client.SynchronizedBatchNorm1d(channels, dtype=torch.float64, **arguments)
    made.layer_name = "bn"
    return made


def samples(size, seed=0):
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_population(bn, x, tolerance=1e-12):
    expected = x.double()
    torch.testing.assert_close(bn.running_mean.double(), expected.mean(0), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(bn.running_var.double(), expected.var(0), rtol=tolerance, atol=tolerance)


def unchanged(module, before):
    return all((statistics(module)[name] == value).all() for name, value in before.items())


def as_one_process(sizes):
    network = programs.model()
    client.recalibrate(network, [batch for of_member in programs.batches(sizes) for batch in of_member])
    return statistics(network)


def test_members_with_any_batches_take_one_round_and_equal_one_process_with_all_batches(members):
    results = members(3, programs.recalibrate_shard, SIZES)
    for found, total, rounds in results:
        close(found, as_one_process(SIZES))
        assert all(found[name].tobytes() == results[0][0][name].tobytes() for name in found)
        assert (total, rounds) == (6, 1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 2e-7)])
def test_a_mean_of_a_thousand_deviations_costs_no_digits(dtype, tolerance):
    loader = [(samples(size, seed=size) + 1000).to(dtype) for size in (500, 700)]
    bn = layer().to(dtype)
    client.recalibrate(bn, loader)
    assert_population(bn, torch.cat(loader), tolerance)


@pytest.mark.parametrize("training", [True, False])
def test_replicas_of_one_process_are_one_batch(training):
    loader = programs.batches([[7, 5, 2]])[0]
    expected, found = programs.model().train(training), programs.model().train(training)
    client.recalibrate(expected, loader)
    wrapped = client.DataParallelWithCallback(found, ["cpu"] * 3)
    assert client.recalibrate(wrapped, loader) == 3
    close(statistics(found), statistics(expected))


def test_more_channels_than_a_message_carries_take_several_messages(monkeypatch):
    """The model has 4 + 3 channels, and a message of 6 ends within the second layer."""
    expected = as_one_process(SIZES)
    loader = [batch for of_member in programs.batches(SIZES) for batch in of_member]
    widths = []

    class CountingPipe(LocalPipe):
        def run_slave(self, contribution, key=None, **named):
            widths.append(contribution.values.shape[2])
            return super().run_slave(contribution, key, **named)

    monkeypatch.setattr(recalibration, "transport_for", lambda layer, _: CountingPipe(layer))
    for channels, parts in ((7, [7]), (6, [6, 1]), (4, [4, 3])):
        monkeypatch.setattr(limits, "MAX_CHANNELS", channels)
        network = programs.model()
        client.recalibrate(network, loader)
        assert widths == parts
        widths.clear()
        close(statistics(network), expected)


def test_a_layer_without_running_statistics_is_skipped_and_exchanges_nothing(members):
    assert members(2, programs.recalibrate_where_a_layer_keeps_nothing) == [1, 1]


def test_a_frozen_layer_of_a_model_in_training_normalises_with_its_own_statistics():
    frozen, bn = layer().eval(), layer()
    model = nn.Sequential(frozen, bn)
    frozen.running_mean.fill_(5.0)
    before, x = statistics(frozen), samples(8)
    client.recalibrate(model, [x])
    assert unchanged(frozen, before)
    assert_population(bn, frozen(x).detach())


class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.modes = []

    def forward(self, x):
        self.modes.append((self.training, torch.is_grad_enabled()))
        return x


@pytest.mark.parametrize("training", [True, False])
def test_modes_momentum_and_the_count_of_batches_stay_and_hooks_run(training):
    bn, recorder, calls = layer(momentum=0.3), Recorder(), []
    bn.num_batches_tracked.fill_(17)
    bn.register_forward_hook(lambda *_: calls.append("hook"))
    model = nn.Sequential(bn, recorder).train(training)
    x = samples(8)
    client.recalibrate(model, [x[:3], x[3:]])
    assert_population(bn, x)
    assert recorder.modes == [(training, False)] * 2
    assert [module.training for module in model.modules()] == [training] * 3
    assert (bn.momentum, bn.num_batches_tracked.item(), calls) == (0.3, 17, ["hook"] * 2)
    assert len(bn._forward_hooks) == 1
    assert torch.is_grad_enabled()


def test_a_layer_in_training_within_a_model_in_eval_is_measured():
    model = nn.Sequential(layer(), layer()).eval()
    model[0].train()
    client.recalibrate(model, [samples(5)])
    assert_population(model[0], samples(5))
    assert not model[1].training


def failing(error, after=1):
    yield from [samples(4)] * after
    raise error


def raiser(error):
    def fail(*_):
        raise error

    return fail


FAILURES = {
    "loader": lambda bn, error: client.recalibrate(bn, failing(error)),
    "progress": lambda bn, error: client.recalibrate(bn, [samples(4)] * 2, progress=raiser(error)),
    "model": lambda bn, error: client.recalibrate(nn.Sequential(bn, Failing(error)), [samples(4)] * 2),
}


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, _):
        raise self.error


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", FAILURES)
def test_any_exception_leaves_the_layer_unchanged(place, kind):
    bn = layer()
    before, attributes = statistics(bn), set(vars(bn))
    with pytest.raises(kind, match="on purpose"):
        FAILURES[place](bn, kind("on purpose"))
    assert unchanged(bn, before)
    assert set(vars(bn)) == attributes
    bn(samples(4))
    assert bn.num_batches_tracked == 1


def test_a_failed_exchange_leaves_the_layer_unchanged(monkeypatch):
    bn = layer()
    before = statistics(bn)
    monkeypatch.setattr(recalibration, "transport_for", raiser(TimeoutError("on purpose")))
    with pytest.raises(TimeoutError, match="on purpose"):
        client.recalibrate(bn, [samples(4)])
    assert unchanged(bn, before)
    assert "_accumulator" not in vars(bn)


def test_all_layers_are_written_or_none():
    model = nn.Sequential(layer(), layer())
    model[1].running_var = torch.ones(1, dtype=torch.float64).expand(3)
    before = statistics(model)
    with pytest.raises(RuntimeError, match="single memory location"):
        client.recalibrate(model, [samples(4)])
    assert unchanged(model, before)


def test_a_buffer_of_two_layers_keeps_its_value_after_a_failure():
    model = client.convert_model(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    model[1].running_mean = model[0].running_mean
    model[2].running_var = torch.ones(1).expand(3)  # cannot be written
    with pytest.raises(RuntimeError, match="single memory location"):
        client.recalibrate(model, [samples(4)])
    assert model[0].running_mean.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "wrap", [lambda x: (x, 1), lambda x: [x, "label"], lambda x: x], ids=["tuple", "list", "tensor"]
)
def test_a_batch_is_a_tensor_or_begins_with_one(wrap):
    bn = layer()
    client.recalibrate(bn, [wrap(samples(4)), wrap(samples(3, seed=1))])
    assert_population(bn, torch.cat([samples(4), samples(3, seed=1)]))


class OfDictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = layer()

    def forward(self, batch):
        return self.bn(batch["x"], batch.get("mask"))


def test_a_batch_of_another_type_is_passed_unchanged_and_masked_positions_do_not_count():
    model, mask = OfDictionary(), torch.tensor([True, False, True, True])
    client.recalibrate(model, [{"x": samples(4), "mask": mask}, {"x": samples(3, seed=1)}])
    assert_population(model.bn, torch.cat([samples(4)[mask], samples(3, seed=1)]))


def test_num_batches_is_a_limit_and_nothing_beyond_it_is_drawn():
    bn = layer()
    assert client.recalibrate(bn, failing(RuntimeError("drawn too far"), after=2), num_batches=2) == 2
    assert client.recalibrate(bn, [samples(4)], num_batches=5) == 1
    assert_population(bn, samples(4))


@pytest.mark.parametrize(
    ("num_batches", "kind", "expected"),
    [
        *((number, ValueError, f"at least 1, got {number}") for number in (0, -1)),
        *((value, TypeError, "an int or None, got") for value in (1.0, "3", True)),
    ],
)
def test_an_impossible_number_of_batches_is_refused(num_batches, kind, expected):
    with pytest.raises(kind, match=f"num_batches: expected {expected}"):
        client.recalibrate(layer(), [samples(4)], num_batches=num_batches)


def test_progress_is_called_for_every_batch():
    counts = []
    client.recalibrate(layer(), [samples(4)] * 3, progress=counts.append)
    assert counts == [1, 2, 3]


def test_zero_batches_are_an_error_on_every_member(members):
    expected = "ValueError: loader: expected values for at least one layer, got none in the 0 batches of all members"
    for error, is_intact in members(2, programs.recalibrate_nothing):
        assert (unwrap(error), is_intact) == (expected, True)


def test_empty_batches_are_counted_and_change_nothing():
    bn, reference = layer(), layer()
    assert client.recalibrate(bn, [samples(4), samples(0)]) == 2
    client.recalibrate(reference, [samples(4)])
    assert torch.equal(bn.running_var, reference.running_var)
    with pytest.raises(ValueError, match="got none in the 1 batches"):
        client.recalibrate(bn, [samples(0)])


def test_nan_on_one_member_is_an_error_on_every_member_and_names_the_layers(members):
    expected = "ValueError: loader: expected finite values, got NaN or infinity in layers '1', '4'; all layers keep"
    for error, is_intact in members(2, programs.recalibrate_nan_of_member_0):
        assert unwrap(error).startswith(expected), error
        assert is_intact


def test_members_that_measure_different_layers_get_an_error_that_names_them(members):
    for number, (error, is_intact) in enumerate(members(2, programs.recalibrate_other_layers)):
        assert "RoundMismatch" in error
        assert f"got layer '{1 - number}' with 3 channels" in error
        assert is_intact


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = layer(), layer()
        self.idle.layer_name = "auxiliary head"

    def forward(self, x):
        return self.used(x)


def test_a_layer_that_is_never_called_keeps_its_statistics_and_is_named():
    model = Idle()
    before = statistics(model.idle)
    with pytest.warns(UserWarning, match="'auxiliary head' were called on no member") as caught:
        client.recalibrate(model, [samples(4)])
    assert caught[0].filename == __file__
    assert unchanged(model.idle, before)
    assert_population(model.used, samples(4))


def test_a_warning_that_is_raised_as_an_error_leaves_all_layers_unchanged():
    model = Idle()
    before = statistics(model)
    with pytest.raises(UserWarning, match="called on no member"):
        client.recalibrate(model, [samples(4)])  # pytest turns warnings into errors
    assert unchanged(model, before)


def test_a_batch_of_one_value_per_channel_is_refused_by_number():
    bn = layer()
    before = statistics(bn)
    with pytest.raises(ValueError, match="layer 'bn': expected more than 1 value per channel") as caught:
        client.recalibrate(bn, [samples(4), samples(1)])
    assert "in batch 2 of recalibrate()" in caught.value.__notes__[0]
    assert unchanged(bn, before)


@pytest.mark.parametrize(
    "model", [nn.Linear(3, 3), nn.BatchNorm1d(3), layer(track_running_stats=False), nn.Sequential(layer().eval())]
)
def test_a_model_without_a_layer_to_measure_is_refused(model):
    with pytest.raises(ValueError, match="model: expected a synchronised layer with running statistics"):
        client.recalibrate(model, [samples(4)])


def test_a_layer_that_is_used_twice_pools_its_calls():
    bn = layer(affine=False)
    x = samples(6) * 3 + 1
    client.recalibrate(nn.Sequential(bn, bn), [x])
    assert_population(bn, torch.cat([x, nn.BatchNorm1d(3, affine=False).double()(x)]))


class Lazy(nn.modules.batchnorm._LazyNormBase, client.SynchronizedBatchNorm1d):
    cls_to_become = client.SynchronizedBatchNorm1d


def test_a_lazy_layer_is_refused_until_it_knows_its_channels():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Lazy modules")
        bn = Lazy(dtype=torch.float64)
    bn.layer_name = "lazy"
    with pytest.raises(ValueError, check=says("got lazy ones 'lazy'; run one batch through the model first")):
        client.recalibrate(bn, [samples(4)])
    bn(samples(2))
    client.recalibrate(bn, [samples(4)])
    assert_population(bn, samples(4))


def test_only_the_batches_count_despite_other_calls_of_the_model():
    bn, outputs = layer().eval(), []

    def loader():
        bn(samples(9, seed=9))
        yield samples(4)

    client.recalibrate(bn, loader(), progress=lambda _: outputs.append(bn(samples(9, seed=9)).detach()))
    assert_population(bn, samples(4))
    torch.testing.assert_close(outputs[0], layer().eval()(samples(9, seed=9)).detach())


def test_a_copy_made_during_recalibration_is_not_measured():
    bn, copies = layer(), []
    bn.register_forward_hook(lambda module, *_: copies.append(copy.deepcopy(module)))
    client.recalibrate(bn, [samples(4)])
    assert "_accumulator" not in vars(copies[0])
    copies[0]._forward_hooks.clear()
    copies[0](samples(4))
    assert copies[0].num_batches_tracked == 1


def test_recalibration_inside_backward_neither_reuses_cached_calls_nor_is_cached():
    bn, x, totals = layer(), samples(4), []
    bn.layer_name = "checkpointed"
    leaf = x.clone().requires_grad_()
    output = bn(leaf, torch.ones(4, dtype=torch.bool))
    leaf.register_hook(lambda _: totals.append(client.recalibrate(bn, [x])))
    (output * samples(4, seed=1)).sum().backward()
    assert totals == [1]
    assert_population(bn, x)
    assert "checkpointed" not in exchange_cache._without_graph


def test_an_averaged_model_has_the_mode_of_the_model_inside():
    averaged = AveragedModel(layer().eval())
    client.recalibrate(averaged, [samples(4), samples(3, seed=1)])
    assert_population(averaged.module, torch.cat([samples(4), samples(3, seed=1)]))


def test_distributed_data_parallel_sends_nothing_for_a_batch(monkeypatch):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        bn = layer()
        wrapped = nn.parallel.DistributedDataParallel(bn)
        assert wrapped.will_sync_module_buffers()
        monkeypatch.setattr(wrapped, "_sync_buffers", raiser(AssertionError("a broadcast")))
        monkeypatch.setattr(choose, "default_group", lambda: None)
        wrapped._join_config = wrapped._join_config._replace(enable=True)
        monkeypatch.setattr(dist, "all_reduce", raiser(AssertionError("an all_reduce")))
        client.recalibrate(wrapped, [samples(4), samples(3, seed=1)])
        assert wrapped.will_sync_module_buffers()
        assert wrapped._join_config.enable
    finally:
        dist.destroy_process_group()
    assert_population(bn, torch.cat([samples(4), samples(3, seed=1)]))
