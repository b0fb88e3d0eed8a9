"""Arguments, training and eval, frozen layers: whatever the mode, N shards equal the whole batch."""

import pytest
import torch

from programs import mode_programs
from programs.mode_programs import Run
from support import whole_batch
from support.whole_batch import CHANNELS, SYNCHRONISED, Case, assert_equal, assert_equal_to_whole_batch, joined

SIZES = (3, 1, 2)

OPTIONS = {
    "momentum=None": (("momentum", None),),
    "momentum=1.0": (("momentum", 1.0),),
    "eps=0.5": (("eps", 0.5),),
    "affine=False": (("affine", False),),
    "track_running_stats=False": (("track_running_stats", False),),
    "nothing kept": (("affine", False), ("track_running_stats", False), ("momentum", None)),
    "device": (("device", "cpu"), ("momentum", 0.3)),
}
FROZEN = {"weight": ("weight",), "bias": ("bias",), "weight and bias": ("weight", "bias")}

CASES = [
    *(pytest.param(Case("2d", SIZES, options=options), id=name) for name, options in OPTIONS.items()),
    *(pytest.param(Case("2d", SIZES, frozen=frozen), id=f"frozen {name}") for name, frozen in FROZEN.items()),
    pytest.param(Case("1d of (N, C)", SIZES, "float32", options=(("affine", False),)), id="float32, affine=False"),
]

# Between the variances of the channels, so that eps_mode "clamp" raises some and leaves others.
EPS = 4.0


@pytest.mark.parametrize("case", CASES)
def test_whatever_the_arguments_processes_equal_the_whole_batch(members, case):
    assert_equal_to_whole_batch(joined(members(3, whole_batch.as_member, case)), case)


@pytest.mark.parametrize("case", CASES)
def test_whatever_the_arguments_virtual_replicas_equal_the_whole_batch(case):
    assert_equal_to_whole_batch(whole_batch.as_virtual_replicas(case), case)


@pytest.mark.parametrize("case", CASES)
def test_the_cases_are_what_they_are_called(case):
    """A gradient or buffer that is missing on both sides would be equal, too."""
    layer, found = case.layer(synchronised=True), whole_batch.on_the_whole_batch(case)
    for name in ("weight", "bias"):
        learns = getattr(layer, name) is not None and name not in case.frozen
        assert (f"{name} gradient" in found) == learns
    assert ("running_mean" in found) == layer.track_running_stats
    for name, value in case.options:
        assert str(getattr(layer, name, value)) == str(value)


def test_device_and_dtype_give_the_same_tensors_as_torchs_layers():
    for plain, ours in SYNCHRONISED.items():
        for options in ({"device": "meta"}, {"dtype": torch.float64}, {"device": "meta", "dtype": torch.float16}):
            expected, found = plain(3, **options).state_dict(), ours(3, **options).state_dict()
            assert [(t.device, t.dtype, t.shape) for t in found.values()] == [
                (t.device, t.dtype, t.shape) for t in expected.values()
            ]


@pytest.mark.parametrize("affine", [True, False])
def test_eps_mode_clamp_equals_its_formula_on_the_whole_batch(members, affine):
    case = Case("2d", SIZES, seed=3, options=(("eps", EPS), ("eps_mode", "clamp"), ("affine", affine)))
    expected = _clamped_by_autograd(case)
    for found in (joined(members(3, whole_batch.as_member, case)), whole_batch.as_virtual_replicas(case)):
        assert_equal(found, expected, 1e-10)


def _clamped_by_autograd(case: Case) -> whole_batch.Result:
    """(x - mean) * max(var, eps)^-1/2 in float64, differentiated by autograd; buffers as torch updates them."""
    x, factors, state = case.tensors()
    x.requires_grad_()
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    assert 0 < (variance > EPS).sum() < CHANNELS, "the channels are on both sides of eps"
    output = (x - mean) * torch.maximum(variance, torch.tensor(EPS)).rsqrt()
    affine = dict(case.options)["affine"]
    weight, bias = (state[name].view(1, -1, 1, 1).requires_grad_() for name in ("weight", "bias"))
    if affine:
        output = output * weight + bias
    (output * factors).sum().backward()
    unbiased = x.detach().var((0, 2, 3), correction=1)
    gradients = {"weight gradient": weight.grad, "bias gradient": bias.grad} if affine else {}
    tensors = {
        "output": output.detach(),
        "input gradient": x.grad,
        **{name: gradient.flatten() for name, gradient in gradients.items()},
        "running_mean": 0.9 * state["running_mean"] + 0.1 * mean.detach().flatten(),
        "running_var": 0.9 * state["running_var"] + 0.1 * unbiased,
        "num_batches_tracked": state["num_batches_tracked"] + 1,
    }
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}, {"affine": False, "momentum": None}])
def test_eval_is_each_members_own_and_sends_nothing(members, options):
    """Without running statistics, eval uses the member's own batch, like torch's layer."""
    for (output, gradient, torch_output, torch_gradient), rounds in members(2, mode_programs.eval_on_its_own, options):
        assert rounds == 0
        assert torch.equal(output, torch_output)
        assert torch.equal(gradient, torch_gradient)
        assert gradient.abs().max() > 0


LAYERS, PHASES, STEPS = 2, 2, 6

RUNS = {
    "nothing special": (Run(STEPS), STEPS * LAYERS * PHASES),
    "validation between forward and backward": (Run(STEPS, between=mode_programs.validate), STEPS * LAYERS * PHASES),
    "validation between steps": (Run(STEPS, after=mode_programs.validate), STEPS * LAYERS * PHASES),
    "gradients in eval, between forward and backward and between steps": (
        Run(STEPS, between=mode_programs.differentiate_in_eval, after=mode_programs.differentiate_in_eval),
        STEPS * LAYERS * PHASES,
    ),
    "a layer in eval": (Run(STEPS, before=mode_programs.freeze_a_layer), STEPS * PHASES),
    "a layer in eval in every other step": (
        Run(STEPS, before=mode_programs.freeze_a_layer_in_odd_steps),
        STEPS // 2 * (LAYERS * PHASES + PHASES),
    ),
    "a layer with frozen weight and bias": (
        Run(STEPS, before=mode_programs.freeze_weight_and_bias),
        STEPS * LAYERS * PHASES,
    ),
    "a layer with an input without gradient": (
        Run(STEPS, before=mode_programs.freeze_the_beginning),
        STEPS * (PHASES + 1),
    ),
}


@pytest.mark.parametrize(("run", "rounds"), RUNS.values(), ids=RUNS)
def test_training_equals_the_whole_batch_whatever_one_member_does_in_eval(members, run, rounds):
    expected = mode_programs.on_the_whole_batch(run)
    for state, found_rounds in members(2, mode_programs.on_shards, run):
        assert found_rounds == rounds
        assert_equal(state, expected, 1e-9)


@pytest.mark.parametrize(
    "before",
    [mode_programs.freeze_a_layer, mode_programs.freeze_a_layer_in_odd_steps, mode_programs.freeze_weight_and_bias],
)
def test_frozen_layers_equal_the_whole_batch_on_virtual_replicas(before):
    expected = mode_programs.on_the_whole_batch(Run(STEPS, before))
    found = mode_programs.on_virtual_replicas(Run(STEPS, before), 3)
    assert_equal(found, expected, 1e-9)
