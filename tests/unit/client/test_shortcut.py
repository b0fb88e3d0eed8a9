"""Shortcut: a forward whose `F.batch_norm` comes to us directly computes what it computes by torch's way."""

import copy
import functools
import sys
import warnings
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

import client
from client.layers import adopted, interception
from client.layers.shortcut import copied_forward, plain_forward
from statsd_bn.errors import ConfigurationError
from support import forwards
from support.forwards import LikeTimms

WATCHED = {module.__file__ for module in (adopted, interception, copied_forward, plain_forward)}


class Again(nn.Module):
    """Normalises with the tensors of the layer that it is a part of."""

    def __init__(self, layer):
        super().__init__()
        self.layers = [layer]

    def forward(self, x):
        return forwards.normalised(self.layers[0], x.sin())


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(7, forwards.CHANNELS, 3, 2, generator=generator, dtype=torch.float64)


def pair(kind, change=lambda _: None):
    """A layer, and the same converted; `change` comes after the conversion."""
    whole, converted = kind(), client.convert_model(kind())
    for layer in (whole, converted):
        torch.manual_seed(1)
        nn.init.uniform_(layer.weight)
        nn.init.uniform_(layer.bias)
        change(layer)
    return whole, converted


def check_synchronised(whole, converted, *arguments):
    """Two ranks with other batches, in one process, compute what the whole batch does."""
    factors = batch(7)
    for seed in range(2):
        found = []
        for run in (whole, client.DataParallelWithCallback(converted, ["cpu"] * 4)):  # 2, 2, 2 and 1 samples
            x = batch(seed).requires_grad_()
            output = run(x, *arguments)
            (output * factors).sum().backward()
            found.append((output, x.grad))
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close([*converted.buffers()], [*whole.buffers()], rtol=1e-10, atol=1e-12)
    grads = [[parameter.grad for parameter in layer.parameters()] for layer in (converted, whole)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


@pytest.fixture
def by_torchs_way(monkeypatch):
    """Functions of torch that handed their call to a mode."""
    found, handle = [], F.handle_torch_function

    def note(function, *args, **kwargs):
        found.append(function)
        return handle(function, *args, **kwargs)

    monkeypatch.setattr(F, "handle_torch_function", note)
    return found


@pytest.mark.parametrize("kind", forwards.ALL)
def test_replicas_equal_the_whole_batch(kind):
    check_synchronised(*pair(kind))


@pytest.mark.parametrize(
    ("kind", "calls"), [(LikeTimms, 0), (forwards.Constant, 0), (forwards.Inside, 0), (forwards.Helping, 1)]
)
def test_only_calls_from_elsewhere_come_by_torchs_way(kind, calls, by_torchs_way):
    pair(kind)[1](batch())
    assert by_torchs_way.count(F.batch_norm) == calls


@pytest.fixture
def looked_at(monkeypatch):
    """Functions of torch that an interception was asked about."""
    found, look = [], interception.Interception.__torch_function__

    def note(mode, function, *args):
        found.append(function)
        return look(mode, function, *args)

    monkeypatch.setattr(interception.Interception, "__torch_function__", note)
    return found


class Careful(LikeTimms):
    """Looks at its input and its attributes."""

    def forward(self, x, times=1.0):
        if x.dim() != 4 or not isinstance(x.shape[1], int):
            raise ValueError(f"expected 4D input (got {x.dim()}D input)")
        in_training = True if self.training else (self.running_mean is None) and (self.running_var is None)
        eps = self.eps if len(x) > 0 else float(x.size(1))
        return F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            weight=self.weight,
            bias=self.bias,
            training=in_training,
            eps=eps * times,
        )


@pytest.mark.skipif(
    sys.version_info >= (3, 12) or plain_forward.compiler is None,
    reason="newer Pythons have steps that are not listed, and older torch does not say whether it compiles frames",
)
@pytest.mark.parametrize(
    ("kind", "behind"), [(LikeTimms, [F.relu]), (Careful, []), (forwards.Named, [torch.Tensor.mul])]
)
def test_nobody_looks_at_a_plain_beginning(kind, behind, looked_at):
    pair(kind)[1](batch())
    assert looked_at == behind


@pytest.mark.parametrize("kind", forwards.NOT_PLAIN)
def test_any_other_beginning_is_looked_at(kind, looked_at):
    pair(kind)[1](batch())
    assert looked_at


class Sometimes(LikeTimms):
    """Begins plainly, and need not come to `batch_norm`."""

    def forward(self, x):
        if x.size(0) > 7:
            return x
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


def test_what_comes_to_no_batch_norm_leaves_torchs_modes_as_they_are():
    _, converted = pair(Sometimes)
    with BaseTorchFunctionMode() as mode:
        for nr_samples in (7, 8):
            converted(torch.zeros(nr_samples, forwards.CHANNELS, 3, 2, dtype=torch.float64))
            assert interception.innermost() is mode
    assert all(one is None for one in plain_forward._waiting.values())


def test_a_plain_forward_that_comes_to_no_batch_norm_is_noted_in_training():
    _, converted = pair(Sometimes)
    x = torch.ones(8, forwards.CHANNELS, 3, 2, dtype=torch.float64)
    converted.eval()(x)
    assert not converted.is_unreached
    converted.train()(x)
    assert converted.is_unreached


def whiten(x):
    return F.batch_norm(x, None, None, training=True)


class Bare(nn.BatchNorm2d):
    """Has no tensors."""

    def __init__(self):
        super().__init__(forwards.CHANNELS, affine=False, track_running_stats=False)

    def forward(self, x):
        x = F.batch_norm(x, None, None, training=True)
        return whiten(x)


def test_a_second_batch_norm_without_tensors_behind_a_plain_beginning_is_told(caplog):
    class Whitening(LikeTimms):
        """A class of its own, since each is warned of once."""

    with_tensors = Whitening()
    with_tensors.act.forward = whiten
    for layer, told in ((with_tensors, "calls batch_norm without its tensors too"), (Bare(), "all are synchronised")):
        client.convert_model(layer)(batch())
        assert told in caplog.text


class LookedAt(LikeTimms):
    """The same, but that it does not begin plainly."""

    def forward(self, x):
        return super().forward(x.mul(1.0))


def in_recalibration(layer):
    layer(batch(2))
    client.recalibrate(layer, [batch(0), batch(1)])


def in_micro_batches(layer):
    layer.chunks = 2
    for seed in range(3):
        layer(batch(seed))


def in_a_checkpoint(layer):
    checkpoint(layer, batch().requires_grad_(), use_reentrant=False).sum().backward()


@pytest.mark.parametrize("run", [in_recalibration, in_micro_batches, in_a_checkpoint])
def test_a_plain_forward_counts_as_any_other(run):
    plain, looked_at = (client.convert_model(kind()) for kind in (LikeTimms, LookedAt))
    for layer in (plain, looked_at):
        run(layer)
    torch.testing.assert_close([*plain.buffers()], [*looked_at.buffers()], rtol=1e-12, atol=1e-12)


class OnceBefore(BaseTorchFunctionMode):
    """Runs something when a batch is counted for the first time."""

    def __init__(self, run):
        self.run = run

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.add_ and (run := self.run):
            self.run = None
            run()
        return super().__torch_function__(func, types, args, kwargs)


def test_a_mode_may_run_another_layer_in_a_plain_beginning(monkeypatch):
    outer, inner = client.convert_model(LikeTimms()), client.convert_model(LikeTimms())
    handed, normalise = [], type(outer)._normalise
    monkeypatch.setattr(type(outer), "_normalise", lambda of, *given: handed.append(of) or normalise(of, *given))
    with OnceBefore(lambda: inner(batch(1))):
        outer(batch())
    assert handed == [inner, outer]


def test_a_checkpoint_behind_a_plain_beginning_is_seen():
    _, converted = pair(LikeTimms)
    converted.act.forward = lambda x: checkpoint(forwards.normalised, converted, x, use_reentrant=False)
    with pytest.raises(ConfigurationError, match="checkpoints its call of batch_norm"):
        converted(batch().requires_grad_())


class Computed(LikeTimms):
    """Normalises where an attribute of it is read; `kept` is what."""

    @property
    def factor(self):
        return normalised_once(self)

    def __getitem__(self, _):
        return normalised_once(self)

    def forward(self, x):
        factor = self.factor
        return factor * F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


def normalised_once(layer):
    return forwards.normalised(layer, vars(layer)["kept"])


class ByAlias(Computed):
    def forward(self, x):
        layer = self
        factor = layer.factor
        return factor * F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class ByOperator(Computed):
    def forward(self, x):
        factor = self[0]
        return factor * F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class InTuple(Computed):
    shape = Computed.factor

    def forward(*both):
        layer = both[0]
        factor = layer.shape
        self, x = both
        return factor * F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


LAST = []


def of_last():
    return normalised_once(LAST[-1])


class ByGlobal(Computed):
    """A function that it calls knows the layer."""

    def forward(self, x):
        factor = of_last()
        return factor * F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class Normalising:
    """Normalises by the last layer where something is asked of it."""

    @property
    def momentum(self):
        return of_last()

    def size(self, _):
        return of_last()


HELPER = Normalising()


class ByEither(Computed):
    """Where two ways come together, what was loaded last is the layer."""

    def forward(self, x):
        factor = (HELPER if self.training else self).momentum
        return factor * F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class ByCall(Computed):
    """Calls what torch's layers do not."""

    def forward(self, x):
        factor = self.momentum(x)
        return factor * F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class ByArgument(Computed):
    """Gives its argument another value."""

    def forward(self, x):
        y = x
        x = HELPER
        factor = x.size(y)
        return factor * F.batch_norm(y, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class ByIndex(Computed):
    def forward(self, x):
        factor = ITEMS[0]
        return factor * F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class Items:
    def __getitem__(self, _):
        return of_last()


ITEMS = Items()


class OfChild(LikeTimms):
    """Has a child that computes an attribute with the layer."""

    class Child(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layers = [layer]

        @property
        def factor(self):
            return normalised_once(self.layers[0])

    def __init__(self):
        super().__init__()
        self.child = self.Child(self)

    def forward(self, x):
        factor = self.child.factor
        return factor * F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class OwnEps(nn.BatchNorm2d):
    """Begins plainly, but for classes that derive from it."""

    def __init__(self):
        super().__init__(forwards.CHANNELS, dtype=torch.float64)

    def forward(self, x):
        momentum = self.momentum
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, momentum=momentum
        )


class Overriding(OwnEps):
    """Computes what the class reads that it derives from."""

    @property
    def momentum(self):
        if "kept" in vars(self):
            normalised_once(self)
        return 0.1

    @momentum.setter
    def momentum(self, _):
        pass


class GettingAttributes(OwnEps):
    """Decides itself what its attributes are."""

    def __getattr__(self, name):
        if name == "weight" and (kept := vars(self).pop("kept", None)) is not None:
            forwards.normalised(self, kept)
        return super().__getattr__(name)


@pytest.mark.parametrize(
    "kind",
    [
        *(Computed, ByAlias, ByOperator, InTuple, ByGlobal, ByEither, ByCall, ByArgument, ByIndex, OfChild),
        *(Overriding, GettingAttributes),
    ],
)
def test_what_normalises_where_the_layer_is_read_is_synchronised(kind, monkeypatch):
    """A single replica, since what was kept is bound to this one layer."""
    converted = client.convert_model(kind())
    handed, normalise = [], converted._normalise
    monkeypatch.setattr(type(converted), "_normalise", lambda _, *given: handed.append(given) or normalise(*given))
    monkeypatch.setitem(globals(), "LAST", [converted])
    vars(converted)["kept"] = batch(1)
    if kind is ByCall:
        converted.momentum = lambda _: of_last()
    converted(batch())
    assert len(handed) == 2


def test_what_a_parametrization_normalises_by_the_layer_is_synchronised(monkeypatch):
    converted = client.convert_model(Plain())
    handed, normalise = [], converted._normalise
    monkeypatch.setattr(type(converted), "_normalise", lambda _, *given: handed.append(given) or normalise(*given))

    class Weight(nn.Module):
        def forward(self, weight):
            mean, variance = converted.running_mean, converted.running_var
            return weight * F.batch_norm(batch(1), mean, variance, None, None, True).mean((0, 2, 3))  # noqa: FBT003

    nn.utils.parametrize.register_parametrization(converted, "weight", Weight(), unsafe=True)
    handed.clear()
    converted(batch())
    assert len(handed) == 2


class Plain(nn.BatchNorm2d):
    def __init__(self):
        super().__init__(forwards.CHANNELS, dtype=torch.float64)

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class Doubled(Plain):
    """Does not begin plainly."""

    def forward(self, x):
        x = x.mul(1.0)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class Normalised(nn.Module):
    """Has another layer run where a parameter is read."""

    def __init__(self, layer):
        super().__init__()
        self.layers = [layer]

    def forward(self, weight):
        output = self.layers[0](weight.expand(2, -1).reshape(2, -1, 1, 1))
        return output.mean((0, 2, 3)) + weight


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("kind", [Plain, Doubled])
@pytest.mark.parametrize("is_hook", [True, False])
def test_another_layer_may_run_in_its_beginning(kind, is_training, is_hook, monkeypatch):
    outer, inner = client.convert_model(Plain()), client.convert_model(kind()).train(is_training)
    handed, normalise = [], type(outer)._normalise
    for one in {type(outer), type(inner)}:
        monkeypatch.setattr(one, "_normalise", lambda of, *given: handed.append(of) or normalise(of, *given))
    if is_hook:
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: (inner(t.detach()) if t.dim() == 4 else 0, t)[1], lambda t: t
        )
    else:
        nn.utils.parametrize.register_parametrization(outer, "weight", Normalised(inner))
        hooks = nullcontext()
    with hooks:
        outer(batch().requires_grad_())
    assert handed.count(outer) == 1
    assert handed.count(inner) > 0 or not is_training
    assert interception.innermost() is None
    assert all(one is None for one in plain_forward._waiting.values())


def test_what_a_module_does_not_have_yet_does_not_stop_the_conversion(monkeypatch):
    class Lazy(ModuleType):
        def __getattr__(self, name):
            raise ImportError(name)

    monkeypatch.setitem(globals(), "lazy", Lazy("lazy"))

    class Asking(LikeTimms):
        def forward(self, x):
            if self.momentum == 7.0:
                return lazy.fused(x)  # noqa: F821 - set above
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)

    check_synchronised(*pair(Asking))


class Without(Plain):
    def forward(self):
        return F.batch_norm(None, self.running_mean, self.running_var) if self.size() else None


class Loading(Plain):
    def forward(self, _):
        return F.batch_norm


@pytest.mark.parametrize("kind", [Without, Loading])
def test_a_forward_is_converted_whatever_it_does(kind):
    assert isinstance(client.convert_model(kind()), client.SynchronizedBatchNorm)


def _hook(layer):
    layer.act.register_forward_hook(lambda _, __, x: forwards.normalised(layer, x.sin()))


def _pre_hook(layer):
    layer.act.register_forward_pre_hook(lambda _, x: forwards.normalised(layer, x[0].sin()))


def _child(layer):
    layer.act = Again(layer)


def _function(layer):
    del layer.act
    layer.act = lambda x: forwards.normalised(layer, x.sin())


def _forward_of_child(layer):
    layer.act.forward = lambda x: forwards.normalised(layer, x.sin())


@pytest.mark.parametrize("change", [_hook, _pre_hook, _child, _function, _forward_of_child])
def test_what_it_calls_with_the_layers_tensors_is_synchronised(change, monkeypatch):
    """A single replica, since what was given is bound to this one layer."""
    _, converted = pair(LikeTimms, change)
    handed, normalise = [], converted._normalise
    monkeypatch.setattr(type(converted), "_normalise", lambda _, *given: handed.append(given) or normalise(*given))
    converted(batch())
    assert len(handed) == 2


@pytest.mark.parametrize("kind", [LikeTimms, forwards.Below, forwards.Twice])
def test_a_class_may_get_another_forward(kind, monkeypatch):
    def forward(self, x):
        return forwards.normalised(self, forwards.normalised(self, x).sin())

    whole, converted = pair(kind)
    converted(batch())
    whole(batch())
    monkeypatch.setattr(kind, "forward", forward)
    check_synchronised(whole, converted)


def test_a_class_without_a_forward_may_get_one(monkeypatch):
    class Derived(LikeTimms):
        pass

    whole, converted = pair(Derived)
    converted(batch())
    whole(batch())
    monkeypatch.setattr(Derived, "forward", lambda self, x: LikeTimms.forward(self, x) + 100)
    check_synchronised(whole, converted)


@pytest.mark.parametrize("kind", [LikeTimms, forwards.Constant])
def test_a_forward_may_get_another_code(kind, monkeypatch):
    """As a notebook's autoreload does."""

    def forward(self, x):
        return normalised(self, normalised(self, x).sin())  # noqa: F821 - a global of the other function

    whole, converted = pair(kind)
    monkeypatch.setattr(kind.forward, "__code__", forward.__code__)
    check_synchronised(whole, converted)


@pytest.mark.parametrize("kind", [forwards.WithDefault, forwards.WithDefaultAndMore])
@pytest.mark.parametrize(("name", "value"), [("__defaults__", (5.0,)), ("__kwdefaults__", {"plus": 1.0})])
def test_a_forward_may_get_other_defaults(kind, name, value, monkeypatch):
    whole, converted = pair(kind)
    monkeypatch.setattr(kind.forward, name, value)
    check_synchronised(whole, converted)


@pytest.mark.parametrize("kind", [LikeTimms, forwards.Below, forwards.Constant])
def test_a_name_may_get_another_meaning(kind, monkeypatch):
    whole, converted = pair(kind)
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return F.batch_norm(*args, **kwargs)

    monkeypatch.setattr(forwards, "F", SimpleNamespace(batch_norm=counted))
    check_synchronised(whole, converted)
    assert len(calls) == 2 + 2 * 4


def test_what_a_plain_beginning_calls_may_get_another_meaning(monkeypatch):
    converted = client.convert_model(Careful())
    handed, normalise = [], converted._normalise
    monkeypatch.setattr(type(converted), "_normalise", lambda _, *given: handed.append(given) or normalise(*given))
    with monkeypatch.context() as patched:
        patched.setitem(globals(), "len", lambda x: forwards.normalised(converted, x).shape[0])
        converted(batch())
    assert len(handed) == 2


@pytest.mark.parametrize("name", ["F", "functional"])
def test_one_of_two_names_may_get_another_meaning(name, monkeypatch):
    whole, converted = pair(forwards.TwoNames)
    monkeypatch.setattr(forwards, name, SimpleNamespace(batch_norm=F.batch_norm))
    check_synchronised(whole, converted)


@pytest.mark.parametrize("kind", [LikeTimms, forwards.Constant])
def test_a_profiler_that_comes_later_sees_each_call_as_it_was_made(kind, monkeypatch):
    whole, converted = pair(kind)
    calls, wrapped = [], F.batch_norm

    def counted(*args, **kwargs):
        calls.append((len(args), *kwargs))
        return wrapped(*args, **kwargs)

    monkeypatch.setattr(F, "batch_norm", counted)
    check_synchronised(whole, converted)
    assert calls == 10 * ([(5, "training", "momentum", "eps")] if kind is LikeTimms else [(6,)])


def test_a_profiler_that_came_before_us_is_not_taken_for_torch():
    assert copied_forward.torchs_own(F.batch_norm) is F.batch_norm
    assert copied_forward.torchs_own(functools.wraps(F.batch_norm)(lambda: None)) is None
    assert copied_forward.torchs_own(len) is None


def test_a_global_is_looked_up_when_it_is_used(monkeypatch):
    _, converted = pair(forwards.Constant)
    before = converted(batch())
    monkeypatch.setattr(forwards, "FACTOR", 3.0)
    torch.testing.assert_close(converted(batch()), before * 1.5)


def test_a_global_is_changed_in_its_module():
    before = forwards.nr_calls
    pair(forwards.Counting)[1](batch())
    assert forwards.nr_calls == before + 1


def test_a_warning_of_a_forward_is_one_of_its_module():
    class Warned(LikeTimms):
        def forward(self, x):
            warnings.warn("told", stacklevel=1)
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)

    _, converted = pair(Warned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=__name__)
        with pytest.raises(UserWarning, match="told"):
            converted(batch())


def test_nothing_is_left_of_a_call_that_raises():
    _, converted = pair(LikeTimms)
    with pytest.raises(AssertionError, match="expected 4D input"):
        converted(torch.zeros(3))
    assert interception.innermost() is None


@pytest.mark.parametrize("kind", [LikeTimms, forwards.Below])
def test_ctrl_c_leaves_torchs_modes_as_they_are(kind):
    """At each call in turn, as if the signal had come just then; but for the last one, which puts things right."""
    _, converted = pair(kind)
    x, nr_interrupted = batch(), 0
    with BaseTorchFunctionMode() as mode:
        while interrupted_at(nr_interrupted, converted, x):
            assert interception.innermost() is mode, f"step {nr_interrupted}"
            assert all(one is None for one in plain_forward._waiting.values()), f"step {nr_interrupted}"
            nr_interrupted += 1
    assert nr_interrupted > 5


def interrupted_at(step, layer, x):
    """Whether a call of a layer had so many calls of ours, at the last of which it was interrupted."""
    left = step

    def count(frame, event, _):
        nonlocal left
        if event == "call" and frame.f_code.co_filename in WATCHED and frame.f_code.co_name != "end":
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
        pair(Wrong)[1](batch())


@pytest.mark.parametrize(
    "kind", [LikeTimms, forwards.Below, forwards.Twice, forwards.Named, forwards.Helping, forwards.Constant]
)
def test_torch_compile_traces_the_original(kind):
    whole, converted = pair(kind)
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch()), whole(batch()))
    torch.testing.assert_close([*converted.buffers()], [*whole.buffers()])


def test_a_graph_that_breaks_by_a_value_stays_synchronised():
    """A cumulative average asks for the value of a tensor."""
    whole = LikeTimms(momentum=None)
    converted = client.convert_model(copy.deepcopy(whole))
    handed, normalise = [], converted._normalise
    with mock.patch.object(type(converted), "_normalise", lambda _, *given: handed.append(given) or normalise(*given)):
        compiled = torch.compile(converted, backend="aot_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(batch()), whole(batch()))
    assert handed


def test_a_graph_that_breaks_in_a_forward_stays_synchronised(monkeypatch):
    class Breaking(LikeTimms):
        def forward(self, x):
            torch._dynamo.graph_break()
            x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
            torch._dynamo.graph_break()
            return self.act(x)

    whole, converted = pair(Breaking)
    handed, normalise = [], type(converted)._normalise
    monkeypatch.setattr(type(converted), "_normalise", lambda *given: handed.append(given) or normalise(*given))
    compiled = torch.compile(converted, backend="aot_eager")
    with torch.no_grad():  # else torch warns of itself
        torch.testing.assert_close(compiled(batch()), whole(batch()))
    assert handed


def test_what_a_forward_hands_over_is_traced_to_our_operator():
    whole, converted = pair(LikeTimms)
    converted.chunks = 2
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch()), whole(batch()))
    converted.commit_running_statistics()
    torch.testing.assert_close([*converted.buffers()], [*whole.buffers()])


def test_a_forward_that_torch_compile_was_told_to_leave_out_stays_synchronised():
    whole, converted = pair(Plain)
    left_out = torch._dynamo.disable(converted.forward, recursive=False)
    compiled = torch.compile(lambda x: left_out(x).sin(), backend="aot_eager")
    handed, normalise = [], type(converted)._normalise
    counted = mock.patch.object(type(converted), "_normalise", lambda *given: handed.append(given) or normalise(*given))
    with counted, torch.no_grad():  # else torch warns of itself
        for seed in range(3):
            torch.testing.assert_close(compiled(batch(seed)), whole(batch(seed)).sin())
    assert handed
    assert not converted.is_unreached


def test_a_class_of_an_adopted_one_may_keep_its_mode_elsewhere():
    class Derived(type(client.convert_model(LikeTimms()))):
        @property
        def training(self):
            return vars(self).get("is_in_training", True)

        @training.setter
        def training(self, training):
            vars(self)["is_in_training"] = training

    layer = Derived()
    layer(batch())
    assert layer.num_batches_tracked == 1


def test_a_call_by_both_ways_leaves_nothing_behind():
    class Both(nn.BatchNorm2d):
        def forward(self, x):
            y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
            return y + super().forward(x.sin())

    layer = client.convert_model(Both(forwards.CHANNELS, dtype=torch.float64))
    before = set(vars(layer))
    layer(batch())
    assert set(vars(layer)) == before


def test_a_copy_that_torch_compile_comes_to_is_left_to_the_interpreter():
    whole = LikeTimms()
    copied = torch.compile(copied_forward.copied(LikeTimms.forward), backend="aot_eager")
    torch.testing.assert_close(copied(copy.deepcopy(whole), batch()), whole(batch()))
