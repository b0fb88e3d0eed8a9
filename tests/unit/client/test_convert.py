"""convert_model keeps tensors and attributes, revert_model is its inverse, patch_sync_batchnorm ends with its block."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import client
from client import DataParallelWithCallback
from client.nn.conversion import ConversionReport
from client.transports.process_group import NamedProcessGroup
from statsd_bn.errors import ConfigurationError
from support.newer_torch import needs
from support.sentences import says

TWINS = {
    nn.BatchNorm1d: client.SynchronizedBatchNorm1d,
    nn.BatchNorm2d: client.SynchronizedBatchNorm2d,
    nn.BatchNorm3d: client.SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: client.SynchronizedBatchNorm,
    nn.LazyBatchNorm1d: client.LazySynchronizedBatchNorm1d,
    nn.LazyBatchNorm2d: client.LazySynchronizedBatchNorm2d,
    nn.LazyBatchNorm3d: client.LazySynchronizedBatchNorm3d,
}


class Special(nn.BatchNorm2d):
    """A user's subclass of torch's layer."""


class OurSpecial(client.SynchronizedBatchNorm2d):
    """A user's subclass of our layer."""


class SpecialParallel(nn.DataParallel):
    """A user's subclass of torch's wrapper."""


class Identity(nn.Module):
    def forward(self, weight):
        return weight


class Group:
    def __repr__(self):
        return "<the left half>"


def model():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5)),
        nn.ModuleDict({"volume": nn.BatchNorm3d(2)}),
    )


def everything():
    """A layer of each kind, in nested containers; one layer is used twice, and two are under wrappers."""
    shared = nn.BatchNorm2d(4)
    lists = nn.ModuleList([nn.ModuleDict({"a": nn.Sequential(nn.BatchNorm1d(3), shared)}), nn.SyncBatchNorm(3)])
    lazy = nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyBatchNorm2d(), nn.LazyBatchNorm3d())
    others = nn.Sequential(nn.InstanceNorm2d(4), nn.GroupNorm(2, 4), nn.LazyInstanceNorm1d())
    parallel = nn.DataParallel(nn.Sequential(nn.BatchNorm3d(2), nn.DataParallel(nn.BatchNorm1d(2))))
    return nn.ModuleDict({"lists": lists, "lazy": lazy, "others": others, "parallel": parallel, "again": shared})


def kinds(module):
    return [type(layer) for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def names(module):
    return [layer.layer_name for layer in module.modules() if hasattr(layer, "layer_name")]


def anatomy(module):
    """What an exact inverse must restore: structure, types, attributes, and the identity of tensors and hooks."""
    return [
        (
            place,
            type(layer),
            set(vars(layer)),
            {name: id(tensor) for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]},
            [id(getattr(layer, hooks)) for hooks in vars(layer) if hooks.endswith("_hooks")],
            layer.training,
        )
        for place, layer in module.named_modules(remove_duplicate=False)
    ]


def test_every_kind_is_converted_in_nested_containers_and_nothing_else():
    original = everything()
    others = list(original["others"])
    converted = client.convert_model(original)
    assert converted is original
    assert kinds(converted) == [TWINS[kind] for kind in kinds(everything())]
    assert list(converted["others"]) == others
    assert [type(layer) for layer in others] == [nn.InstanceNorm2d, nn.GroupNorm, nn.LazyInstanceNorm1d]
    expected = ["lists.0.a.0", "lists.0.a.1", "lists.1", "lazy.0", "lazy.1", "lazy.2", "parallel.0", "parallel.1"]
    assert names(converted) == expected


def test_a_load_state_dict_pre_hook_receives_the_converted_or_reverted_module():
    """Torch keeps a weak reference to the hook's module, and the converted model does not keep the old module."""
    modules = []
    holder = nn.Sequential(nn.DataParallel(nn.BatchNorm1d(3)))
    holder[0].register_load_state_dict_pre_hook(lambda module, *_: modules.append(module))
    old = weakref.ref(holder[0])
    converted = client.convert_model(holder)
    gc.collect()
    assert old() is None
    converted.load_state_dict(converted.state_dict())
    reverted = client.revert_model(copy.deepcopy(converted))
    reverted.load_state_dict(converted.state_dict())
    assert modules == [converted[0], reverted[0]]


@pytest.mark.parametrize("wrap", [lambda layer: layer, nn.DataParallel], ids=["bare", "wrapped"])
@pytest.mark.parametrize("plain", [nn.BatchNorm1d, nn.LazyBatchNorm1d])
def test_a_batch_norm_by_itself_is_named_by_its_class(wrap, plain):
    layer = wrap(plain(*[3] if plain is nn.BatchNorm1d else []))
    assert names(client.convert_model(layer)) == ["SynchronizedBatchNorm1d"]


def test_layers_inside_a_batch_norm_are_converted():
    old = nn.BatchNorm2d(4)
    old.inner = nn.BatchNorm1d(3)
    converted = client.convert_model(old)
    assert kinds(converted) == [client.SynchronizedBatchNorm2d, client.SynchronizedBatchNorm1d]
    assert kinds(client.revert_model(converted)) == [nn.BatchNorm2d, nn.BatchNorm1d]


def test_layers_that_cannot_be_converted_are_left_and_reported_in_one_warning():
    special, parallel = Special(4), SpecialParallel(nn.BatchNorm1d(3))
    special.inner = nn.BatchNorm1d(3)
    parametrized = nn.BatchNorm2d(4)
    parametrize.register_parametrization(parametrized, "weight", Identity())
    stem = nn.ModuleDict({"special": special, "ours": OurSpecial(4), "parametrized": parametrized})
    given = nn.Sequential(nn.InstanceNorm2d(4), stem, parallel)
    with pytest.warns(UserWarning, match="unsynchronised") as reports:
        converted = client.convert_model(given)
    (report,) = reports
    message = str(report.message)
    assert report.filename == __file__
    assert "left 2 layers unsynchronised: '1.parametrized' (ParametrizedBatchNorm2d: parametrized; " in message
    assert "'2' (SpecialParallel: a subclass of nn.DataParallel)" in message
    assert (converted[1]["special"], converted[1]["parametrized"], converted[2]) == (special, parametrized, parallel)
    assert type(parametrized).__name__ == "ParametrizedBatchNorm2d"
    assert type(special.inner) is type(parallel.module) is client.SynchronizedBatchNorm1d
    assert names(converted) == ["1.special", "1.special.inner", "1.ours", "2"]


def test_a_subclass_of_a_lazy_layer_is_reported():
    class Lazy(nn.LazyBatchNorm1d):
        pass

    with pytest.warns(UserWarning, match=r"'0' \(.*Lazy: it is lazy; run one batch"):
        assert type(client.convert_model(nn.Sequential(Lazy()))[0]) is Lazy


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # from torch.compile
@pytest.mark.parametrize("bind", [lambda layer: setattr(layer, "forward", layer.forward), nn.Module.compile])
@pytest.mark.parametrize("plain", [nn.BatchNorm1d, nn.LazyBatchNorm1d])
def test_an_own_forward_is_reported_since_it_would_bypass_ours(plain, bind):
    old = plain(*[3] if plain is nn.BatchNorm1d else [])
    bind(old)
    with pytest.warns(UserWarning, match=r"'0' \((Lazy)?BatchNorm1d: compiled, or its forward was replaced; "):
        converted = client.convert_model(nn.Sequential(old))
    assert converted[0] is old
    assert type(old) is plain


def test_a_patched_subclass_of_data_parallel_is_not_reported():
    parallel = SpecialParallel(nn.BatchNorm1d(3))
    client.patch_replication_callback(parallel)
    assert client.convert_model(parallel) is parallel
    assert type(parallel.module) is client.SynchronizedBatchNorm1d


def test_data_parallel_is_replaced_wherever_it_is():
    old = nn.DataParallel(model())
    calls = []
    old.register_forward_hook(lambda *_: calls.append("hook"))
    old.eval()
    converted = client.convert_model(nn.Sequential(old))[0]
    assert type(converted) is DataParallelWithCallback
    assert type(old) is nn.DataParallel
    assert kinds(converted) == kinds(client.convert_model(model()))
    assert names(converted) == ["0.1", "0.2.2", "0.3.volume"]
    assert not converted.training
    assert type(client.convert_model(nn.DataParallel(model()))) is DataParallelWithCallback
    converted.module = nn.Identity()
    converted(torch.ones(2))
    assert calls == ["hook"]


def test_names_do_not_depend_on_wrappers():
    wrapped = DataParallelWithCallback(model(), ["cpu"] * 2)
    converted = client.convert_model(wrapped)
    assert converted is wrapped
    assert names(converted) == ["1", "2.2", "3.volume"]
    deep = nn.Sequential(nn.DataParallel(nn.ModuleDict({"module": nn.DataParallel(nn.Sequential(nn.BatchNorm1d(2)))})))
    assert names(client.convert_model(deep)) == ["0.module.0"]


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel_is_converted_in_place_and_absent_from_layer_names():
    for wrap, bare in ((lambda each: each, model), (nn.Sequential, lambda: nn.Sequential(model()))):
        inner = model()
        distributed = nn.parallel.DistributedDataParallel(inner)
        converted = client.convert_model(wrap(distributed))
        assert distributed.module is inner
        assert names(converted) == names(client.convert_model(bare()))
        assert kinds(converted) == kinds(client.convert_model(model()))
        assert kinds(client.revert_model(converted)) == kinds(model())
    alone = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(3))
    assert client.convert_model(alone) is alone
    assert type(alone.module) is client.SynchronizedBatchNorm1d


def test_every_converted_layer_keeps_its_first_group():
    group = client.Group("left", 2)
    converted = client.convert_model(everything(), group=group)
    layers = [layer for layer in converted.modules() if hasattr(layer, "layer_name")]
    assert {layer.group for layer in layers} == {group}
    client.convert_model(converted, group=client.Group("another", 2))
    client.convert_model(converted)
    assert {layer.group for layer in layers} == {group}
    assert client.convert_model(client.SynchronizedBatchNorm1d(3), group=group).group is group
    assert client.convert_model(nn.BatchNorm1d(3)).group is None


def test_sync_batch_norm_takes_any_input_of_two_dimensions_or_more():
    converted = client.convert_model(nn.Sequential(nn.SyncBatchNorm(4)))
    assert type(converted[0]) is client.SynchronizedBatchNorm
    parallel = DataParallelWithCallback(converted, ["cpu"] * 2)
    for plain, shape in ((nn.BatchNorm1d, ()), (nn.BatchNorm2d, (2, 3)), (nn.BatchNorm3d, (2, 1, 2))):
        x = torch.randn(6, 4, *shape)
        torch.testing.assert_close(parallel(x), plain(4)(x))
    with pytest.raises(ValueError, match=r"expected at least 2D input \(got 1D input\)"):
        converted(torch.ones(4))
    reverted = client.revert_model(converted)[0]
    assert type(reverted) is nn.SyncBatchNorm
    assert vars(reverted).keys() == vars(nn.SyncBatchNorm(4)).keys()


def test_a_process_group_is_refused_before_anything_is_changed():
    head = nn.Sequential(nn.SyncBatchNorm(3, process_group=Group()))
    given = nn.ModuleDict({"stem": nn.BatchNorm1d(3), "head": head})
    before = anatomy(given)
    with pytest.raises(ValueError, match="got <the left half>"):
        client.convert_model(given)
    assert anatomy(given) == before


@pytest.mark.usefixtures("process_group")
def test_a_group_of_another_size_with_the_name_of_a_destroyed_one_is_refused():
    group = torch.distributed.new_group([0])
    converted = client.convert_model(nn.BatchNorm1d(3), process_group=group)
    converted.group = NamedProcessGroup(converted.group.name, 3)
    with pytest.raises(ConfigurationError, match=r"1 ranks now,\s+3 when the layer was converted"):
        converted(torch.randn(4, 3))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("given", [{}, {"group": "local"}, {"process_group": "all"}])
def test_revert_restores_a_layers_process_group_whatever_group_it_was_converted_to(given):
    group = torch.distributed.group.WORLD
    given = {name: group if value == "all" else value for name, value in given.items()}
    converted = client.convert_model(nn.Sequential(nn.SyncBatchNorm(3, process_group=group)), **given)
    assert converted[0].group == given.get("group", NamedProcessGroup(group.group_name, 1))
    copied = copy.deepcopy(converted)
    assert client.revert_model(copied)[0].process_group is group
    assert converted[0].process_group is (None if "group" in given else group)


@pytest.mark.usefixtures("process_group")
def test_a_pickle_of_a_layer_over_a_process_group_does_not_name_client_transports():
    layer = client.convert_model(nn.BatchNorm1d(3), process_group=torch.distributed.new_group())
    pickled = pickle.dumps(layer)
    assert b"client.transports" not in pickled
    assert pickle.loads(pickled).group == layer.group  # noqa: S301 - written here


@pytest.mark.usefixtures("process_group")
def test_a_reverted_layer_keeps_the_process_group_that_conversion_was_given():
    group = torch.distributed.group.WORLD
    converted = client.convert_model(nn.Sequential(nn.SyncBatchNorm(3)), process_group=group)
    assert converted[0].process_group is group
    assert client.revert_model(converted)[0].process_group is group


@pytest.mark.parametrize("ours", TWINS.values())
def test_convert_sync_batchnorm_of_our_layers_converts_too(ours):
    converted = ours.convert_sync_batchnorm(everything(), None)
    assert kinds(converted) == [TWINS[kind] for kind in kinds(everything())]
    with pytest.raises(ValueError, match="got <the left half>"):
        ours.convert_sync_batchnorm(everything(), process_group=Group())


@pytest.mark.parametrize("options", [{}, {"affine": False, "track_running_stats": False}], ids=str)
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm, Special])
def test_torchs_converter_leaves_synchronised_layers_as_they_are(kind, options):
    model = client.convert_model(nn.ModuleDict({"deep": nn.Sequential(nn.Conv2d(1, 3, 1), kind(3, **options))}))
    ours = model["deep"][1]
    model["new"] = nn.BatchNorm2d(3)
    with pytest.warns(UserWarning, match=r"does not convert synchronised layers[.] .* client.revert_model"):
        assert nn.SyncBatchNorm.convert_sync_batchnorm(model)["deep"][1] is ours
    assert type(model["new"]) is nn.SyncBatchNorm
    model["deep"][1] = by_hand = nn.SyncBatchNorm(3)
    assert model["deep"][1] is by_hand
    reverted = nn.SyncBatchNorm.convert_sync_batchnorm(client.revert_model(nn.Sequential(ours)))
    assert type(reverted[0]) is nn.SyncBatchNorm


def test_convert_sync_batchnorm_of_our_layers_reports_at_the_callers_line():
    parallel = SpecialParallel(nn.BatchNorm1d(3))
    with pytest.warns(UserWarning, match="SpecialParallel") as reports:
        client.SynchronizedBatchNorm2d.convert_sync_batchnorm(parallel)
    assert reports[0].filename == __file__


def test_converting_twice_changes_nothing():
    once = client.convert_model(everything())
    before, layers, called = anatomy(once), list(once.modules()), names(once)
    assert client.convert_model(once) is once
    assert (anatomy(once), list(once.modules()), names(once)) == (before, layers, called)


def test_a_reverted_model_is_scripted_and_traced_as_before():
    converted = client.convert_model(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))).eval()
    reverted = client.revert_model(copy.deepcopy(converted))
    x = torch.randn(2, 2, 4, 4)
    torch.testing.assert_close(torch.fx.symbolic_trace(reverted)(x), converted(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.testing.assert_close(torch.jit.script(reverted)(x), converted(x))


def test_revert_is_the_exact_inverse():
    original = everything()
    original["lists"][0].eval()
    original["again"].bias.requires_grad_(requires_grad=False)
    before, modules = anatomy(original), dict(original.named_modules())
    converted = client.convert_model(original)
    assert anatomy(converted) != before
    reverted = client.revert_model(converted)
    assert reverted is original
    assert anatomy(reverted) == before
    assert reverted["again"] is reverted["lists"][0]["a"][1]
    after = dict(reverted.named_modules())
    replaced = {place for place in modules if after[place] is not modules[place]}
    assert replaced == {"parallel", "parallel.module.1"}, "only the wrappers"


def test_while_patched_a_synchronised_layer_is_converted_and_reverted_as_usual():
    with client.patch_sync_batchnorm():
        model = nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm2d(3))
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        assert [layer.layer_name for layer in converted] == ["0", "1"]
        assert not any("process_group" in vars(layer) for layer in converted)
        reverted = client.revert_model(converted)
    assert kinds(reverted) == [nn.SyncBatchNorm, nn.BatchNorm2d]
    assert reverted[0].process_group is None


@pytest.mark.parametrize("plain", TWINS)
def test_layers_made_by_hand_are_reverted_to_torchs_with_torchs_attributes(plain):
    arguments = [] if "Lazy" in plain.__name__ else [4]
    made = TWINS[plain](*arguments, eps_mode="clamp")
    made.group = "local"
    made._replica = (None, 0)
    reverted = client.revert_model(made)
    assert type(reverted) is plain
    assert vars(reverted).keys() == vars(plain(*arguments)).keys()


def test_wrappers_whose_replicas_share_a_device_are_left_by_revert():
    wrapped = DataParallelWithCallback(nn.Sequential(nn.BatchNorm1d(3)), ["cpu"] * 2)
    assert client.revert_model(client.convert_model(wrapped)) is wrapped
    assert type(wrapped.module[0]) is nn.BatchNorm1d
    plain = client.revert_model(DataParallelWithCallback(nn.BatchNorm1d(3)))
    assert type(plain) is nn.DataParallel
    assert vars(plain).keys() == vars(nn.DataParallel(nn.BatchNorm1d(3))).keys()


def test_revert_reports_the_subclasses_of_ours_that_it_leaves():
    with pytest.warns(UserWarning, match=r"left 1 layer synchronised: '0' \(OurSpecial\)") as reports:
        client.revert_model(nn.Sequential(OurSpecial(4)))
    assert reports[0].filename == __file__
    with pytest.warns(UserWarning, match=r"synchronised: '0' \(OurSpecial\) and 49 more of its class. Replace each"):
        client.revert_model(nn.Sequential(*(OurSpecial(4) for _ in range(50))))


def test_of_many_classes_the_unnamed_ones_are_counted():
    report = ConversionReport({}, {str(number): (f"Norm{number // 2}", "own") for number in range(12)})
    assert str(report) == (
        "synchronised 0 layers; left 12 layers unsynchronised: '0' (Norm0: own) and 1 more of its class, "
        "'2' (Norm1: own) and 1 more of its class, '4' (Norm2: own) and 1 more of its class, "
        "'6' (Norm3: own) and 1 more of its class, 4 layers of 2 more classes"
    )


def test_patch_makes_synchronised_layers():
    with client.patch_sync_batchnorm():
        made = nn.Sequential(model(), nn.LazyBatchNorm1d(affine=False), nn.SyncBatchNorm(4, process_group=None))
        with pytest.raises(ValueError, match="got <the left half>"):
            nn.SyncBatchNorm(4, process_group=Group())
    torchs = (nn.BatchNorm2d, nn.BatchNorm1d, nn.BatchNorm3d, nn.LazyBatchNorm1d, nn.SyncBatchNorm)
    assert kinds(made) == [TWINS[kind] for kind in torchs]


@needs("bias=False")
def test_patched_layers_take_torchs_options():
    with client.patch_sync_batchnorm():
        assert nn.BatchNorm2d(4, bias=False).bias is None


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "x" * 257])
def test_a_layer_with_an_invalid_name_is_refused_before_any_change(name):
    model = nn.Module()
    model.add_module("first", nn.BatchNorm1d(2))
    model.add_module(name, nn.BatchNorm1d(2))
    expected = says("its place in the model: expected printable text of 1 to 256 bytes")
    with pytest.raises(ConfigurationError, check=expected):
        client.convert_model(model)
    assert type(model.first) is nn.BatchNorm1d


def test_a_module_other_than_a_batch_norm_may_have_any_name():
    model = nn.Module()
    model.add_module("a\nb", nn.Linear(2, 2))
    assert client.convert_model(model) is model


def test_a_batch_norm_that_stays_torchs_may_have_any_name():
    model, layer = nn.Module(), nn.BatchNorm1d(2)
    layer.forward = lambda x: x
    model.add_module("a\nb", layer)
    with pytest.warns(UserWarning, match="left 1 layer"):
        assert client.convert_model(model) is model
    assert type(layer) is nn.BatchNorm1d


@pytest.mark.parametrize("plain", [nn.BatchNorm1d, nn.SyncBatchNorm, nn.LazyBatchNorm1d])
def test_a_layer_that_can_be_converted_is_reported_as_not_converted(plain):
    layer = plain(*[] if plain is nn.LazyBatchNorm1d else [3])
    assert client.conversion_report(layer).left == {"": (plain.__name__, "not converted")}
