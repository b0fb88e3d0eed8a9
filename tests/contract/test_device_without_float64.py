"""The contract on devices without float64, such as MPS: ranks there equal the whole batch in float64 on the host.

`support.device_without_float64` stands in for such a device; the first tests show that it refuses what MPS refuses.
"""

import pytest
import torch

from programs import contract_device_programs as programs
from programs.contract_device_programs import Case
from support.device_without_float64 import device_without_float64

# Relative to the largest value of a tensor. All results but the statistics are rounded to the input's type.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

CASES = {
    "float32": Case(),
    "bfloat16": Case(dtype=torch.bfloat16),
    "an empty share": Case(shares=(6, 0)),
    "a mask": Case(masked=True),
    "a second derivative": Case(twice=True),
    "a cumulative average": Case(momentum=None),
}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        size = value.abs().max().item()
        torch.testing.assert_close(
            found[name].double(),
            value.double(),
            rtol=0,
            atol=tolerance * size,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def together(case: Case, found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The ranks' joint result: samples joined, parameter gradients added, buffers equal on all."""
    joined = {name: torch.cat([each[name] for each in found]) for name in ("output", "input gradient")}
    if case.masked:
        mask = programs.tensors(case)[2]
        joined = {name: value.movedim(1, -1)[mask].unsqueeze(2) for name, value in joined.items()}
    for name, value in found[0].items():
        if name.startswith("gradient of"):
            joined[name] = torch.stack([each[name] for each in found]).double().sum(0)
        elif name not in joined:
            assert all(torch.equal(each[name], value) for each in found), f"{name} differs between ranks"
            joined[name] = value
    return joined


REFUSED = {
    "to float64": lambda x, _: x.double(),
    "made there": lambda _, device: torch.zeros(3, dtype=torch.float64, device=device),
    "copied there": lambda _, device: torch.zeros(3, dtype=torch.float64).to(device),
    "a sum in float64": lambda x, _: x.sum(dtype=torch.float64),
    "converted on the way to the host": lambda x, _: x.to("cpu", torch.float64),
    "complex": lambda x, _: x.to(torch.complex128),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_the_stand_in_refuses_float64_in_any_way(make):
    with device_without_float64() as device, pytest.raises(TypeError, match="doesn't support float64"):
        make(torch.ones(3).to(device), device)


def test_the_stand_in_refuses_to_combine_its_tensors_with_those_of_the_host():
    with device_without_float64() as device:
        x = torch.ones(3).to(device)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3, dtype=torch.float64)
        assert (x + torch.tensor(1.0, dtype=torch.float64)).cpu().tolist() == [2.0] * 3


def test_the_stand_in_computes_in_float32_and_leaves_the_host_alone():
    with device_without_float64() as device:
        x = torch.arange(3.0).to(device).requires_grad_()
        y = (x * x).sum()
        y.backward()
        assert (x.device.type, x.is_cpu, x.is_cuda, y.device, x.grad.device) == ("mps", False, False, device, device)
        assert x.grad.cpu().tolist() == [0.0, 2.0, 4.0]
        assert x.detach().cpu().double().dtype is torch.float64
        assert torch.ones(3, dtype=torch.float64).sum().item() == 3.0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_layer_of_two_ranks_equals_the_whole_batch(ranks, case, either):
    """Output, gradients, and running statistics; these are the same to the bit on both ranks."""
    found = together(case, ranks(2, programs.one_call, case, either))
    assert_near(found, programs.on_the_whole_batch(case), TOLERANCES[case.dtype])


def test_a_model_trains_as_on_the_whole_batch(ranks, either):
    first, second = ranks(2, programs.train, either)
    expected = programs.train_on_the_whole_batch()
    assert_near(first, expected, 1e-4)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_micro_batches_recalibration_and_measurements_work_there_too(ranks, either):
    case = Case()
    x = programs.tensors(case)[0].double()
    plain = programs.layer(case).double()
    plain(x)
    for moved, measured, values in ranks(2, programs.measure, either):
        assert_near(moved, dict(plain.named_buffers()), 2e-6)
        variance, mean = torch.var_mean(x, (0, 2))
        assert_near({"mean": measured["running_mean"]}, {"mean": mean}, 2e-6)
        assert_near({"variance": measured["running_var"]}, {"variance": variance}, 2e-6)
        assert values == [0.0, 1.0, 1.0]
