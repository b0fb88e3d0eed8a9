"""Member processes of `test_modes.py`: models with layers that change between training and eval."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import client
from programs import member_programs
from programs.life_programs import BN, network
from programs.member_programs import Buffers, state


def _nothing(_model: nn.Module, _step: int) -> None:
    pass


@dataclass(frozen=True)
class Run:
    """The number of steps of a training, and functions to call in each step with the model and the step's number."""

    steps: int
    before: Callable[[nn.Module, int], None] = _nothing  # before the forward pass, on every member
    between: Callable[[nn.Module, int], None] = _nothing  # between forward and backward, on member 0 only
    after: Callable[[nn.Module, int], None] = _nothing  # after the update, on member 0 only


def on_the_whole_batch(run: Run) -> Buffers:
    """Leaves out `between` and `after`, which run on member 0 only and must not change the result."""
    plain = network()
    return _train_in_one_process(run, plain, plain)


def on_virtual_replicas(run: Run, replicas: int) -> Buffers:
    ours = client.convert_model(network())
    return _train_in_one_process(run, ours, client.DataParallelWithCallback(ours, ["cpu"] * replicas))


def _train_in_one_process(run: Run, model: nn.Module, forward: nn.Module) -> Buffers:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(run.steps):
        x, factors = member_programs.batch(step)
        run.before(model, step)
        optimizer.zero_grad()
        (forward(x) * factors).sum().backward()
        optimizer.step()
    return state(model)


def on_shards(connection: client.Connection, run: Run) -> tuple[Buffers, int]:
    """Trains on this member's shard; returns the state, and how many rounds the layers took part in."""
    who = connection.member
    ours = client.convert_model(network())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    rounds = 0
    for step in range(run.steps):
        x, factors = (whole.chunk(who.world_size)[who.rank] for whole in member_programs.batch(step))
        run.before(ours, step)
        optimizer.zero_grad()
        before = connection.rounds
        loss = (ours(x) * factors).sum()
        if who.rank == 0:
            run.between(ours, step)
        loss.backward()
        rounds += connection.rounds - before
        member_programs.sum_gradients(ours)
        optimizer.step()
        if who.rank == 0:
            before = connection.rounds
            run.after(ours, step)
            rounds += connection.rounds - before
    return state(ours), rounds


def validate(model: nn.Module, step: int) -> None:
    model.eval()
    with torch.no_grad():
        model(member_programs.batch(1000 + step)[0])
    model.train()


def differentiate_in_eval(model: nn.Module, step: int) -> None:
    """Eval with a backward pass, as for an adversarial attack or a saliency map; the weights' gradients are kept."""
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.eval()
    x = member_programs.batch(1000 + step)[0].requires_grad_()
    (model(x) * model(x)).sum().backward()
    assert x.grad.abs().max() > 0
    model.train()
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]


def freeze_a_layer(model: nn.Sequential, _step: int) -> None:
    """Fine-tuning: one batch norm keeps its running statistics while the rest trains."""
    model[BN].eval()


def freeze_a_layer_in_odd_steps(model: nn.Sequential, step: int) -> None:
    model[BN].train(step % 2 == 0)


def freeze_weight_and_bias(model: nn.Sequential, _step: int) -> None:
    model[BN].requires_grad_(requires_grad=False)


def freeze_the_beginning(model: nn.Sequential, _step: int) -> None:
    """Nothing before the first batch norm learns, so its input needs no gradient."""
    model[0].requires_grad_(requires_grad=False)


def eval_on_its_own(connection: client.Connection, options: dict[str, object]) -> tuple[list[torch.Tensor], int]:
    """In eval: output and input gradient of our layer and of torch's, on this member's input, and the rounds so far."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(connection.rank), dtype=torch.float64)
    found = []
    for kind in (client.SynchronizedBatchNorm1d, nn.BatchNorm1d):
        layer = kind(3, dtype=torch.float64, **options).eval()
        mine = x.clone().requires_grad_()
        output = layer(mine)
        (output * torch.linspace(-1, 2, 12, dtype=torch.float64).view(4, 3)).sum().backward()
        found += [output.detach(), mine.grad]
    return found, connection.rounds
