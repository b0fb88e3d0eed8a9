"""A checkpoint runs a forward pass twice: statistics move once, gradients are right, and there is no second round."""

import copy
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import client
from client.ops import checkpointing
from client.ops.checkpointing import MAX_WITHOUT_GRAPH, ExchangeCache
from client.ops.exchange import Exchange
from client.ops.statistics import ChannelMoments
from client.transports.transport import LocalPipe
from programs import member_programs
from programs.life_programs import network as model
from statsd_bn.errors import ConfigurationError
from support.sentences import says

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def train(model, steps, forward):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for step in range(steps):
        x, factors = member_programs.batch(step)
        x.requires_grad_()
        optimizer.zero_grad()
        (forward(model, x) * factors).sum().backward()
        optimizer.step()
        gradients.append(x.grad)
    return {name: value.detach() for name, value in model.state_dict().items()} | {"gradients": torch.stack(gradients)}


def assert_same(found, expected):
    found = {name: torch.as_tensor(value) for name, value in found.items()}
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def assert_near(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@REENTRANT
def test_members_with_checkpoints_equal_the_whole_batch_without_checkpoints(members, reentrant):
    results = members(2, member_programs.train_with_checkpoints, 4, reentrant)
    expected = train(member_programs.small_model(), 4, lambda model, x: model(x))
    for member, (state, gradients, rounds) in enumerate(results):
        assert rounds == 4 * 2 * 2, "a round per layer, step and direction"
        whole = expected["gradients"].chunk(2, dim=1)[member]
        assert_same(state | {"gradients": gradients}, expected | {"gradients": whole})


def test_virtual_replicas_with_checkpoints_equal_the_whole_batch_without_checkpoints():
    expected = train(model(), 4, lambda model, x: model(x))
    wrapped = client.DataParallelWithCallback(client.convert_model(Checkpointed(model(), reentrant=False)), ["cpu"] * 3)
    found = train(wrapped, 4, lambda wrapped, x: wrapped(x))
    assert_same({name.removeprefix("module.inner."): value for name, value in found.items()}, expected)


class Checkpointed(nn.Module):
    def __init__(self, inner, *, reentrant):
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def test_a_checkpoint_around_a_first_layer_whose_input_needs_no_gradient():
    inner = nn.Sequential(nn.BatchNorm2d(1), model()).double()
    plain = copy.deepcopy(inner)
    wrapped = client.DataParallelWithCallback(client.convert_model(Checkpointed(inner, reentrant=False)), ["cpu"] * 3)
    x, factors = member_programs.batch(0)
    for each in (wrapped, plain):
        (each(x) * factors).sum().backward()
    for found, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("has_top_hooks", [True, False], ids=["this torch", "torch before 2.8"])
@pytest.mark.parametrize("number", range(3))
def test_a_checkpoint_around_one_replica_and_not_its_siblings(number, has_top_hooks, monkeypatch):
    if not has_top_hooks:
        monkeypatch.setattr(checkpointing, "_top", None)
    wrapped = client.DataParallelWithCallback(client.convert_model(OneCheckpointed(model(), number)), ["cpu"] * 3)
    expected = train(model(), 2, lambda model, x: model(x))
    found = train(wrapped, 2, lambda wrapped, x: wrapped(x))
    assert_same({name.removeprefix("module.inner."): value for name, value in found.items()}, expected)


class OneCheckpointed(nn.Module):
    def __init__(self, inner, number):
        super().__init__()
        self.inner = inner
        self.chosen, self.number = number, 0

    def __data_parallel_replicate__(self, _context, copy_id):
        self.number = copy_id

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.number == self.chosen else self.inner(x)


def test_several_replicas_in_a_reentrant_checkpoint_get_an_error_with_a_remedy():
    """The backward pass runs one replica after the other, so the first would wait for the later ones."""
    wrapped = client.DataParallelWithCallback(client.convert_model(Checkpointed(model(), reentrant=True)), ["cpu"] * 3)
    x, factors = member_programs.batch(0)
    output = wrapped(x.requires_grad_())
    with pytest.raises(ConfigurationError, check=says(r"all 3 replicas .* use_reentrant=False")):
        (output * factors).sum().backward()


@REENTRANT
def test_alone_the_statistics_move_once_as_well(reentrant):
    layers = client.convert_model(model())
    expected = train(copy.deepcopy(layers), 3, lambda model, x: model(x))
    found = train(layers, 3, lambda model, x: checkpoint(model, x, use_reentrant=reentrant))
    assert_same(found, expected)


@REENTRANT
@pytest.mark.parametrize(
    "program", [member_programs.call_twice_in_a_checkpoint, member_programs.pipeline_of_checkpoints]
)
def test_a_layer_that_is_called_twice_before_a_checkpoint_is_computed_again(members, program, reentrant):
    """In one checkpoint, and in a pipeline F1 F2 B1 F3 B2 B3, where F3 has started another step before B2."""
    for found, expected in members(2, program, reentrant):
        assert_near(found, expected)


@pytest.mark.parametrize(
    ("reentrant", "backend"),
    [(False, ""), (False, "aot_eager"), pytest.param(True, "aot_eager", marks=pytest.mark.long)],
)
def test_a_layer_that_is_called_twice_on_an_empty_batch_in_a_checkpoint(members, reentrant, backend):
    for found, expected in members(2, member_programs.call_twice_on_an_empty_batch_in_a_checkpoint, reentrant, backend):
        assert_near(found, expected)


# Nested checkpoints, the outermost first; True stands for a reentrant one.
NESTED = {
    "reentrant": (True,),
    "not reentrant": (False,),
    "reentrant in reentrant": (True, True),
    "not reentrant in not reentrant": (False, False),
    "reentrant in not reentrant": (False, True),
    "not reentrant in reentrant": (True, False),
}


@pytest.mark.parametrize("kinds", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("region", member_programs.REGIONS)
@pytest.mark.parametrize(
    "order",
    [(3, 2, 1, 0), (0, 1, 2, 3), pytest.param((1, 3, 0, 2), marks=pytest.mark.long)],
    ids=["last first", "first first", "any"],
)
def test_calls_that_only_the_other_member_can_tell_apart(members, region, kinds, order):
    for found, expected in members(2, member_programs.call_on_what_one_member_cannot_tell_apart, region, kinds, order):
        assert_near(found, expected)


def test_a_layer_before_the_trained_part_is_not_exchanged_again_on_members(members):
    assert members(2, member_programs.checkpoint_that_begins_before_what_learns, 3) == [(3, 3)] * 2


def test_a_layer_before_the_trained_part_is_not_exchanged_again_by_virtual_replicas():
    first = nn.BatchNorm1d(3).requires_grad_(requires_grad=False)
    model = client.convert_model(Checkpointed(nn.Sequential(first, nn.Linear(3, 2), nn.Sigmoid()), reentrant=False))
    client.DataParallelWithCallback(model, ["cpu"] * 2)(torch.randn(4, 3)).sum().backward()
    assert model.inner[0].num_batches_tracked == 1


def test_a_checkpointed_graph_that_is_kept_allows_two_backward_passes(members):
    for found, expected, rounds in members(2, member_programs.walk_a_checkpoint_twice):
        for once, again in zip(*found, strict=True):
            np.testing.assert_array_equal(once, again)
        for value, by_autograd in zip(found[0], expected, strict=True):
            np.testing.assert_allclose(value, by_autograd, rtol=1e-12, atol=1e-12)
        assert rounds == 3, "a forward and two backward rounds"


def test_a_new_forward_inside_backward_is_a_separate_round(members):
    for rounds, batches in members(2, member_programs.forward_in_a_backward_hook):
        assert rounds == 3, "two forward rounds and a backward one"
        assert batches == 2


def exchange_of(values, layer="bn"):
    exchange = Exchange(LocalPipe(layer), layer, 1e-5, "plus")
    exchange.forward([moments_of(values)])
    return exchange


def moments_of(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    return ChannelMoments(len(tensor), torch.stack((tensor.sum(), (tensor**2).sum()))[:, None], (len(tensor), 1))


def find(exchanges, replica, moments):
    return exchanges.find("bn", LocalPipe("bn"), replica, moments)


def test_a_call_over_another_transport_is_not_found():
    exchanges = ExchangeCache()
    call = exchange_of([1.0, 2.0])
    exchanges.add(call, has_graph=True)
    assert exchanges.find("bn", LocalPipe("another transport"), 0, moments_of([1.0, 2.0])) is None
    assert find(exchanges, 0, moments_of([1.0, 2.0])) is call


@pytest.mark.parametrize("has_graph", [True, False], ids=["with a graph", "without"])
def test_of_equal_calls_each_is_found_once_latest_first(has_graph):
    exchanges = ExchangeCache()
    calls = [exchange_of([1.0, 2.0]) for _ in range(8)]
    for call in calls:
        exchanges.add(call, has_graph=has_graph)
    found = [find(exchanges, 0, moments_of([1.0, 2.0])) for _ in calls]
    assert found == calls[::-1]
    assert find(exchanges, 0, moments_of([1.0, 2.0])) is calls[-1]


def test_the_nearest_call_is_found_but_no_distant_one():
    exchanges = ExchangeCache()
    calls = [exchange_of([1.0, 2.0 + offset]) for offset in (0.0, 1e-6, 1.0)]
    for call in calls:
        exchanges.add(call, has_graph=True)
    for call, offset in zip(calls, (0.0, 1e-6, 1.0), strict=True):
        assert find(exchanges, 0, moments_of([1.0, 2.0 + offset])) is call
    assert find(exchanges, 0, moments_of([1.0, 2.0 + 9e-7])) is calls[1]
    assert find(exchanges, 0, moments_of([1.0, 2.1])) is None
    assert find(exchanges, 0, moments_of([1.0, 2.0, 0.0])) is None
    assert exchanges.find("other", LocalPipe("other"), 0, moments_of([1.0, 2.0])) is None
    assert find(exchanges, 1, moments_of([1.0, 2.0])) is None


def test_values_that_are_not_finite_are_found_too():
    exchanges = ExchangeCache()
    call = exchange_of([1.0, np.nan])
    exchanges.add(call, has_graph=True)
    assert find(exchanges, 0, moments_of([1.0, np.nan])) is call


class OnADevice:
    """Vectors that a device has not computed yet: only a blocking copy has their values."""

    device, is_cuda = torch.device("cuda"), False

    def __init__(self, vectors):
        self.numpy, self._vectors = vectors.numpy, vectors

    def to(self, _, *, non_blocking=False):
        return torch.full_like(self._vectors, torch.nan) if non_blocking else self._vectors


def test_vectors_on_a_device_are_awaited_and_then_compared_with_the_vectors_on_the_host():
    exchanges = ExchangeCache()
    call = exchange_of([1.0, 2.0])
    exchanges.add(call, has_graph=True)
    again = moments_of([1.0, 2.0])
    on_a_device = ChannelMoments(again.count, OnADevice(again.vectors), again.shape)
    assert find(exchanges, 0, on_a_device) is call


def test_a_call_is_forgotten_with_its_graph():
    exchanges = ExchangeCache()
    call = exchange_of([1.0, 2.0])
    exchanges.add(call, has_graph=True)
    del call
    assert find(exchanges, 0, moments_of([1.0, 2.0])) is None


def test_a_layer_without_live_graphs_is_forgotten_when_another_layer_is_called():
    exchanges = ExchangeCache()
    call = exchange_of([1.0, 2.0])
    exchanges.add(call, has_graph=True)
    for number in range(3):
        exchanges.add(exchange_of([1.0, 2.0], f"bn {number}"), has_graph=True)
    assert list(exchanges._with_graph) == ["bn", "bn 2"]
    assert find(exchanges, 0, moments_of([1.0, 2.0])) is call


def test_the_oldest_call_without_a_graph_is_forgotten_beyond_the_limit():
    exchanges = ExchangeCache()
    for number in range(MAX_WITHOUT_GRAPH + 1):
        exchanges.add(exchange_of([1.0, float(number)]), has_graph=False)
    assert find(exchanges, 0, moments_of([1.0, 0.0])) is None
    assert find(exchanges, 0, moments_of([1.0, 1.0])) is not None


def test_a_layer_that_is_called_no_more_is_forgotten_and_one_that_is_called_seldom_is_not():
    exchanges = ExchangeCache()
    gone = exchange_of([1.0, 2.0], "gone")
    reference = weakref.ref(gone)
    exchanges.add(gone, has_graph=False)
    del gone
    for _ in range(3):
        exchanges.add(exchange_of([1.0, 3.0]), has_graph=False)
        for _ in range(MAX_WITHOUT_GRAPH):
            exchanges.add(exchange_of([1.0, 4.0], "often"), has_graph=False)
        assert find(exchanges, 0, moments_of([1.0, 3.0])) is not None
    assert reference() is None
