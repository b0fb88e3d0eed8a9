"""Whether a compiled network equals the eager one, without a graph break, also as a CUDA graph.

The stand-in runs the traced graph without inductor, which would compile C++ for many seconds.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

from gpu_report.networks import Network, batch, check_close, compute_exactly, network, roundings
from gpu_report.step import Step
from gpu_report.variants import rounds_on_device
from gpu_report.worlds import world_of_one

SAMPLES = 12

# The third call may replay a CUDA graph.
CALLS = 3

# The mode with CUDA graphs, whose replay runs the rounds without Python.
REPLAYING = "reduce-overhead"

MODES = ("default", REPLAYING)

# Two layers, forward and backward.
ROUNDS_OF_A_CALL = 4


def run(step: Step) -> None:
    """Compiles for each mode, with the rows of a process group of one rank on the device."""
    compute_exactly()
    with world_of_one(step.device) as group:
        for mode in MODES:
            torch._dynamo.reset()  # noqa: SLF001 - older versions have no public name
            with step.attempt(f"{mode}: outputs, gradients and running statistics are as the eager network's"):
                _compare(step, group, mode)


def _compare(step: Step, group: Any, mode: str) -> None:
    eager, made = (network(step.device, process_group=group) for _ in range(2))
    compiled = _compiled(step, made, mode)
    worst, bound = 0.0, 2 * roundings(SAMPLES)
    skipped = counters["inductor"]["cudagraph_skips"]
    for number in range(CALLS):
        images, classes = batch(step.device, SAMPLES, seed=number)
        expected = _step(eager, eager, images, classes)
        with rounds_on_device() as rounds:
            found = _step(made, compiled, images, classes)
        if found.keys() != expected.keys():
            raise AssertionError(f"expected {sorted(expected)}, got {sorted(found)}")
        for name, values in expected.items():
            worst = max(worst, check_close(found[name], values, bound, f"call {number}, {name}"))
        if rounds.number != ROUNDS_OF_A_CALL and not (mode == REPLAYING and number):
            raise AssertionError(f"expected {ROUNDS_OF_A_CALL} rounds on the device, got {rounds.number}")
    step.figure("largest difference", worst, "of its bound", mode=mode)
    step.figure("rounds that Python ran in the last call", rounds.number, mode=mode)
    step.figure("CUDA graphs skipped", counters["inductor"]["cudagraph_skips"] - skipped, mode=mode)


def _compiled(step: Step, made: Network, mode: str) -> nn.Module:
    how: dict[str, Any] = {"backend": "aot_eager"} if step.stand_in else {"mode": mode}
    compiled: nn.Module = torch.compile(made, fullgraph=True, **how)
    return compiled


def _step(made: Network, called: nn.Module, images: Tensor, classes: Tensor) -> dict[str, Tensor]:
    """Returns copies of the results of one training step, since the next replay of a graph overwrites them."""
    made.zero_grad()
    x = images.detach().clone().requires_grad_()
    logits = called(x)
    functional.cross_entropy(logits, classes).backward()
    found = {"logits": logits, "input gradient": x.grad, **dict(made.named_buffers())}
    found |= {f"{name} gradient": each.grad for name, each in made.named_parameters()}
    return {name: each.detach().clone() for name, each in found.items() if each.is_floating_point()}
