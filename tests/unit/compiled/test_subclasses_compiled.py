"""Converted subclasses under torch.compile without graph breaks, and their counts of batches."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import client
from support.subclasses import Activated, Centred, Functional, Fused, Helped, Operator

# Classes that count batches themselves, and classes that use torch's forward.
ALL = [Functional, Operator, Helped, Centred, Activated, Fused, nn.BatchNorm2d]
KINDS = pytest.mark.parametrize("kind", ALL)
TWO_KINDS = pytest.mark.parametrize(
    "kind", [kind if kind in {Functional, Activated} else pytest.param(kind, marks=pytest.mark.long) for kind in ALL]
)

BATCHES = 4


def _yes(*_):
    return True


def _no(*_):
    return False


@pytest.fixture(autouse=True)
def _always_synchronised():
    """Makes layers synchronise although there are no other members."""
    torch.compiler.reset()
    with mock.patch.object(client.SynchronizedBatchNorm, "_must_synchronise", _yes):
        yield


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, 2, 2, generator=generator, dtype=torch.float64) for _ in range(BATCHES)]


def made(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 4, 1, dtype=torch.float64), kind(4, dtype=torch.float64))


def trained(model, run):
    for x in batches():
        run(x).square().sum().backward()
    return dict(model.named_buffers())


def compiled(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@KINDS
def test_a_checkpoint_around_a_compiled_model_counts_each_batch_once(kind):
    whole, model = made(kind), client.convert_model(made(kind))
    run = compiled(model)
    found = trained(model, lambda x: checkpoint(run, x, use_reentrant=False))
    torch.testing.assert_close(found, trained(whole, whole))


@TWO_KINDS
def test_a_compiled_mini_batch_is_counted_once_for_all_its_micro_batches(kind):
    eager = client.convert_model(made(kind), chunks=2)
    model = copy.deepcopy(eager)
    found = trained(model, compiled(model))
    assert found["1.num_batches_tracked"] == BATCHES / 2
    torch.testing.assert_close(found, trained(eager, eager))


class Evading(nn.BatchNorm2d):
    def forward(self, x):
        return x * 2 if self.training else nn.functional.batch_norm(x, self.running_mean, self.running_var)


def test_a_compiled_forward_without_a_call_of_batch_norm_is_reported_once(caplog):
    model = client.convert_model(made(Evading))
    run = compiled(model)
    for x in batches():
        run(x)
    (text,) = [record.getMessage() for record in caplog.records if record.name == "statsd_bn.client"]
    expected = "layer '1' not synchronised: the forward of Evading did not call batch_norm with the layer's "
    assert text.startswith(expected)
    assert client.conversion_report(model).left.keys() == {"1"}


@TWO_KINDS
def test_a_second_compiled_call_compiles_nothing_anew(kind):
    model = client.convert_model(made(kind))
    run = compiled(model)
    run(batches()[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(batches()[1])
    assert "_was_called" not in model[1].__getstate__(), "belongs to the call, not to the state"


@TWO_KINDS
def test_alone_a_compiled_call_is_counted_once(kind):
    whole, model = made(kind), client.convert_model(made(kind))
    with mock.patch.object(client.SynchronizedBatchNorm, "_must_synchronise", _no):
        torch.testing.assert_close(trained(model, compiled(model)), trained(whole, whole))
