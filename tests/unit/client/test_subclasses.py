"""Converted subclasses of torch's batch norm keep their forward, with the statistics of the whole batch."""

import abc
import copy
import logging
import pickle
import pickletools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.utils.checkpoint import checkpoint

import client
from client.data_parallel import any_device
from client.data_parallel.replicate import execute_replication_callbacks
from client.nn import conversion
from client.nn.override import BatchNormCall
from client.nn.subclasses import RESERVED_NAMES
from support import subclasses
from support.sentences import says
from support.subclasses import AlwaysEval, Foreign, Functional, Reduced, SkipsEmpty, SynchronisesItself

SIZES = (3, 1, 2)
CHANNELS = 4


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(SIZES), CHANNELS, 3, 2, generator=generator, dtype=torch.float64) for _ in range(2)]


def made(kind, **options):
    torch.manual_seed(1)
    layer = kind(CHANNELS, dtype=torch.float64, **options)
    if layer.affine:
        nn.init.uniform_(layer.weight)
        nn.init.uniform_(layer.bias)
    return nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1, dtype=torch.float64), layer)


def step(run, x, factors):
    x = x.clone().requires_grad_()
    output = run(x)
    (output * factors).sum().backward()
    return output.detach(), x.grad


def check_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def check_same_model(found, expected):
    check_same(found.buffers(), expected.buffers())
    pairs = zip(found.parameters(), expected.parameters(), strict=True)
    for one, other in pairs:
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11)


def on_replicas(model):
    return client.DataParallelWithCallback(model, device_ids=["cpu"] * 3)


def on_shards(model, sizes):
    devices = [torch.device("cpu")] * len(sizes)

    def run(x):
        replicas = any_device.replicate(model, devices)
        execute_replication_callbacks(replicas)
        barrier = vars(replicas[0])["_barrier"]
        parts = [(part,) for part in x.split(sizes)]
        return torch.cat(any_device.parallel_apply(replicas, parts, [{}] * len(sizes), devices, barrier))

    return run


def test_a_profiler_may_wrap_the_function_that_a_forward_calls(monkeypatch):
    plain = made(Functional)
    model, calls, wrapped = client.convert_model(copy.deepcopy(plain)), [], F.batch_norm

    def counted(*args, **kwargs):
        calls.append(args)
        return wrapped(*args, **kwargs)

    monkeypatch.setattr(F, "batch_norm", counted)
    x, factors = batch()
    found = step(on_replicas(model), x, factors)
    assert len(calls) == len(SIZES)
    check_same(found, step(plain, x, factors))


# Classes whose `forward` supports none of OPTIONS, then classes that do not support a `momentum` of None.
WITHOUT_OPTIONS = {subclasses.Operator, subclasses.Helped, subclasses.Scaled}
WITHOUT_MOMENTUM = {subclasses.Centred}
OPTIONS = [
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
]
# Classes that always normalise with running statistics.
OF_RUNNING_STATISTICS = (AlwaysEval, subclasses.Frozen)
CASES = [(kind, {}) for kind in (*subclasses.SYNCHRONISED, subclasses.Decorated, *OF_RUNNING_STATISTICS)] + [
    (kind, options)
    for kind in subclasses.SYNCHRONISED
    if kind not in WITHOUT_OPTIONS
    for options in OPTIONS
    if not (kind in WITHOUT_MOMENTUM and "momentum" in options)
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_replicas_of_a_subclass_equal_the_whole_batch(kind, options, caplog):
    whole = made(kind, **options)
    converted = client.convert_model(copy.deepcopy(whole))
    assert isinstance(converted[1], kind)
    assert isinstance(converted[1], client.SynchronizedBatchNorm)
    replicas = on_replicas(converted)
    for seed in range(3):
        check_same(step(replicas, *batch(seed)), step(whole, *batch(seed)))
    assert not [record.message for record in caplog.records if "not synchronised" in record.message]
    check_same_model(converted, whole)
    if "track_running_stats" in options:
        return  # in eval each replica normalises separately
    whole.eval(), converted.eval()
    check_same([replicas(batch()[0])], [whole(batch()[0])])


def test_each_tensor_of_a_list_is_a_separate_batch():
    whole = made(subclasses.OfLists)[1]
    replicas = on_replicas(client.convert_model(copy.deepcopy(whole)))
    one, other = batch(1)
    check_same(replicas([one, other]), whole([one, other]))
    check_same_model(replicas.module, whole)
    assert whole.num_batches_tracked == 2


@pytest.mark.parametrize("plain", [nn.BatchNorm1d, nn.BatchNorm3d])
def test_subclasses_of_the_other_dimensions_are_synchronised(plain):
    class Own(plain):
        def forward(self, x):
            return super().forward(x).sin()

    shape = (sum(SIZES), CHANNELS, *[2] * (0 if plain is nn.BatchNorm1d else 3))
    whole = Own(CHANNELS, dtype=torch.float64)
    x, factors = (
        part.flatten()[: torch.Size(shape).numel()].view(shape) for part in [one.repeat(2, 1, 1, 1) for one in batch()]
    )
    replicas = on_replicas(client.convert_model(copy.deepcopy(whole)))
    check_same(step(replicas, x, factors), step(whole, x, factors))
    check_same_model(replicas.module, whole)


def test_a_layer_with_slots_keeps_them():
    model = made(subclasses.Slotted)
    model[1].note = "kept"
    converted = client.convert_model(model)
    assert isinstance(converted[1], client.SynchronizedBatchNorm)
    assert copy.deepcopy(converted)[1].note == "kept"
    assert pickle.loads(pickle.dumps(converted))[1].note == "kept"  # noqa: S301
    whole = made(subclasses.Slotted)
    check_same(step(converted, *batch()), step(whole, *batch()))
    assert client.revert_model(converted)[1].note == "kept"
    assert type(converted[1]) is subclasses.Slotted


@pytest.mark.parametrize("sizes", [(4, 0, 2), (0, 6, 0), (0, 0, 6)])
def test_an_empty_batch_that_a_subclass_accepts_participates(sizes):
    whole = made(subclasses.SkipsEmpty)
    converted = client.convert_model(copy.deepcopy(whole))
    check_same(step(on_shards(converted, sizes), *batch()), step(whole, *batch()))
    check_same_model(converted, whole)


def test_all_calls_without_tensors_are_synchronised(caplog):
    options = {"affine": False, "track_running_stats": False}
    whole = made(subclasses.Twice, **options)
    replicas = on_replicas(client.convert_model(copy.deepcopy(whole)))
    for _ in range(2):
        check_same(step(replicas, *batch()), step(whole, *batch()))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("options", "shape", "is_own"),
    [
        ({"affine": False, "track_running_stats": False}, (2, CHANNELS, 3, 3), True),
        ({"affine": False, "track_running_stats": False}, (2, 6, 3, 3), False),
        ({"affine": False, "track_running_stats": False}, (CHANNELS,), False),
        ({"affine": False}, (2, CHANNELS, 3, 3), False),
        ({"track_running_stats": False}, (2, CHANNELS, 3, 3), False),
    ],
)
def test_a_call_without_tensors_belongs_only_to_a_layer_without_tensors_and_with_its_channels(options, shape, is_own):
    layer = nn.BatchNorm2d(CHANNELS, **options)
    call = BatchNormCall(torch.zeros(shape), None, None)
    assert call.belongs_to(layer) == is_own
    layer.track_running_stats = False  # as users do to keep statistics unchanged for a while
    assert call.belongs_to(layer) == (is_own or options == {"affine": False})


def test_a_subclass_alone_computes_the_same_bits_as_the_original():
    whole = made(Functional)
    converted = client.convert_model(copy.deepcopy(whole))
    for seed in range(2):
        for one, other in zip(step(converted, *batch(seed)), step(whole, *batch(seed)), strict=True):
            assert torch.equal(one, other)
    assert all(map(torch.equal, converted.buffers(), whole.buffers()))


def test_the_layer_stays_the_same_object_with_all_attributes():
    model = made(subclasses.Deeper)
    layer, tensors = model[1], [*model[1].parameters(), *model[1].buffers()]
    calls = []
    layer.register_forward_hook(lambda *_: calls.append("hook"))
    converted = client.convert_model(model)
    assert converted[1] is layer
    assert layer.note == "kept"
    assert all(one is other for one, other in zip([*layer.parameters(), *layer.buffers()], tensors, strict=True))
    assert layer.layer_name == "1"
    converted(batch()[0])
    assert calls == ["hook"]
    attributes = vars(layer).keys() - {"layer_name", "group", "eps_mode", "_deferred", "_bypassed"}
    reverted = client.revert_model(converted)
    assert reverted[1] is layer
    assert type(layer) is subclasses.Deeper
    assert vars(layer).keys() == attributes


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
@pytest.mark.parametrize("kind", [*subclasses.SYNCHRONISED, subclasses.Decorated])
def test_copies_and_pickles_find_the_class_again(kind, copied, chunks):
    model = client.convert_model(made(kind), chunks=chunks)
    for seed in range(chunks):
        step(model, *batch(seed))
    found = copied(model)
    assert type(found[1]) is type(model[1])
    assert found[1].layer_name == "1"
    assert found[1].chunks == chunks
    assert found[1]._deferred is not model[1]._deferred or chunks == 1
    check_same(step(on_replicas(found), *batch(1)), step(on_replicas(model), *batch(1)))
    check_same(found.buffers(), model.buffers())


@pytest.mark.processes
def test_another_process_loads_pickles_that_name_nothing_private_of_ours(tmp_path):
    model = client.convert_model(made(Functional), chunks=2)
    for name, pickled in (("rebuilt_layer", model), ("synchronized_class", client.synchronized_class(Functional))):
        data = pickle.dumps(pickled, protocol=2)
        (tmp_path / name).write_bytes(data)
        named = {argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}
        assert {one for one in named if one.startswith(("client", "statsd_bn"))} == {f"client {name}"}
    script = """
import pickle
model, kind = (pickle.load(open(name, "rb")) for name in ("rebuilt_layer", "synchronized_class"))
print(model[1].chunks, model[1])
print(kind(3))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("2 SynchronizedFunctional(")
    assert "\nSynchronizedFunctional(\n  3, " in done.stdout


def test_a_checkpoint_moves_the_statistics_once():
    whole, model = made(Functional), client.convert_model(made(Functional))

    def run(x):
        return checkpoint(model[1], model[0](x), use_reentrant=False)

    check_same(step(run, *batch()), step(whole, *batch()))
    check_same_model(model, whole)


def test_micro_batches_move_the_statistics_once():
    model = client.convert_model(made(Functional), chunks=2)
    plain = client.convert_model(made(nn.BatchNorm2d), chunks=2)
    for seed in range(4):
        model(batch(seed)[0])
        plain(batch(seed)[0])
        check_same(model.buffers(), plain.buffers())
    assert model[1].num_batches_tracked == 2


def test_a_subclass_is_compiled_whole():
    whole = made(Functional)
    converted = client.convert_model(copy.deepcopy(whole))
    check_same(step(torch.compile(converted, fullgraph=True, backend="aot_eager"), *batch()), step(whole, *batch()))
    check_same_model(converted, whole)


def test_a_layer_that_computes_its_own_statistics_is_reported_after_its_first_step(caplog, monkeypatch):
    # The warning comes once per process; an earlier test may have caused it.
    monkeypatch.setattr(client.synchronized_class(Foreign), "_logged_warnings", set())
    model = nn.Sequential(made(Foreign), made(Foreign), made(Functional))
    client.convert_model(model)
    for _ in range(2):
        model(batch()[0])
    problem = "the forward of Foreign did not call batch_norm with the layer's tensors"
    advice = "a rank without rows must call it with an empty tensor of shape (0, C)"
    assert caplog.messages == [f"layer '0.1' not synchronised: {problem}; {advice}"]
    reason = "its forward did not call batch_norm in training"
    report = client.conversion_report(model)
    assert report.synchronised == {"2.1": "Functional"}
    assert report.left == dict.fromkeys(("0.1", "1.1"), ("Foreign", reason))
    assert str(report).startswith("synchronised 1 layer (1 Functional); left 2 layers unsynchronised: '0.1' (Foreign: ")
    with pytest.warns(UserWarning, match="unsynchronised") as warned:
        client.convert_model(model)
    (warning,) = warned
    assert str(warning.message) == (
        f"convert_model left 2 layers unsynchronised: '0.1' (Foreign: {reason}) and 1 more of its class. "
        "client.conversion_report(model) lists each with its reason"
    )


@pytest.mark.filterwarnings("ignore:var:UserWarning")  # from an empty batch
@pytest.mark.parametrize("kind", [Foreign, SkipsEmpty])
def test_an_empty_batch_begins_no_round_of_a_layer_that_called_no_batch_norm(kind, monkeypatch):
    layer, rounds = client.convert_model(kind(CHANNELS)), []
    monkeypatch.setattr(client.SynchronizedBatchNorm, "_normalise", lambda *given: rounds.append(given) or given[2])
    layer(torch.ones(2, CHANNELS, 3, 2))
    layer(torch.ones(0, CHANNELS, 3, 2))
    assert len(rounds) == (0 if kind is Foreign else 2)


def test_a_forward_that_synchronises_itself_is_left_and_named():
    model = nn.Sequential(made(SynchronisesItself), made(Reduced))
    reason = "its forward synchronises already; see client.register_conversion"
    with pytest.warns(UserWarning, match=f"left 1 layer unsynchronised: '0.1' .SynchronisesItself: {reason}"):
        client.convert_model(model)
    report = client.conversion_report(model)
    assert report.synchronised == {"1.1": "Reduced"}
    assert report.left == {"0.1": ("SynchronisesItself", reason)}


def test_conversion_is_reported_in_one_line(caplog):
    caplog.set_level(logging.INFO, "statsd_bn.client")
    client.convert_model(nn.Sequential(made(Functional), made(Functional), made(nn.BatchNorm2d)))
    assert caplog.messages == ["synchronised 3 layers (2 Functional, 1 SynchronizedBatchNorm2d)"]


def test_a_registered_conversion_is_used_for_a_class_and_its_subclasses(monkeypatch):
    class Below(Foreign):
        pass

    monkeypatch.setattr(conversion, "CONVERSIONS", dict(conversion.CONVERSIONS))
    client.register_conversion(Foreign, lambda layer: client.SynchronizedBatchNorm2d(layer.num_features))
    converted = client.convert_model(nn.Sequential(made(Foreign), made(Below)))
    assert client.conversion_report(converted).synchronised == dict.fromkeys(("0.1", "1.1"), "SynchronizedBatchNorm2d")


def test_a_registered_conversion_keeps_the_tensors_of_a_layer_that_synchronises_itself(monkeypatch):
    def without_its_own_collectives(layer):
        layer.__class__ = nn.BatchNorm2d
        return client.convert_model(layer)

    monkeypatch.setattr(conversion, "CONVERSIONS", dict(conversion.CONVERSIONS))
    client.register_conversion(SynchronisesItself, without_its_own_collectives)
    itself = made(SynchronisesItself).eval()
    weight, whole = itself[1].weight, made(nn.BatchNorm2d)
    converted = client.convert_model(itself)
    assert converted[1].weight is weight
    assert not converted[1].training
    assert client.conversion_report(converted).synchronised == {"1": "SynchronizedBatchNorm2d"}
    check_same(step(on_replicas(converted.train()), *batch()), step(whole, *batch()))
    check_same_model(converted, whole)


@pytest.mark.parametrize(("arguments", "text"), [((3, len), "original: expected"), ((Foreign, 3), "convert: expected")])
def test_an_invalid_conversion_is_refused(arguments, text):
    with pytest.raises(TypeError, match=text):
        client.register_conversion(*arguments)


def test_a_class_is_made_once_and_can_make_layers():
    kind = client.synchronized_class(Functional)
    assert client.synchronized_class(Functional) is kind
    layer = kind(CHANNELS, eps=0.5)
    assert (layer.eps, layer.eps_mode, type(layer.act)) == (0.5, "plus", nn.ReLU)
    for wrong in (nn.Linear, kind, nn.SyncBatchNorm, nn.LazyBatchNorm2d, SynchronisesItself):
        with pytest.raises(TypeError):
            client.synchronized_class(wrong)


def test_a_class_that_derives_from_torchs_base_takes_input_of_any_dimension():
    kind = client.synchronized_class(subclasses.OfAnyDimension)
    for shape in ((5, CHANNELS), (5, CHANNELS, 2, 2, 2)):
        layer, x = kind(CHANNELS, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
        check_same([on_replicas(layer)(x)], [subclasses.OfAnyDimension(CHANNELS, dtype=torch.float64)(x)])


class OfAnotherMetaclass(nn.BatchNorm2d, abc.ABC):
    pass


class Derived(client.synchronized_class(Functional)):
    pass


PICKLED = [client.synchronized_class(Functional), client.synchronized_class(OfAnotherMetaclass), Derived]


@pytest.mark.parametrize("kind", PICKLED)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_class_is_pickled_and_found_again(kind, protocol):
    assert pickle.loads(pickle.dumps(kind, protocol)) is kind  # noqa: S301
    assert copy.deepcopy(kind) is kind


class OfAGroup(nn.BatchNorm1d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.process_group = "its own"

    def forward(self, x):
        return super().forward(x)


def test_an_own_attribute_with_a_name_of_ours_stays():
    layer = OfAGroup(3)
    assert client.convert_model(layer) is layer
    assert layer.process_group == "its own"


class OfNamesOfOurs(nn.BatchNorm2d):
    chunks = 4

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.group, self.eps_mode, self.layer_name = 3, "own", "mine"


def test_a_layer_with_attributes_named_as_ours_is_left_and_named():
    model = nn.Sequential(OfNamesOfOurs(3))
    with pytest.warns(UserWarning, match=r"OfNamesOfOurs: chunks and eps_mode and group and layer_name: .* rename"):
        client.convert_model(model)
    layer = client.revert_model(model)[0]
    assert type(layer) is OfNamesOfOurs
    assert (layer.group, layer.eps_mode, layer.layer_name, layer.chunks) == (3, "own", "mine", 4)


class WithAMethodOfOurs(nn.BatchNorm2d):
    """Has a method with the name of one of ours."""

    def _normalise(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)

    def forward(self, x):
        return self._normalise(x).relu()


def test_a_layer_with_a_method_named_as_ours_is_left_and_named():
    model = nn.Sequential(WithAMethodOfOurs(3))
    with pytest.warns(UserWarning, match=r"WithAMethodOfOurs: _normalise: .* rename"):
        client.convert_model(model)
    assert type(model[0]) is WithAMethodOfOurs
    with pytest.raises(TypeError, match=r"_normalise: .* rename"):
        client.synchronized_class(WithAMethodOfOurs)


def test_every_name_of_our_layers_that_torchs_layers_lack_is_reserved():
    plain, layer = Functional(CHANNELS), client.convert_model(Functional(CHANNELS))
    layer(torch.randn(2, CHANNELS, 3, 2))
    ours = {name for name in {*dir(layer), *vars(layer)} - {*dir(plain)} if not name.startswith("__")}
    # A subclass may define these two names itself: our code does not depend on our definitions.
    assert ours - {"process_group", "convert_sync_batchnorm"} == set(RESERVED_NAMES)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, Functional, OfAGroup])
def test_a_synchronised_layer_says_how_to_script_and_trace_it(kind):
    model = client.convert_model(nn.Sequential(nn.ReLU(), kind(3)))
    with pytest.raises(TypeError, match=r"layer '1': .* cannot be scripted (.|\n)* client.revert_model"):
        torch.jit.script(model)
    with pytest.raises(TypeError, check=says(r"traced by torch.fx as the root module; .* client.revert_model")):
        torch.fx.symbolic_trace(model[1])
    model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, check=says("layer '1': .* torch.fx with its hooks; .* client.revert_model")):
        torch.fx.symbolic_trace(model)


def test_a_call_in_eval_does_not_hide_a_later_empty_batch(monkeypatch):
    layer = client.convert_model(subclasses.SkipsEmpty(3))
    layer.eval()(torch.randn(4, 3, 2, 2))
    passed_by = []
    monkeypatch.setattr(type(layer), "_handle_bypass", lambda self, output, _: passed_by.append(self) or output)
    layer.train()(torch.empty(0, 3, 2, 2))
    assert passed_by == [layer]
