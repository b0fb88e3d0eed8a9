"""Ways to use a layer's gradients, each written once and run on a whole batch, as a member, and by virtual replicas."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import client
from statsd_bn.errors import StatsdBNError
from support.whole_batch import Case, Result

CASE = Case("2d", (3, 1, 2))

Layer = Callable[[Tensor], Tensor]


def two_forwards_then_one_backward(layer: Layer, x: Tensor, factors: Tensor) -> None:
    first, second = layer(x), layer(x.flip(-1) * 3 + 1)
    (first.tanh() * second * factors).sum().backward()


def called_twice_in_one_forward(layer: Layer, x: Tensor, factors: Tensor) -> None:
    (layer(layer(x).tanh() * 2 + 1) * factors).sum().backward()


def backward_twice_through_a_kept_graph(layer: Layer, x: Tensor, factors: Tensor) -> None:
    output = layer(x)
    (output * factors).sum().backward(retain_graph=True)
    (output.sin() * factors).sum().backward()


def two_steps_accumulated(layer: Layer, x: Tensor, factors: Tensor) -> None:
    for scale in (1, 2):
        (layer(x * scale).tanh() * factors).sum().backward()


def input_that_needs_no_gradient(layer: Layer, x: Tensor, factors: Tensor) -> None:
    (layer(x.detach()).tanh() * factors).sum().backward()
    x.grad = torch.zeros_like(x)


def without_gradients(layer: Layer, x: Tensor, factors: Tensor) -> None:
    """The pass under `no_grad` moves the running statistics too, and the second pass must take another round."""
    with torch.no_grad():
        layer(x)
    (layer(x * 2) * factors).sum().backward()


def gradient_penalty(layer: Layer, x: Tensor, factors: Tensor) -> None:
    """WGAN-GP: the loss has a penalty on the norm of each sample's input gradient, so backward differentiates twice."""
    score = (layer(x).tanh() * factors).sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    penalty = (gradient.flatten(1).square().sum(1).sqrt() - 1).square().sum()
    (score + 10 * penalty).backward()


PROGRAMS = [
    *(two_forwards_then_one_backward, called_twice_in_one_forward, backward_twice_through_a_kept_graph),
    *(two_steps_accumulated, input_that_needs_no_gradient, without_gradients, gradient_penalty),
]


def on_the_whole_batch() -> Iterator[Result]:
    for program in PROGRAMS:
        layer = CASE.layer(synchronised=False)
        yield _run(program, layer, layer, *CASE.tensors()[:2])


def as_member(connection: client.Connection) -> list[tuple[Result, int]]:
    """Results of all programs, and how many rounds each took."""
    results = []
    for program in PROGRAMS:
        layer = CASE.layer(synchronised=True)
        before = connection.rounds
        x, factors = (whole.split(CASE.sizes)[connection.rank] for whole in CASE.tensors()[:2])
        result = _run(program, layer, layer, x, factors)
        results.append((result, connection.rounds - before))
    return results


def as_virtual_replicas() -> Iterator[Result]:
    """`nn.DataParallel` splits six samples for three replicas into two each."""
    for program in PROGRAMS:
        layer = CASE.layer(synchronised=True)
        yield _run(program, layer, client.DataParallelWithCallback(layer, ["cpu"] * 3), *CASE.tensors()[:2])


def with_torch_func(connection: client.Connection) -> list[list[Tensor]]:
    """Gradients by torch.func.grad around functional_call, and by backward(): weight, bias, input, running mean."""
    x, factors = (whole.split(CASE.sizes)[connection.rank] for whole in CASE.tensors()[:2])
    layer = CASE.layer(synchronised=True)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}

    def loss(parameters: dict[str, Tensor], x: Tensor, buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        output = torch.func.functional_call(layer, (parameters, buffers), (x,))
        return (output.tanh() * factors).sum(), buffers["running_mean"]

    gradients, running_mean = torch.func.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x, buffers)
    by_parameters, by_input = gradients
    found = [by_parameters["weight"], by_parameters["bias"], by_input, running_mean]
    layer = CASE.layer(synchronised=True)
    x = x.clone().requires_grad_()
    (layer(x).tanh() * factors).sum().backward()
    return [found, [layer.weight.grad, layer.bias.grad, x.grad, layer.running_mean]]


def _run(program: Callable[..., None], layer: nn.Module, run: Layer, x: Tensor, factors: Tensor) -> Result:
    x = x.clone().requires_grad_()
    program(run, x, factors)
    tensors = {
        "output": run(x),
        "input gradient": x.grad,
        "weight gradient": layer.weight.grad,
        "bias gradient": layer.bias.grad,
        **dict(layer.named_buffers()),
    }
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def input_that_requires_a_gradient_on_rank_0(who: Any, steps: int, *, is_compiled: bool) -> str:
    """Returns the error and its step; in the first `steps` steps all ranks' inputs require a gradient."""
    layer = client.convert_model(nn.BatchNorm1d(3).double())
    layer.layer_name = "stem.bn"
    run = torch.compile(layer, backend="aot_eager") if is_compiled else layer
    for step in range(steps + 1):
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=step < steps or who.member.rank == 0)
        try:
            (run(x) ** 3).sum().backward()
        except StatsdBNError as error:
            return f"{step}: {type(error).__name__}: {error}"
    return "nothing was raised"
