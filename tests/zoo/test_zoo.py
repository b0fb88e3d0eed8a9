"""The zoo's own parts on small networks: detected faults, and refused comparisons."""

import copy
import os
import signal

import pytest
import torch
from torch import nn

import client
from support.subclasses import Foreign, Functional
from zoo import tour
from zoo.catalogue import Architecture, Survey, smallest
from zoo.comparison import compare
from zoo.exhibits import BAR, exhibit
from zoo.specimen import Specimen, Unfit, batch, prepare, specimens

SHAPE = (2, 4, 4)


def specimen(*layers: nn.Module) -> Specimen:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), *layers)
    prepare(model)
    return Specimen(model, (batch(*SHAPE),))


def made_of(*layers: nn.Module) -> Architecture:
    class Own(Architecture):
        def build(self, **_):
            return nn.Sequential(nn.Conv2d(3, 3, 1), *copy.deepcopy(layers))

    return Own("torchvision", "own", "own18")


def moved(layer: nn.Module, _: object) -> None:
    layer.running_mean.add_(1e-3)


def test_a_synchronised_network_agrees_and_an_unsynchronised_one_would_differ():
    found = compare(specimen(nn.BatchNorm2d(3), nn.ReLU(), Functional(3)))
    assert found.largest < BAR
    assert found.unsynchronised > 1e-2
    assert found.complaints == []
    assert dict(found.layers) == {"BatchNorm2d": 1, "Functional": 1}


def test_a_layer_that_is_not_synchronised_is_reported_and_changes_the_output():
    found = compare(specimen(nn.BatchNorm2d(3), Foreign(3)))
    assert found.differences["output"] > BAR
    assert "2: Foreign: its forward did not call batch_norm in training" in found.complaints


@pytest.mark.parametrize("kind", ["buffers", "parameters' gradients", "input gradient", "output"])
def test_each_kind_of_result_is_compared(kind, monkeypatch):
    def spoilt(model):
        converted = convert(model)
        layer = converted[1]
        if kind == "buffers":
            layer.register_forward_pre_hook(moved)
        elif kind == "output":
            layer.register_forward_hook(lambda _layer, _inputs, output: output + 1e-3)
        elif kind == "input gradient":
            converted.register_forward_pre_hook(lambda _model, inputs: inputs[0] * 2 - inputs[0].detach())
        else:
            layer.weight.register_hook(lambda gradient: gradient * 1.001)
        return converted

    convert = client.convert_model
    monkeypatch.setattr(client, "convert_model", spoilt)
    assert [name for name, size in compare(specimen(nn.BatchNorm2d(3))).differences.items() if size > BAR] == [kind]


def test_a_module_that_reverting_does_not_restore_is_reported(monkeypatch):
    monkeypatch.setattr(client, "revert_model", lambda model: model)
    assert "reverted, 1 is a SynchronizedFunctional" in compare(specimen(Functional(3))).complaints


def test_randomness_is_removed_or_reported():
    (quiet,) = specimens(made_of(nn.BatchNorm2d(3), nn.Dropout(0.5)))
    assert compare(quiet).largest < BAR

    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    with pytest.raises(Unfit, match="another result each time"):
        list(specimens(made_of(nn.BatchNorm2d(3), Noisy())))


def test_a_branch_that_begins_with_a_weight_of_zero_gets_a_larger_one():
    layer = nn.BatchNorm2d(3)
    nn.init.zeros_(layer.weight)
    scale = nn.ParameterList([torch.full((3,), 1e-6)])
    prepare(model := nn.Sequential(layer, scale))
    assert layer.weight.min() >= 0.5
    assert model[1][0].abs().max() > 0.01


def test_a_network_whose_output_shows_no_synchronisation_is_a_problem():
    class Constant(nn.Module):
        def forward(self, x):
            return x * 0

    (found,) = exhibit(Survey(made_of(nn.BatchNorm2d(3), Constant())))
    assert "proves nothing" in found.problem
    assert not found.is_unfit


def test_an_error_is_a_problem_and_a_network_that_takes_no_inputs_is_unfit():
    class Faulty(nn.BatchNorm2d):
        def forward(self, x):
            if len(x) == 3 and isinstance(self, client.SynchronizedBatchNorm):
                raise RuntimeError("of its own")
            return super().forward(x)

    (found,) = exhibit(Survey(made_of(Faulty(3))))
    assert "RuntimeError: of its own" in found.problem
    assert not found.is_unfit
    (found,) = exhibit(Survey(made_of(nn.BatchNorm1d(3))))
    assert "takes none of the inputs tried" in found.problem
    assert found.is_unfit


def test_of_each_family_the_smallest_with_batch_norm_is_chosen():
    def known(name: str, parameters: int, layers: int) -> Survey:
        return Survey(Architecture("timm", "resnet", name), parameters, (("BatchNorm2d", layers),) if layers else ())

    resnets = [known("resnet50", 25, 53), known("resnet18", 11, 20), known("resnet10", 5, 0)]
    odd = Survey(Architecture("timm", "odd", "odd18"), problem="no")
    found = smallest([*resnets, known("seresnet50", 28, 53), known("vit_tiny", 5, 0), odd])
    assert [one.architecture.name for one in found] == ["resnet18", "seresnet50", "odd18"]
    assert [one.architecture.family for one in found] == ["resnet", "resnet: seresnet", "odd"]


def test_a_version_belongs_to_a_family_and_a_size_does_not():
    names = ["mobilenetv3_small_050", "regnetx_002", "tf_efficientnet_b0", "resnetv2_50", "inception_v3"]
    families = [Architecture("timm", "m", name).family.removeprefix("m: ") for name in names]
    assert families == ["mobilenetv3", "regnetx", "tf_efficientnet", "resnetv2", "inception"]


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * 2


def lost(number: int) -> int:
    return -number


@pytest.mark.processes
def test_a_killed_process_loses_only_its_own_result():
    assert sorted(tour.in_processes(die_at_three, list(range(6)), 2, lost)) == [-3, 0, 2, 4, 8, 10]
