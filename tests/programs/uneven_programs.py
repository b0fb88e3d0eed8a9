"""Programs of members in `test_uneven_inputs.py`, and the same training in one process on the whole batch."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import client
from client.session.connection import Connection
from statsd_bn import Rows
from statsd_bn.errors import RoundMismatch
from support.sentences import client_log

PASSES = 2
ROW = Rows((1,), np.ones((1, 2, 3)))


def batch(member: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * member + number)
    return torch.randn(2 + member, 3, 4, generator=generator, dtype=torch.float64)


def model_() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(3, dtype=torch.float64)


def train_passes(connection: Connection, batches: tuple[int, ...]) -> tuple[list, list, list]:
    member = connection.rank
    model = client.convert_model(model_())
    outputs, gradients = [], []
    for number_of_pass in range(PASSES):
        with client.join(model):
            for number in range(batches[member]):
                x = batch(member, number + 10 * number_of_pass).requires_grad_()
                y = model(x)
                (y**3).sum().backward()
                outputs.append(y.detach().numpy())
                gradients.append(x.grad.numpy())
    return outputs, gradients, [buffer.numpy() for buffer in model.buffers()]


def step_behind_a_pass(connection: Connection) -> tuple[np.ndarray, np.ndarray]:
    """Output and input gradient of a step of all members after a pass that member 0 left first."""
    model = client.convert_model(model_())
    with client.join(model):
        for number in range(1 + 2 * connection.rank):
            (model(batch(connection.rank, number)) ** 3).sum().backward()
    x = batch(connection.rank, 50).requires_grad_()
    y = model(x)
    (y**3).sum().backward()
    return y.detach().numpy(), x.grad.numpy()


def average_in_a_pass(connection: Connection) -> list[str]:
    """The warnings of member 1, which averages gradients after member 0 has ended its pass."""
    model = client.convert_model(model_())
    with client_log() as lines, client.join(model):
        for number in range(1 + 2 * connection.rank):
            (model(batch(connection.rank, number)) ** 3).sum().backward()
            client.average_gradients(model)
    return [text for _, text in lines]


def step_before_a_pass(connection: Connection) -> str:
    """The error of a step that only member 1 runs before the block, while member 0 waits at its entrance."""
    model = client.convert_model(model_())
    try:
        if connection.rank:
            model(batch(1, 0))
        with client.join(model):
            return "went on without the other"
    except RoundMismatch as error:
        return str(error)


def passes_with_a_caught_exception(connection: Connection) -> int:
    """How often the statistics have moved; member 0 leaves its first pass of 3 batches after 2."""
    model = client.convert_model(model_())
    for number_of_pass in range(PASSES):
        try:
            with client.join(model):
                for number in range(3):
                    ends = (connection.rank, number_of_pass, number) == (0, 0, 2)
                    model("no batch" if ends else batch(connection.rank, number))
        except AttributeError:
            pass
    return int(model.num_batches_tracked)


def recalibrate_after_a_pass(connection: Connection) -> tuple[int, list[float]]:
    model = client.convert_model(model_())
    with client.join(model):
        for number in range(1 + connection.rank):
            model(batch(connection.rank, number))
    nr_batches = client.recalibrate(model, [batch(connection.rank, 0)])
    return nr_batches, model.running_mean.tolist()


def mini_batches_that_moved(connection: Connection) -> list[int]:
    """How often the statistics have moved after each pass, of 4 micro-batches for member 0 and of 2 for member 1."""
    model = client.convert_model(model_(), chunks=4)
    moved = []
    for _ in range(PASSES):
        with client.join(model):
            for number in range(4 if connection.rank == 0 else 2):
                model(batch(connection.rank, number))
        moved.append(int(model.num_batches_tracked))
    return moved


@dataclass
class Expected:
    """Each member's results: one entry per member in each list."""

    outputs: list[list[Tensor]] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)


def whole_batches(batches: tuple[int, ...]) -> Expected:
    """Torch's layer on all slices of each step; absent members keep their buffers."""
    members = range(len(batches))
    models = [model_() for _ in members]
    expected = Expected([[] for _ in members], [[] for _ in members])
    for number_of_pass in range(PASSES):
        for number in range(max(batches)):
            present = [member for member in members if number < batches[member]]
            slices = [batch(member, number + 10 * number_of_pass) for member in present]
            x = torch.cat(slices).requires_grad_()
            ys = [models[member](x) for member in present]
            (ys[0] ** 3).sum().backward()
            sizes = [len(slice_) for slice_ in slices]
            for member, y, grad in zip(present, ys[0].detach().split(sizes), x.grad.split(sizes), strict=True):
                expected.outputs[member].append(y)
                expected.gradients[member].append(grad)
    expected.states = [list(model.buffers()) for model in models]
    return expected


def train_under_one_join(connection: Connection, torchs: bool, least: int, rendezvous: str) -> tuple[str, str]:
    """Class and text of the error when passes of different lengths run under only one of the two joins."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=connection.rank, world_size=2)
    model = client.convert_model(nn.Sequential(nn.Conv1d(3, 3, 1), model_().float()))
    ddp = DistributedDataParallel(model)
    try:
        for _ in range(PASSES):
            with Join([ddp]) if torchs else client.join(ddp):
                for number in range(least + connection.rank):
                    (ddp(batch(connection.rank, number).float()) ** 3).mean().backward()
    except Exception as error:  # noqa: BLE001 - our error, or gloo's when the other rank has ended
        return type(error).__name__, str(error)
    finally:
        del ddp
        dist.destroy_process_group()
    return "", "nothing was wrong"
