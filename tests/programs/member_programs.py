"""Programs of member processes: functions that can be sent to a process by name."""

import functools
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import client
from client.session.round import Round
from client.transports.choose import transport_for
from statsd_bn import Rows, StatsdBNError
from support.sentences import error_of
from support.transports import reference_kernels

Buffers = dict[str, np.ndarray]


def state(model: nn.Module) -> Buffers:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def train(connection: client.Connection, steps: int) -> Buffers:
    """Different images on every member, `steps` times forward and backward; returns the buffers."""
    model = nn.Module()
    model.bn = nn.BatchNorm2d(5)
    client.convert_model(model)
    generator = torch.Generator().manual_seed(connection.rank)
    for _ in range(steps):
        x = torch.randn(4, 5, 3, 3, generator=generator, requires_grad=True)
        (model.bn(x) * torch.randn(4, 5, 3, 3, generator=generator)).sum().backward()
    return {name: buffer.numpy() for name, buffer in model.named_buffers()}


def train_by_reference(connection: client.Connection, steps: int) -> Buffers:
    """As `train`, with kernels that round alike on all transports."""
    with reference_kernels():
        return train(connection, steps)


def evaluate_on_one_member_only(connection: client.Connection) -> tuple[np.ndarray, np.ndarray]:
    layer = client.SynchronizedBatchNorm2d(5).eval()
    x = torch.randn(4, 5, 3, 3, generator=torch.Generator().manual_seed(0))
    expected = nn.BatchNorm2d(5).eval()(x)
    found = layer(x) if connection.rank == 0 else expected
    return found.detach().numpy(), expected.detach().numpy()


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)
    ).double()


def data_parallel(model: nn.Module, replicas: int) -> nn.Module:
    return client.DataParallelWithCallback(client.convert_model(model), ["cpu"] * replicas)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(12, 3, 2, 2, generator=generator, dtype=torch.float64)


def run_sgd(model: nn.Module, steps: int, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Buffers:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x, factors = batch(step)
        optimizer.zero_grad()
        (forward(model, x) * factors).sum().backward()
        optimizer.step()
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def train_small_model_on_whole_batch(_members: int, steps: int) -> Buffers:
    return run_sgd(small_model(), steps, lambda model, x: model(x))


def train_small_model(connection: client.Connection, steps: int) -> Buffers:
    """SGD on one shard; further rounds sum the gradients over the members."""
    who = connection.member
    model = client.convert_model(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x, factors = (whole.chunk(who.world_size)[who.rank] for whole in batch(step))
        optimizer.zero_grad()
        (model(x) * factors).sum().backward()
        sum_gradients(model)
        optimizer.step()
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def sum_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            rows = Rows((1,), parameter.grad.reshape(1, 1, -1).numpy())
            total = transport_for(f"gradient of {name}", None).run_slave(rows).values
            parameter.grad.copy_(torch.from_numpy(total.copy()).view_as(parameter))


def fail_on_member_1(connection: client.Connection) -> Exception | str:
    """Member 1's training code raises inside `with connection`; the others are in a round."""
    layer = client.SynchronizedBatchNorm1d(3)
    layer.layer_name = "bn"
    try:
        with connection:
            if connection.rank == 1:
                _raise(ValueError("out of memory, say"))
            layer(torch.ones(2, 3))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    except StatsdBNError as error:
        return error
    return "nothing was raised"


def _raise(error: Exception) -> None:
    raise error


CRASHING_SCRIPT = """
import sys, client
client.connect(sys.argv[1], job=sys.argv[2], rank=1, world_size=2)
raise RuntimeError("the script crashed")
"""


def wait_for_a_crashing_script(_: client.Connection, endpoint: str, job: str) -> Exception | None:
    """Member 0 of another job; its member 1 is a script that crashes after connecting."""
    client.disconnect()
    arguments = [sys.executable, "-c", CRASHING_SCRIPT, endpoint, job]
    with (
        subprocess.Popen(arguments, stderr=subprocess.DEVNULL) as script,
        client.connect(endpoint, job=job, rank=0, world_size=2, round_timeout=30.0) as connection,
    ):
        try:
            client.SlavePipe(connection, "bn").run_slave(Rows((1,), np.ones((1, 2, 3))))
        except StatsdBNError as error:
            return error
        finally:
            script.wait(timeout=30)
    return None


def _layer(channels: int) -> nn.Module:
    layer = client.SynchronizedBatchNorm1d(channels)
    layer.layer_name = "bn"
    return layer


def one_value_per_channel(connection: client.Connection) -> str:
    """One member has one sample, the other none."""
    return error_of(_layer(3), torch.ones(1 - connection.rank, 3))


def other_channels(connection: client.Connection) -> str:
    channels = 64 if connection.rank == 0 else 32
    return error_of(_layer(channels), torch.ones(4, channels))


def bad_input_then_good(_: client.Connection) -> tuple[list[str], float]:
    layer = _layer(3)
    bad = [torch.ones(3), torch.ones(2, 4), torch.ones(2, 3, dtype=torch.int32)]
    kinds = [error_of(layer, x).split(":")[0] for x in bad]
    return kinds, float(layer(torch.eye(3)).sum())


def _nan_batch() -> torch.Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    x[1, 2] = float("nan")
    return x


def nan_in_one_channel(connection: client.Connection) -> np.ndarray:
    """Which outputs and running statistics are NaN; the NaN is in member 0's shard."""
    layer = _layer(3)
    output = layer(_nan_batch().chunk(2)[connection.rank])
    return torch.cat([output, layer.running_mean[None], layer.running_var[None]]).isnan().numpy()


def nan_on_whole_batch() -> list[np.ndarray]:
    layer = nn.BatchNorm1d(3)
    outputs = layer(_nan_batch()).chunk(2)
    return [
        torch.cat([output, layer.running_mean[None], layer.running_var[None]]).isnan().numpy() for output in outputs
    ]


def train_with_checkpoints(connection: client.Connection, steps: int, reentrant: bool) -> tuple[Buffers, object, int]:
    """SGD on one shard, with the whole model in a checkpoint; returns state, input gradients and the layers' rounds."""
    who = connection.member
    model = client.convert_model(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients, rounds = [], 0
    for step in range(steps):
        x, factors = (whole.chunk(who.world_size)[who.rank] for whole in batch(step))
        x.requires_grad_()
        optimizer.zero_grad()
        before = connection.rounds
        (checkpoint(model, x, use_reentrant=reentrant) * factors).sum().backward()
        rounds += connection.rounds - before
        sum_gradients(model)
        optimizer.step()
        gradients.append(x.grad)
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}, torch.stack(gradients), rounds


def _batches_of(member: int, n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(member)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(n)]


def _state(layer: nn.Module, inputs: list[torch.Tensor]) -> Buffers:
    tensors = dict(layer.named_buffers()) | {"weight gradient": layer.weight.grad, "bias gradient": layer.bias.grad}
    tensors |= {f"input gradient {number}": x.grad for number, x in enumerate(inputs)}
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def call_twice_in_a_checkpoint(connection: client.Connection, reentrant: bool) -> list[Buffers]:
    results = []
    for wrap in (lambda run, x: checkpoint(run, x, use_reentrant=reentrant), lambda run, x: run(x)):
        layer = _layer(3).double()
        (x,) = _batches_of(connection.rank, 1)
        (wrap(lambda x, layer=layer: layer(layer(x).tanh() * 2 + 1), x) ** 3).sum().backward()
        results.append(_state(layer, [x]))
    return results


def call_twice_on_an_empty_batch_in_a_checkpoint(
    connection: client.Connection, reentrant: bool, backend: str
) -> list[Buffers]:
    """Results with and without a checkpoint; member 0 has no samples, so both calls contribute equal rows."""
    torch.compiler.reset()
    results = []
    for wrap in (lambda run, x: checkpoint(run, x, use_reentrant=reentrant), lambda run, x: run(x)):
        layer = _layer(3).double()
        (x,) = _batches_of(connection.rank, 1)
        x = x.detach()[: 0 if connection.rank == 0 else None].requires_grad_()

        def twice(x: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
            return layer(layer(x).tanh() * 2 + 1)

        run = torch.compile(twice, fullgraph=True, dynamic=False, backend=backend) if backend else twice
        (wrap(run, x) ** 3).sum().backward()
        results.append(_state(layer, [x]))
    return results


class _Same(torch.autograd.Function):
    """Consumes a sequence number of autograd, even without a graph."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, grad):
        return grad


# Functions to checkpoint, by name; each calls `layer` once.
REGIONS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "layer": lambda layer, x: layer(x).tanh(),
    "after another function": lambda layer, x: layer(_Same.apply(x * 1.0)).tanh(),
    "before another function": lambda layer, x: _Same.apply(layer(x).tanh()) * 1.0,
}


def call_on_what_one_member_cannot_tell_apart(
    connection: client.Connection, region: str, reentrant: tuple[bool, ...], order: tuple[int, ...]
) -> list[Buffers]:
    """Results with nested checkpoints (`reentrant`) and without; member 0 contributes equal rows in all calls."""
    results = []
    for kinds in (reentrant, ()):
        layer = _layer(3).double()
        inputs = _batches_of(connection.rank, len(order))
        if connection.rank == 0:
            inputs = [inputs[0].detach().clone().requires_grad_() for _ in inputs]
        outputs = [_inside(kinds, lambda x, layer=layer: REGIONS[region](layer, x), x) for x in inputs]
        for number in order:
            ((number + 1) * outputs[number] ** 3).sum().backward()
        results.append(_state(layer, inputs))
    return results


def _inside(kinds: tuple[bool, ...], run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if not kinds:
        return run(x)
    return checkpoint(lambda x: _inside(kinds[1:], run, x), x, use_reentrant=kinds[0])


def checkpoint_that_begins_before_what_learns(connection: client.Connection, steps: int) -> tuple[int, int]:
    """Rounds, and batches tracked, of a layer with an output without gradient."""
    layer = _layer(3).double().requires_grad_(requires_grad=False)
    head = nn.Linear(3, 2).double()
    for x in _batches_of(connection.rank, steps):
        checkpoint(lambda x: head(layer(x)).sigmoid(), x.detach(), use_reentrant=False).sum().backward()
    return connection.rounds, int(layer.num_batches_tracked)


def pipeline_of_checkpoints(connection: client.Connection, reentrant: bool) -> list[Buffers]:
    results = []
    for wrap in (lambda run, x: checkpoint(run, x, use_reentrant=reentrant), lambda run, x: run(x)):
        layer = _layer(3).double()
        inputs = _batches_of(connection.rank, 3)
        losses = []
        for kind, number in ("F0", "F1", "B0", "F2", "B1", "B2"):
            if kind == "F":
                losses.append((wrap(layer, inputs[int(number)]) ** 3).sum())
            else:
                losses[int(number)].backward()
        results.append(_state(layer, inputs))
    return results


def walk_a_checkpoint_twice(connection: client.Connection) -> tuple[list[list[np.ndarray]], list[np.ndarray], int]:
    layer = _layer(3).double()
    (x,) = _batches_of(connection.rank, 1)
    loss = (checkpoint(layer, x, use_reentrant=False) ** 3).sum()
    leaves = (x, layer.weight, layer.bias)
    found = [[g.numpy() for g in torch.autograd.grad(loss, leaves, retain_graph=True)] for _ in range(2)]
    rounds = connection.rounds
    expected = torch.autograd.grad((layer(x) ** 3).sum(), leaves)
    return found, [gradient.numpy() for gradient in expected], rounds


def forward_in_a_backward_hook(connection: client.Connection) -> tuple[int, int]:
    layer = _layer(3).double()
    x, other = _batches_of(connection.rank, 2)
    output = layer(x)

    def hook(_: torch.Tensor) -> None:
        with torch.no_grad():
            layer(other)

    output.register_hook(hook)
    (output**3).sum().backward()
    return connection.rounds, int(layer.num_batches_tracked)


def _network(momentum: float | None) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.SiLU()
    last = nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3, momentum=momentum)
    return client.convert_model(nn.Sequential(*first, *last).double())


def _trained(run: nn.Module, model: nn.Module, member: int, steps: int) -> Buffers:
    """Steps on this member's shard, then eval: weights, buffers, the last input gradient, the eval output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, factors = (whole.chunk(2)[member] for whole in batch(step))
        x = x.clone().requires_grad_()
        optimizer.zero_grad()
        (run(x) * factors).sum().backward()
        optimizer.step()
    run.eval()
    tensors = model.state_dict() | {"input gradient": x.grad, "eval": run(x)}
    return {name: value.detach().numpy().copy() for name, value in tensors.items()}


def train_compiled(connection: client.Connection, backend: str, momentum: float | None, steps: int) -> list[Buffers]:
    torch.compiler.reset()
    model = _network(momentum)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found = _trained(compiled, model, connection.rank, steps)
    model = _network(momentum)
    return [found, _trained(model, model, connection.rank, steps)]


def train_with_member_0_compiled(connection: client.Connection, backend: str, steps: int) -> list[Buffers]:
    """First member 0 is compiled and member 1 eager, then both members are eager."""
    torch.compiler.reset()
    member = connection.rank
    model = _network(0.1)
    run = torch.compile(model, fullgraph=True, backend=backend) if member == 0 else model
    found = _trained(run, model, member, steps)
    model = _network(0.1)
    return [found, _trained(model, model, member, steps)]


class _Branches(nn.Module):
    """Layers "a", "b" and "c", in this order, that do not depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = (nn.BatchNorm1d(3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.a(x), self.b(x * 2), self.c(x * 3)
        return third.sin() + first.cos() * second.tanh()


def order_of_compiled_branches(connection: client.Connection, backend: str) -> list[str]:
    torch.compiler.reset()
    order = []
    begin = connection.round

    def recorded(layer: str, *arguments: object, **options: object) -> object:
        order.append(layer)
        return begin(layer, *arguments, **options)

    connection.round = recorded
    model = client.convert_model(_Branches())
    x = torch.randn(2 + 5 * connection.rank, 3, requires_grad=True)
    (torch.compile(model, fullgraph=True, backend=backend)(x) ** 2).sum().backward()
    return order


def compiled_twice_on_the_same_input(connection: client.Connection, backend: str) -> tuple[int, int]:
    """The number of rounds, and the number of batches that the layer has tracked."""
    torch.compiler.reset()
    layer = _layer(3)
    run = torch.compile(lambda x: layer(x).sin() + layer(x).cos(), fullgraph=True, backend=backend)
    x = torch.randn(4, 3, requires_grad=True)
    (run(x) ** 2).sum().backward()
    return connection.rounds, int(layer.num_batches_tracked)


def compiled_masks(connection: client.Connection, backend: str) -> list[Buffers]:
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(connection.rank)
    x = torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) > 0.4
    found: list[Buffers] = [{}, {}]
    for options in ({"affine": False}, {"track_running_stats": False}, {"eps_mode": "clamp", "eps": 0.9}):
        for result, backend_of in zip(found, (backend, None), strict=True):
            layer = client.SynchronizedBatchNorm1d(3, dtype=torch.float64, **options)
            layer.layer_name = "bn"
            run = torch.compile(layer, fullgraph=True, backend=backend_of) if backend_of else layer
            leaf = x.clone().requires_grad_()
            output = run(leaf, mask=mask)
            (output**3).sum().backward()
            tensors = {"output": output, "gradient": leaf.grad, **dict(layer.named_buffers())}
            result |= {f"{options} {name}": tensor.detach().numpy().copy() for name, tensor in tensors.items()}
    return found


def compiled_masks_in_eval(connection: client.Connection, backend: str) -> tuple[list[Buffers], int]:
    """Without running statistics, eval uses the unmasked positions of the batch."""
    torch.compiler.reset()
    layer = client.SynchronizedBatchNorm1d(3, track_running_stats=False).double().eval()
    results = []
    for run in (torch.compile(layer, fullgraph=True, backend=backend), layer):
        (x,) = _batches_of(connection.rank, 1)
        output = run(x, torch.arange(len(x)) % 3 > 0)
        (output**3).sum().backward()
        results.append({"output": output.detach().numpy(), "gradient": x.grad.numpy()})
    return results, connection.rounds


def backward_through_compiled_again(
    connection: client.Connection, backend: str, who: tuple[int, ...], is_checkpointed: bool
) -> tuple[list[str], Buffers, Buffers]:
    """Phases of the rounds, and gradients of repeated backward passes: first compiled for `who`, then all eager."""
    torch.compiler.reset()
    phases = _recorded_phases(connection)
    results = []
    for members in (who, ()):
        layer = _layer(3).double()
        run = torch.compile(layer, fullgraph=True, backend=backend) if connection.rank in members else layer
        x, other = _batches_of(connection.rank, 2)
        loss = ((checkpoint(run, x, use_reentrant=False) if is_checkpointed else run(x)) ** 3).sum()
        gradients = torch.autograd.grad(loss, x, retain_graph=True)
        between = (run(other) ** 3).sum()
        gradients += torch.autograd.grad(loss * 2, x, retain_graph=True)
        gradients += torch.autograd.grad(between, other)
        gradients += torch.autograd.grad(loss * 3, x)
        results.append({f"{number}": gradient.numpy() for number, gradient in enumerate(gradients)})
    return phases, *results


def _recorded_phases(connection: client.Connection) -> list[str]:
    phases = []
    begin = connection.round

    def recorded(*arguments: object, **options: object) -> Round:
        found = begin(*arguments, **options)
        phases.append(found.key.phase)
        return found

    connection.round = recorded
    return phases


def compiled_checkpoint(connection: client.Connection, backend: str) -> list[tuple[Buffers, int]]:
    """State and rounds of a compiled model: in a checkpoint, with a checkpoint inside, and without a checkpoint."""
    torch.compiler.reset()
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.statsd_bn.exchange.default])
    results = []
    for kind in ("around", "inside", "none"):
        layer = _layer(3).double()

        def run(x: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
            return layer(x.sin()).tanh()

        def inside(x: torch.Tensor, run: Callable[..., torch.Tensor] = run) -> torch.Tensor:
            return checkpoint(run, x, use_reentrant=False, context_fn=keep)

        compiled = torch.compile(inside if kind == "inside" else run, fullgraph=True, backend=backend)
        (x,) = _batches_of(connection.rank, 1)
        before = connection.rounds
        output = checkpoint(compiled, x, use_reentrant=False) if kind == "around" else compiled(x)
        (output**3).sum().backward()
        results.append((_state(layer, [x]), connection.rounds - before))
    return results


def compiled_with_growing_batches(connection: client.Connection, backend: str) -> list[Buffers]:
    torch.compiler.reset()
    results: list[Buffers] = [{}, {}]
    for result, backend_of in zip(results, (backend, None), strict=True):
        layer = _layer(3).double()
        run = torch.compile(layer, fullgraph=True, backend=backend_of) if backend_of else layer
        for size in (2, 5, 1 + connection.rank, 7, 0):
            x = torch.linspace(-1, 2, 3 * size, dtype=torch.float64).view(size, 3).sin().requires_grad_()
            output = run(x)
            (output**3).sum().backward()
            result[f"{size}"], result[f"{size} gradient"] = output.detach().numpy(), x.grad.numpy()
        result |= {name: buffer.numpy() for name, buffer in layer.named_buffers()}
    return results


def export_in_eval(connection: client.Connection) -> int:
    model = _network(0.1).eval()
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
    return connection.rounds
