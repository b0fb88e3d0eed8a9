"""Models and classes that are written in an unusual way are synchronised, or left and named in a warning."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.nn.utils import parametrizations

import client
from client.nn import conversion
from statsd_bn.errors import ConfigurationError
from support.subclasses import Activated

CHANNELS = 4


def batch():
    generator = torch.Generator().manual_seed(1)
    return 2 * torch.randn(6, CHANNELS, 3, 3, dtype=torch.float64, generator=generator) + 1


def step(model, x):
    output = model(x)
    (output**3).mean().backward()
    gradients = {f"gradient of {name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
    return output.detach(), {name.removeprefix("module."): found for name, found in gradients.items()}


def is_whole(model):
    whole, converted = copy.deepcopy(model), client.convert_model(model)
    output, gradients = step(whole, batch())
    found, found_gradients = step(client.DataParallelWithCallback(converted, device_ids=["cpu"] * 2), batch())
    torch.testing.assert_close(dict(converted.named_buffers()), dict(whole.named_buffers()))
    found_gradients = {name.replace("of module.", "of "): one for name, one in found_gradients.items()}
    assert found_gradients.keys() == gradients.keys()
    pairs = [(found, output), *((found_gradients[name], one) for name, one in gradients.items())]
    return all(torch.allclose(one, other) for one, other in pairs)


def normalise(layer, x, mean, var):
    return F.batch_norm(x, mean, var, layer.weight, layer.bias, layer.training, 0.1, layer.eps)


class WithAuxiliary(nn.BatchNorm2d):
    """Adds a second normalisation with the same weight and separate statistics."""

    def __init__(self, channels):
        super().__init__(channels)
        self.register_buffer("aux_mean", torch.zeros(channels))
        self.register_buffer("aux_var", torch.ones(channels))

    def forward(self, x):
        clean = normalise(self, x, self.running_mean, self.running_var)
        return clean + normalise(self, x.square(), self.aux_mean, self.aux_var)


class Beside(nn.BatchNorm2d):
    """Joins several samples along the channels, each with separate statistics."""

    def __init__(self, channels, parts=3):
        super().__init__(channels)
        self.parts = parts
        self.register_buffer("running_mean", torch.zeros(channels * parts))
        self.register_buffer("running_var", torch.ones(channels * parts))

    def forward(self, x):
        repeated = (vector.repeat(self.parts) for vector in (self.weight, self.bias))
        beside = x.view(-1, self.num_features * self.parts, *x.shape[2:])
        normalised = F.batch_norm(beside, self.running_mean, self.running_var, *repeated, training=self.training)
        return normalised.view_as(x)


class Hiding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.BatchNorm2d(CHANNELS, dtype=torch.float64)  # `named_children` hides it from `double()`

    def named_children(self):
        return iter(())

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("make", [lambda: WithAuxiliary(CHANNELS), lambda: Beside(CHANNELS), Hiding])
def test_a_model_is_synchronised(make):
    model = nn.Sequential(make()).double()
    assert is_whole(model)
    report = client.conversion_report(model)
    assert len(report.synchronised) == 1
    assert not report.left


class Listed(nn.Module):
    """Also keeps its layers in a plain list, which its `forward` uses."""

    def __init__(self):
        super().__init__()
        self.layers = []
        for number in range(2):
            layer = nn.BatchNorm2d(CHANNELS)
            setattr(self, f"layer{number}", layer)
            self.layers.append(layer)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_are_also_in_a_plain_list_are_converted_and_reverted_in_place():
    model = Listed()
    layers = list(model.layers)
    client.convert_model(model)
    assert model.layers == [model.layer0, model.layer1] == layers
    assert {type(layer) for layer in layers} == {client.SynchronizedBatchNorm2d}
    client.revert_model(model)
    assert model.layers == [model.layer0, model.layer1] == layers
    assert {type(layer) for layer in layers} == {nn.BatchNorm2d}


@pytest.mark.usefixtures("compiling")
def test_a_layer_that_is_compiled_alone_synchronises_after_conversion(monkeypatch):
    rounds = []
    monkeypatch.setattr(client.SynchronizedBatchNorm, "_normalise", lambda _, *given: rounds.append(given) or given[1])
    monkeypatch.setattr(client.SynchronizedBatchNorm, "_must_synchronise", lambda *_: True)
    model = nn.Sequential(torch.compile(nn.BatchNorm2d(CHANNELS), backend="eager"))
    client.convert_model(model)
    model(batch().float())
    assert rounds


class Tripled(client.synchronized_class(Activated)):
    def forward(self, x):
        return 3 * super().forward(x)


def test_micro_batches_are_refused_by_a_layer_that_updates_other_statistics_too():
    model = client.convert_model(nn.Sequential(WithAuxiliary(CHANNELS)), chunks=2)
    replicas = client.DataParallelWithCallback(model, device_ids=["cpu"] * 2)
    with pytest.raises(ConfigurationError, match="expected chunks=1: its forward updates other running statistics"):
        replicas(batch().float())


@pytest.mark.parametrize("kind", [WithAuxiliary, Beside])
def test_recalibration_measures_only_the_layers_own_statistics(kind):
    batches = [batch(), 3 * batch()]
    model = client.convert_model(nn.Sequential(kind(CHANNELS)).double())
    client.recalibrate(model, batches)
    parts = len(model[0].running_mean) // CHANNELS
    values = torch.cat(batches).view(-1, parts * CHANNELS, 9).movedim(1, 0).flatten(1)
    torch.testing.assert_close(model[0].running_mean, values.mean(1))
    torch.testing.assert_close(model[0].running_var, values.var(1))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda layer: pickle.loads(pickle.dumps(layer))])  # noqa: S301
def test_a_layer_of_a_class_derived_from_a_generated_one_keeps_its_class(copied):
    layer = Tripled(CHANNELS)
    layer.chunks = 2
    found = copied(layer)
    assert (type(found), found.chunks) == (Tripled, 2)
    assert torch.equal(found(batch().float()), layer(batch().float()))
    with pytest.warns(UserWarning, match="revert_model left 1 layer synchronised: '0' \\(Tripled\\)"):
        assert type(client.revert_model(nn.Sequential(found))[0]) is Tripled


def test_a_layer_parametrized_after_conversion_is_left_by_revert_and_named():
    model = client.convert_model(nn.Sequential(Activated(CHANNELS)))
    parametrizations.weight_norm(model[0])
    with pytest.warns(UserWarning, match="revert_model left 1 layer synchronised: '0'"):
        client.revert_model(model)
    model(batch().float())


class Registered(nn.BatchNorm2d):
    """Keeps a registry of its subclasses, which need a name."""

    known = {}

    def __init_subclass__(cls, *, name, **given):
        super().__init_subclass__(**given)
        Registered.known[name] = cls


class Named(Registered, name="named"):
    pass


def test_a_class_that_lists_its_subclasses_does_not_list_ours():
    model = client.convert_model(nn.Sequential(Named(CHANNELS)))
    assert isinstance(model[0], client.SynchronizedBatchNorm)
    assert Registered.known == {"named": Named}


class Wanting(type):
    """A metaclass that requires a keyword argument."""

    def __new__(cls, name, bases, body, *, kind):  # noqa: ARG004 - for `__init__`
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name, bases, body, *, kind):
        super().__init__(name, bases, body)
        cls.kind = kind


class Wanted(nn.BatchNorm2d, metaclass=Wanting, kind="one"):
    pass


def test_a_class_that_cannot_be_derived_from_is_left_and_named():
    model = nn.Sequential(Wanted(CHANNELS), nn.BatchNorm2d(CHANNELS))
    with pytest.warns(UserWarning, match="'0' \\(Wanted: no class can be derived from it: .*'kind'"):
        client.convert_model(model)
    report = client.conversion_report(model)
    assert report.synchronised == {"1": "SynchronizedBatchNorm2d"}
    assert list(report.left) == ["0"]
    model(batch().float())


class CallsTheFunctionHere(client.SynchronizedBatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)


with client.patch_sync_batchnorm():

    class MadeWhilePatched(nn.BatchNorm2d):
        def forward(self, x):
            return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)


@pytest.mark.parametrize("kind", [CallsTheFunctionHere, MadeWhilePatched])
def test_a_class_derived_from_ours_that_calls_torchs_batch_norm_is_named(kind):
    model = nn.Sequential(kind(CHANNELS))
    with pytest.warns(UserWarning, match=f"'0' \\({kind.__name__}: its forward calls torch's"):
        client.convert_model(model)
    assert list(client.conversion_report(model).left) == ["0"]


def test_a_layer_whose_class_gets_a_forward_after_the_conversion_is_reported():
    class Given(nn.BatchNorm2d):
        pass

    model = client.convert_model(nn.Sequential(Given(CHANNELS)))
    assert list(client.conversion_report(model).synchronised) == ["0"]
    Given.forward = CallsTheFunctionHere.forward
    assert list(client.conversion_report(model).left) == ["0"]


class CallsOurs(client.SynchronizedBatchNorm2d):
    def forward(self, x):
        return client.SynchronizedBatchNorm2d.forward(self, x).relu()


class CallsOursInTraining(client.SynchronizedBatchNorm2d):
    def forward(self, x):
        return super().forward(x) if self.training else F.batch_norm(x, self.running_mean, self.running_var)


class Written(client.SynchronizedBatchNorm2d):
    exec("def forward(self, x): return super(Written, self).forward(x)", {"__name__": None})  # noqa: S102


@pytest.mark.parametrize("kind", [CallsOurs, CallsOursInTraining, Written])
def test_a_class_derived_from_ours_that_calls_ours_is_synchronised(kind):
    report = client.conversion_report(client.convert_model(nn.Sequential(kind(CHANNELS))))
    assert report.synchronised == {"0": kind.__name__}


class Calling(nn.BatchNorm2d):
    def __call__(self, x):
        return normalise(self, x, self.running_mean, self.running_var)


def test_a_class_whose_calls_may_bypass_its_forward_is_left_and_named():
    with pytest.warns(UserWarning, match="'0' \\(Calling: it overrides __call__"):
        model = client.convert_model(nn.Sequential(Calling(CHANNELS)))
    assert type(model[0]) is Calling


@pytest.fixture
def conversions(monkeypatch):
    monkeypatch.setattr(conversion, "CONVERSIONS", dict(conversion.CONVERSIONS))


@pytest.mark.usefixtures("conversions")
def test_the_result_of_a_registered_conversion_stays_unchanged():
    client.register_conversion(nn.BatchNorm2d, lambda layer: nn.Sequential(layer, nn.BatchNorm2d(CHANNELS)))
    layer = nn.BatchNorm2d(CHANNELS)
    with pytest.warns(UserWarning, match="left 4 layers unsynchronised: '0.0' \\(BatchNorm2d: not converted"):
        model = client.convert_model(nn.Sequential(layer, nn.Identity(), layer, nn.BatchNorm2d(CHANNELS)))
    assert [type(child) for child in model[0]] == [nn.BatchNorm2d] * 2
    assert model[0] is model[2]
    assert model[0][0] is layer
    model(batch().float())


@pytest.mark.usefixtures("conversions")
def test_a_registered_conversion_may_call_convert_model():
    layers = []
    client.register_conversion(nn.BatchNorm2d, lambda layer: layers.append(layer) or client.convert_model(layer))
    model = client.convert_model(nn.Sequential(nn.BatchNorm2d(CHANNELS)))
    assert layers == [model[0]]
    assert type(model[0]) is client.SynchronizedBatchNorm2d


@pytest.mark.usefixtures("conversions")
def test_a_conversion_that_returns_no_module_is_reported():
    client.register_conversion(Activated, lambda _: None)
    model = nn.Sequential(nn.BatchNorm2d(CHANNELS), Activated(CHANNELS))
    with pytest.raises(TypeError, match="the conversion registered for Activated returned None, expected a module"):
        client.convert_model(model)
    assert model[0].layer_name == "0"
    model(batch().float())
