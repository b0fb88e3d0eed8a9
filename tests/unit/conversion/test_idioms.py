"""Idioms of users' code around batch norms, which torch's layers allow and a conversion must not break."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.nn.functional import batch_norm as normalised
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import client
from statsd_bn.errors import ConfigurationError
from support.subclasses import Activated

CHANNELS = 4


def batch():
    return torch.randn(6, CHANNELS, 3, 3, generator=torch.Generator().manual_seed(1))


class SuperOfItsClass(nn.BatchNorm2d):
    def forward(self, x):
        return super(self.__class__, self).forward(x).relu()


class SuperOfItsType(nn.BatchNorm2d):
    def train(self, mode=True):
        return super(type(self), self).train(mode)


@pytest.mark.parametrize(("kind", "method"), [(SuperOfItsClass, "forward"), (SuperOfItsType, "train")])
def test_a_class_whose_subclass_would_recurse_endlessly_is_left_and_named(kind, method):
    model = nn.Sequential(kind(CHANNELS))
    with pytest.warns(UserWarning, match=rf"'0' \({kind.__name__}: its {method} calls super\("):
        client.convert_model(model)
    model.train()(batch())


class MadeBySuperOfItsClass(nn.BatchNorm2d):
    def __init__(self, channels):
        super(self.__class__, self).__init__(channels)

    def forward(self, x):
        return super().forward(x) * len(self.__class__.__name__)

    def extra_repr(self):
        return f"{type(self).__name__}, {super().extra_repr()}"


def test_a_layer_whose_init_calls_super_of_its_class_is_synchronised():
    model = client.convert_model(nn.Sequential(MadeBySuperOfItsClass(CHANNELS)))
    assert list(client.conversion_report(model).synchronised) == ["0"]
    model(batch())


class ByAnotherName(nn.BatchNorm2d):
    def forward(self, x):
        return normalised(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class ByDefault(nn.BatchNorm2d):
    def __init__(self, channels, function=F.batch_norm):
        super().__init__(channels)
        self.function = function

    def forward(self, x):
        return self.function(x, self.running_mean, self.running_var, training=self.training)


class CheckpointsTorchsForward(nn.BatchNorm2d):
    def forward(self, x):
        return checkpoint(nn.BatchNorm2d.forward, self, x, use_reentrant=False)


def checkpointed(function):
    @functools.wraps(function)
    def wrapper(*args):
        return checkpoint(function, *args, use_reentrant=False)

    return wrapper


class CheckpointsByADecorator(nn.BatchNorm2d):
    @checkpointed
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)


class Checkpoints(nn.BatchNorm2d):
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)

    def inner(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=True)


class BelowOneThatCheckpoints(Checkpoints):
    def forward(self, x):
        return super().forward(x).relu()


class Unseen(nn.BatchNorm2d):
    """Gets the checkpoint function as an argument, so its code does not contain the name."""

    def __init__(self, channels, way):
        super().__init__(channels)
        self.way = way

    def forward(self, x):
        return self.way(lambda t: F.batch_norm(t, self.running_mean, self.running_var, training=self.training), x)


UNSEEN = [functools.partial(Unseen, way=functools.partial(checkpoint, use_reentrant=given)) for given in (False, True)]


@pytest.mark.parametrize("kind", [CheckpointsTorchsForward, CheckpointsByADecorator, BelowOneThatCheckpoints, *UNSEEN])
def test_a_forward_that_checkpoints_its_call_of_batch_norm_is_an_error_in_the_first_step(kind):
    model = client.convert_model(nn.Sequential(kind(CHANNELS)))
    with pytest.raises(ConfigurationError, match="layer '0': its forward checkpoints its call of batch_norm"):
        model(batch().requires_grad_())


def activated_again(x):
    return checkpoint(F.silu, x, use_reentrant=False)


class CheckpointsItsActivation(nn.BatchNorm2d):
    def forward(self, x):
        return activated_again(F.batch_norm(x, self.running_mean, self.running_var, training=self.training))


@pytest.mark.parametrize("kind", [ByAnotherName, ByDefault, CheckpointsItsActivation])
def test_a_call_of_batch_norm_by_any_name_is_synchronised(kind):
    model = client.convert_model(nn.Sequential(kind(CHANNELS)))
    client.DataParallelWithCallback(model, device_ids=["cpu"] * 2)(batch().requires_grad_())
    assert list(client.conversion_report(model).synchronised) == ["0"]
    torch.testing.assert_close(model[0].running_mean, batch().mean((0, 2, 3)) / 10)


class CheckpointsSuper(nn.BatchNorm2d):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_checkpoint_of_super_is_synchronised():
    model = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), CheckpointsSuper(CHANNELS)).double()
    whole = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS)).double()
    whole.load_state_dict(client.convert_model(model).state_dict())
    for one in (whole, client.DataParallelWithCallback(model, device_ids=["cpu"] * 2)):
        one(batch().double()).pow(3).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, whole[0].weight.grad)
    torch.testing.assert_close(model[1].running_var, whole[1].running_var)


def pruned():
    """A model with half of its channels removed by hand, and an unchanged `num_features`."""
    conv, norm = nn.Conv2d(CHANNELS, 2 * CHANNELS, 1), nn.BatchNorm2d(2 * CHANNELS)
    for module in (conv, norm):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.dim():
                setattr(module, name, nn.Parameter(tensor[::2]) if name in {"weight", "bias"} else tensor[::2])
    return nn.Sequential(conv, norm)


class Wider(nn.BatchNorm2d):
    """Joins pairs of samples along the channels, so its tensors are twice as long as `num_features`."""

    def __init__(self, channels):
        super().__init__(2 * channels)
        self.num_features = channels

    def forward(self, x):
        return super().forward(x.view(-1, 2 * self.num_features, *x.shape[2:])).view_as(x)


class OfDomains(nn.BatchNorm2d):
    """Has running statistics for each domain, and neither weight nor bias."""

    def __init__(self, channels):
        super().__init__(channels, affine=False)
        self.domain = 1
        for domain in range(2):
            self.register_buffer(f"mean{domain}", torch.zeros(channels))
            self.register_buffer(f"var{domain}", torch.ones(channels))

    def forward(self, x):
        mean, variance = getattr(self, f"mean{self.domain}"), getattr(self, f"var{self.domain}")
        return F.batch_norm(x, mean, variance, training=self.training)


@pytest.mark.parametrize(
    "make", [pruned, lambda: nn.Sequential(Wider(CHANNELS)), lambda: nn.Sequential(OfDomains(CHANNELS))]
)
def test_layers_with_several_statistics_or_a_wrong_num_features_are_synchronised(make):
    model = make().double()
    x = torch.cat([batch(), batch() + 1])[:8].double()
    whole, converted = copy.deepcopy(model), client.convert_model(model)
    found = client.DataParallelWithCallback(converted, device_ids=["cpu"] * 2)(x)
    torch.testing.assert_close(found, whole(x))
    torch.testing.assert_close(dict(converted.named_buffers()), dict(whole.named_buffers()))


def test_an_input_of_other_channels_than_the_tensors_have_is_refused():
    with pytest.raises(ValueError, match=f"expected {CHANNELS} channels, got 3"):
        client.convert_model(pruned())[1](batch()[:, :3])


class CompiledForward(nn.BatchNorm2d):
    @torch.compile(backend="eager")
    def forward(self, x):
        return super().forward(x)


@pytest.mark.usefixtures("compiling")
def test_a_forward_that_its_class_compiles_is_reported_as_synchronised(monkeypatch):
    monkeypatch.setattr(client.SynchronizedBatchNorm, "_normalise", lambda _, of, x, mask: x)  # noqa: ARG005 - as ours
    model = client.convert_model(nn.Sequential(CompiledForward(CHANNELS)))
    model(batch())
    assert list(client.conversion_report(model).synchronised) == ["0"]


class CompiledCall(nn.BatchNorm2d):
    @torch.compile(backend="eager", fullgraph=True)
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


@pytest.mark.usefixtures("compiling")
def test_a_call_of_batch_norm_that_its_class_compiles_is_compiled_whole():
    found = client.convert_model(nn.Sequential(CompiledCall(CHANNELS)))(batch())
    torch.testing.assert_close(found, nn.BatchNorm2d(CHANNELS)(batch()))


class Failing(nn.BatchNorm2d):
    def forward(self, x):
        raise KeyError(super().forward(x).shape)


def test_a_call_that_failed_leaves_nothing_behind_in_a_reverted_layer():
    model = client.convert_model(nn.Sequential(Failing(CHANNELS)))
    with pytest.raises(KeyError):
        model(batch())
    assert vars(client.revert_model(model)[0]).keys() == vars(Failing(CHANNELS)).keys()


class MadeByName(nn.BatchNorm2d):
    def __init__(self, channels):
        nn.BatchNorm2d.__init__(self, channels)


def test_a_class_whose_init_calls_torchs_class_by_name_makes_synchronised_layers():
    layer = client.synchronized_class(MadeByName)(CHANNELS)
    torch.testing.assert_close(layer(batch()), nn.BatchNorm2d(CHANNELS)(batch()))


def test_a_parametrized_layer_with_micro_batches_is_copied():
    model = client.convert_model(nn.Sequential(nn.BatchNorm2d(CHANNELS)), chunks=2)
    parametrizations.weight_norm(model[0])
    model(batch())
    copied = copy.deepcopy(model)
    assert copied[0].chunks == 2
    for one in (model, copied):
        one(batch())
    assert (model[0].num_batches_tracked, copied[0].num_batches_tracked) == (1, 0)


def test_a_layer_whose_forward_was_wrapped_after_conversion_is_left_by_revert_and_named():
    model = client.convert_model(nn.Sequential(Activated(CHANNELS)))
    model[0].forward = functools.partial(lambda forward, x: 2 * forward(x), model[0].forward)
    with pytest.warns(UserWarning, match="revert_model left 1 layer synchronised: '0' .*with its own forward"):
        client.revert_model(model)
    model(batch())
    del model[0].forward
    assert type(client.revert_model(model)[0]) is Activated


@pytest.mark.parametrize("function", [client.convert_model, client.revert_model, client.conversion_report])
@pytest.mark.parametrize("given", [None, nn.BatchNorm2d, [nn.BatchNorm2d(CHANNELS)]])
def test_a_value_other_than_a_module_is_refused(function, given):
    with pytest.raises(TypeError, match="expected a module, got "):
        function(given)


class LoadedByNames(nn.BatchNorm2d):
    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        lists = {"missing_keys": missing_keys, "unexpected_keys": unexpected_keys, "error_msgs": error_msgs}
        named = {"state_dict": state_dict, "prefix": prefix, "local_metadata": local_metadata, "strict": strict}
        super()._load_from_state_dict(**named, **lists)


def test_a_class_that_loads_its_state_by_keyword_arguments_still_does():
    model = client.convert_model(nn.Sequential(LoadedByNames(CHANNELS)))
    model.load_state_dict({name: 3 * value for name, value in model.state_dict().items()})
    assert model[0].weight.tolist() == [3] * CHANNELS


class WithAuxiliary(nn.BatchNorm2d):
    """Contains another layer, with the same weight and bias."""

    def __init__(self, channels):
        super().__init__(channels)
        self.auxiliary = nn.BatchNorm2d(channels)
        self.auxiliary.weight, self.auxiliary.bias = self.weight, self.bias

    def forward(self, x):
        return super().forward(x) + self.auxiliary(x.square())


def test_a_layer_inside_another_with_a_shared_weight_is_separate():
    model = client.convert_model(nn.Sequential(WithAuxiliary(CHANNELS)), chunks=2)
    for _ in range(2):
        model(batch())
    assert (model[0].num_batches_tracked, model[0].auxiliary.num_batches_tracked) == (1, 1)


class MovesApart(nn.BatchNorm2d):
    """Updates its running statistics in one `batch_norm`, and normalises in another one without its tensors."""

    def forward(self, x):
        F.batch_norm(x.detach(), self.running_mean, self.running_var, training=self.training)
        return F.batch_norm(x, None, None, training=True)


def test_a_call_without_tensors_next_to_a_call_with_tensors_is_reported(caplog):
    model = client.convert_model(nn.Sequential(MovesApart(CHANNELS)))
    for _ in range(2):
        model(batch())
    messages = [record.getMessage() for record in caplog.records if record.name == "statsd_bn.client"]
    assert len(messages) == 1
    assert "layer '0': the forward of MovesApart also calls batch_norm without the layer's tensors" in messages[0]


@pytest.mark.parametrize("given", [nn.BatchNorm2d(CHANNELS), nn.InstanceNorm2d, None])
def test_a_class_other_than_a_batch_norm_is_refused(given):
    with pytest.raises(TypeError, match=r"expected a subclass of nn\.BatchNorm1d"):
        client.synchronized_class(given)


@pytest.mark.parametrize("in_replicas", [False, True])
def test_only_layers_whose_forward_does_not_normalise_with_their_tensors_are_named(in_replicas, caplog):
    class SlicedIfTold(nn.BatchNorm2d):
        is_sliced = False

        def forward(self, x):
            if not self.is_sliced:
                return super().forward(x)
            first = [tensor[:2] for tensor in (self.running_mean, self.running_var, self.weight, self.bias)]
            return F.batch_norm(x[:, :2], *first, self.training, self.momentum, self.eps)

    model = client.convert_model(nn.Sequential(SlicedIfTold(CHANNELS), SlicedIfTold(CHANNELS)))
    model[1].is_sliced = True
    run = client.DataParallelWithCallback(model, device_ids=["cpu", "cpu"]) if in_replicas else model
    run(batch())
    report = client.conversion_report(model)
    assert list(report.synchronised) == ["0"]
    ((path, (_, reason)),) = report.left.items()
    assert (path, reason) == ("1", "its forward did not call batch_norm in training")
    assert any("layer '1' not synchronised: the forward of " in text for text in caplog.messages)


class Recomputing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            (x,) = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
            return None, torch.autograd.grad(ctx.function(x), x, grad)[0]


class RecomputingApart(torch.autograd.Function):
    """Like `Recomputing`, with `setup_context` in place of a `ctx` argument of `forward`."""

    @staticmethod
    def forward(function, x):
        return function(x)

    @staticmethod
    def setup_context(ctx, inputs, output):  # noqa: ARG004 - torch's signature
        ctx.function, x = inputs
        ctx.save_for_backward(x)

    backward = staticmethod(Recomputing.backward)


@pytest.mark.parametrize("function", [Recomputing, RecomputingApart])
def test_a_call_within_an_autograd_function_is_an_error_when_it_runs(function):
    model = client.convert_model(nn.Sequential(Unseen(CHANNELS, function.apply)))
    with pytest.raises(ConfigurationError, match=r"layer '0': its forward calls batch_norm in an autograd\.Function"):
        model(batch().requires_grad_())
    with torch.no_grad():
        model(batch())


class RecordingInside(torch.autograd.Function):
    """Records a graph in its forward, and runs autograd on it in its backward."""

    @staticmethod
    def forward(ctx, function, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.output = function(ctx.x)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, grad):
        return None, torch.autograd.grad(ctx.output, ctx.x, grad)[0]


def test_a_call_in_an_autograd_function_that_records_its_own_graph_is_not_refused():
    x = batch().requires_grad_()
    whole = Unseen(CHANNELS, lambda function, x: function(x))
    model = client.convert_model(nn.Sequential(Unseen(CHANNELS, RecordingInside.apply)))
    for run in (model, whole):
        run(x).sin().sum().backward()
        x.grad, before = None, x.grad
    torch.testing.assert_close(before, torch.autograd.grad(model(x).sin().sum(), x)[0])


def test_a_layer_may_be_called_within_an_autograd_function():
    layer = client.convert_model(Unseen(CHANNELS, lambda function, x: function(x)))
    x = batch().requires_grad_()
    Recomputing.apply(layer, x).square().sum().backward()
    assert x.grad is not None


class Frozen(Unseen):
    def forward(self, x):
        return self.way(lambda t: F.batch_norm(t, self.running_mean, self.running_var), x)


def test_a_checkpoint_around_fixed_statistics_is_allowed():
    way = functools.partial(checkpoint, use_reentrant=False)
    model = client.convert_model(nn.Sequential(Frozen(CHANNELS, way)))
    torch.testing.assert_close(model(batch()), nn.BatchNorm2d(CHANNELS).eval()(batch()), atol=1e-4, rtol=1e-4)


def without_gradients(function, x):
    with torch.no_grad():
        return function(x) + x


def on_the_host(function, x):
    with torch.autograd.graph.save_on_cpu():
        return function(x)


@pytest.mark.parametrize("way", [without_gradients, on_the_host])
def test_no_grad_and_hooks_for_saved_tensors_are_not_taken_for_a_checkpoint(way):
    model = client.convert_model(nn.Sequential(Unseen(CHANNELS, way)))
    run = client.DataParallelWithCallback(model, device_ids=["cpu", "cpu"])
    whole = nn.Sequential(Unseen(CHANNELS, way))
    torch.testing.assert_close(run(batch()), whole(batch()))
    assert list(client.conversion_report(model).synchronised) == ["0"]


def test_a_layer_with_its_own_forward_may_be_checkpointed_as_a_whole():
    model = client.convert_model(nn.Sequential(Unseen(CHANNELS, lambda function, x: function(x))))
    x = batch().requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    assert x.grad is not None


class Passing(nn.BatchNorm2d):
    is_passing = True

    def forward(self, x):
        if self.is_passing:
            return x
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)


def test_a_layer_that_bypasses_batch_norm_is_named_by_its_new_name_too():
    part, other = nn.Sequential(Passing(CHANNELS)), nn.Sequential(Passing(CHANNELS))
    client.convert_model(part)(batch())
    other[0].is_passing = False
    client.convert_model(other)(batch())
    assert list(client.conversion_report(other).synchronised) == ["0"]
    whole = nn.ModuleDict({"body": part})
    with pytest.warns(UserWarning, match="'body.0' .Passing: its forward did not call batch_norm in training"):
        client.convert_model(whole)
    assert list(client.conversion_report(whole).left) == ["body.0"]


class Closed(nn.BatchNorm2d):
    """Accepts no new attributes after its construction."""

    def __init__(self, channels):
        super().__init__(channels)
        vars(self)["is_closed"] = True

    def __setattr__(self, name, value):
        if "is_closed" in vars(self) and name not in {*vars(self), *self._parameters, *self._buffers}:
            raise RuntimeError(f"{name} is unknown")
        super().__setattr__(name, value)


def test_a_class_that_accepts_no_new_attributes_is_converted_and_reverted():
    model = nn.Sequential(Closed(CHANNELS))
    attributes = {*vars(model[0])}
    client.convert_model(model)(batch())
    assert list(client.conversion_report(model).synchronised) == ["0"]
    assert type(client.revert_model(model)[0]) is Closed
    assert vars(model[0]).keys() == attributes
