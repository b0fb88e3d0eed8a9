"""The override of `batch_norm` in the `forward` of a subclass."""

import sys
from functools import partial
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode

import client
from client.nn import override, subclasses

CHANNELS = 4
WATCHED = {subclasses.__file__, override.__file__}


def normalised(layer, x):
    return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, layer.training)


class Plain(nn.BatchNorm2d):
    def __init__(self, momentum=0.1):
        super().__init__(CHANNELS, momentum=momentum, dtype=torch.float64)

    def forward(self, x):
        return normalised(self, x)


class LikeTimms(Plain):
    def __init__(self, momentum=0.1):
        super().__init__(momentum)
        self.drop = nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        x = F.batch_norm(x, *tensors, training=self.training, momentum=factor, eps=self.eps)
        return self.act(self.drop(x))


class Below(LikeTimms):
    """Calls the `forward` of its base class."""

    def forward(self, x):
        return super().forward(x) * 2


class Twice(LikeTimms):
    """Calls torch's operator in a list, then normalises again with the statistics that the first call moved."""

    def forward(self, x):
        tensors = self.weight, self.bias, self.running_mean, self.running_var
        options = {"momentum": 0.1, "eps": self.eps, "cudnn_enabled": False}
        (x,) = [torch.batch_norm(one, *tensors, training=self.training, **options) for one in [x]]
        return normalised(self, x.sin())


class Nested(LikeTimms):
    """Normalises an argument of its call of `batch_norm` by a nested call."""

    def forward(self, x):
        return F.batch_norm(x + normalised(self, x).sin(), self.running_mean, self.running_var, training=self.training)


class Computed(LikeTimms):
    """Also calls `batch_norm` in a property."""

    @property
    def factor(self):
        return normalised(self, torch.ones(7, CHANNELS, 3, 2, dtype=torch.float64)).sum() + 2

    def forward(self, x):
        factor = self.factor
        return normalised(self, x) * factor


class Annotated(torch.Tensor):
    """A subclass of Tensor, like MONAI's."""


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(7, CHANNELS, 3, 2, generator=generator, dtype=torch.float64)


def pair(kind):
    whole, converted = kind(), client.convert_model(kind())
    for layer in (whole, converted):
        torch.manual_seed(1)
        nn.init.uniform_(layer.weight)
        nn.init.uniform_(layer.bias)
    return whole, converted


def check_synchronised(whole, converted, given=torch.clone):
    """Four replicas of one process compute the result of the whole batch, in two steps."""
    factors = batch(7)
    for seed in range(2):
        found = []
        for run in (whole, client.DataParallelWithCallback(converted, ["cpu"] * 4)):  # 2, 2, 2 and 1 samples
            x = batch(seed).requires_grad_()
            output = run(given(x))
            (output * factors).sum().backward()
            found.append((output, x.grad))
        assert type(found[0][0]) is type(found[1][0])
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close([*converted.buffers()], [*whole.buffers()], rtol=1e-10, atol=1e-12)
    grads = [[parameter.grad for parameter in layer.parameters()] for layer in (converted, whole)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


@pytest.fixture
def layers(monkeypatch):
    found, normalise = [], client.SynchronizedBatchNorm._normalise
    monkeypatch.setattr(
        client.SynchronizedBatchNorm,
        "_normalise",
        lambda layer, *given: found.append(layer) or normalise(layer, *given),
    )
    return found


@pytest.mark.parametrize("kind", [LikeTimms, Below, Twice, Nested, Computed])
def test_replicas_equal_the_whole_batch(kind):
    check_synchronised(*pair(kind))


@pytest.mark.parametrize("kind", [Plain, LikeTimms, partial(nn.BatchNorm2d, CHANNELS, dtype=torch.float64)])
def test_subclasses_of_tensor_and_graphs_of_torch_fx_equal_the_whole_batch(kind):
    check_synchronised(*pair(kind), given=lambda x: x.as_subclass(Annotated))
    whole, converted = pair(kind)
    traced = torch.fx.symbolic_trace(nn.Sequential(converted))
    check_synchronised(whole, traced)
    traced.eval()
    torch.testing.assert_close(traced(batch(5)), whole.eval()(batch(5)))


def test_a_layer_that_calls_no_batch_norm_is_noted_in_training_only():
    class Sometimes(LikeTimms):
        def forward(self, x):
            return x if x.size(0) > 7 else super().forward(x)

    converted, x = client.convert_model(Sometimes()), torch.ones(8, CHANNELS, 3, 2, dtype=torch.float64)
    converted.eval()(x)
    assert not converted._bypassed
    converted.train()(x)
    assert converted._bypassed


class Again(nn.Module):
    """A submodule of a layer that normalises with the layer's tensors."""

    def __init__(self, layer):
        super().__init__()
        self.layers = [layer]

    def forward(self, x):
        return normalised(self.layers[0], x.sin())


def _hook(layer):
    layer.act.register_forward_hook(lambda _, __, x: normalised(layer, x.sin()))


def _child(layer):
    layer.act = Again(layer)


@pytest.mark.parametrize("change", [_hook, _child])
def test_calls_by_submodules_and_hooks_with_the_layers_tensors_are_synchronised(change, layers):
    converted = client.convert_model(LikeTimms())
    change(converted)
    converted(batch())
    assert layers == [converted] * 2


@pytest.mark.parametrize("is_training", [True, False])
def test_a_parametrization_may_run_another_layer(is_training, layers):
    outer, inner = client.convert_model(Plain()), client.convert_model(LikeTimms()).train(is_training)

    class Normalised(nn.Module):
        def forward(self, weight):
            return inner(weight.expand(2, -1).reshape(2, -1, 1, 1)).mean((0, 2, 3)) + weight

    nn.utils.parametrize.register_parametrization(outer, "weight", Normalised())
    layers.clear()
    outer(batch())
    assert layers == ([inner, outer] if is_training else [outer])
    assert _get_current_function_mode() is None


class OnceBefore(BaseTorchFunctionMode):
    """Calls `run` once, when a layer first counts a batch."""

    def __init__(self, run):
        self.run = run

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.add_ and (run := self.run):
            self.run = None
            run()
        return super().__torch_function__(func, types, args, kwargs)


def test_a_mode_of_the_users_may_run_another_layer(layers):
    outer, inner = client.convert_model(LikeTimms()), client.convert_model(LikeTimms())
    with OnceBefore(lambda: inner(batch(1))):
        outer(batch())
    assert layers == [inner, outer]


def test_a_call_that_raises_leaves_nothing_behind():
    converted = client.convert_model(LikeTimms())
    with pytest.raises(AssertionError, match="expected 4D input"):
        converted(torch.zeros(3))
    assert _get_current_function_mode() is None


class BothWays(Plain):
    """Calls `batch_norm`, and torch's `forward`, which conversion replaces by ours."""

    def forward(self, x):
        return normalised(self, x) + nn.BatchNorm2d.forward(self, x) + super(Plain, self).forward(x.sin())


def test_a_forward_that_normalises_in_both_ways_leaves_nothing_behind(layers):
    layer = client.convert_model(BothWays())
    before = set(vars(layer))
    layer(batch())
    assert set(vars(layer)) == before
    assert layers == [layer] * 3


@pytest.mark.parametrize("kind", [LikeTimms, Below, BothWays])
def test_ctrl_c_leaves_torchs_modes_as_they_are(kind):
    converted = client.convert_model(kind())
    x, nr_interrupted = batch(), 0
    with BaseTorchFunctionMode() as mode:
        while interrupted_at(nr_interrupted, converted, x):
            assert _get_current_function_mode() is mode, f"step {nr_interrupted}"
            nr_interrupted += 1
    assert nr_interrupted > 5


def interrupted_at(step, layer, x):
    """Interrupts `layer(x)` at function call number `step`, from 0, in the files WATCHED; returns whether it did."""
    left = step

    def count(frame, event, _):
        nonlocal left
        if event == "call" and frame.f_code.co_filename in WATCHED:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        layer(x)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_a_wrong_argument_is_a_type_error():
    class Wrong(LikeTimms):
        def forward(self, x):
            return F.batch_norm(x, self.running_mean, self.running_var, scale=self.weight)

    with pytest.raises(TypeError, match="scale"):
        client.convert_model(Wrong())(batch())


def test_a_graph_that_breaks_in_a_forward_stays_synchronised(layers):
    class Breaking(LikeTimms):
        def forward(self, x):
            torch._dynamo.graph_break()
            x = normalised(self, x)
            torch._dynamo.graph_break()
            return self.act(x)

    whole, converted = pair(Breaking)
    compiled = torch.compile(converted, backend="aot_eager")
    with torch.no_grad():  # with gradients torch itself warns
        torch.testing.assert_close(compiled(batch()), whole(batch()))
    assert layers


def test_a_forward_that_torch_compile_was_told_to_leave_out_stays_synchronised(layers):
    whole, converted = pair(Plain)
    # A copy, since torch marks the function and its code for good; torch 2.6 takes no bound method.
    left_out = torch._dynamo.disable(_copy(type(converted).forward), recursive=False)
    compiled = torch.compile(lambda x: left_out(converted, x).sin(), backend="aot_eager")
    with torch.no_grad():  # with gradients torch itself warns
        for seed in range(3):
            torch.testing.assert_close(compiled(batch(seed)), whole(batch(seed)).sin())
    assert layers
    assert not converted._bypassed


def _copy(function):
    return FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
