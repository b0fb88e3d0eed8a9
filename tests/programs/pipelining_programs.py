"""What member processes do in `test_parallelism.py`: two stages of a model, and two processes for each, over gloo."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import client
from programs.ddp_programs import keep, process_group
from programs.member_programs import Buffers, state

STEPS = 3
CHUNKS = 4
SAMPLES = 24
FEATURES = (6, 8, 5)
SHARES = 2
STAGES = len(FEATURES) - 1

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def train(connection: client.Connection, store: str, schedule: str) -> tuple[int, Buffers]:
    """One stage, with one share of each micro-batch: its number, and its state in the end."""
    with process_group(store, connection):
        mesh = init_device_mesh("cpu", (SHARES, STAGES), mesh_dim_names=("share", "stage"))
        share, number = mesh.get_coordinate()
        part = client.convert_model(stage(number), group=client.Group(f"stage {number}", SHARES), chunks=CHUNKS)
        groups = {dimension: keep(mesh.get_group(dimension)) for dimension in mesh.mesh_dim_names}
        parallel = DistributedDataParallel(part, process_group=groups["share"])
        shapes = {"input_args": _like_a_micro_batch(number), "output_args": _like_a_micro_batch(number + 1)}
        runner = SCHEDULES[schedule](
            PipelineStage(parallel, number, STAGES, torch.device("cpu"), **shapes, group=groups["stage"]),
            n_microbatches=CHUNKS,
            loss_fn=_loss,
            scale_grads=False,
        )
        optimizer = _optimizer(part)
        for step in range(STEPS):
            x, factors = (whole.chunk(SHARES)[share] for whole in _batch(step))
            optimizer.zero_grad()
            runner.step(*([x] if number == 0 else []), **({"target": factors} if number == STAGES - 1 else {}))
            for parameter in part.parameters():
                parameter.grad.mul_(SHARES)  # the sum; DistributedDataParallel gives the mean
            optimizer.step()
    return number, state(part)


def train_micro_batch_by_micro_batch() -> list[Buffers]:
    """The same by one process, with both shares of each micro-batch: the state of each stage."""
    stages = [client.convert_model(stage(number), chunks=CHUNKS) for number in range(STAGES)]
    model = nn.Sequential(*stages)
    optimizer = _optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, factors in zip(*(_micro_batches(whole) for whole in _batch(step)), strict=True):
            _loss(model(x), factors).backward()
        optimizer.step()
    return [state(part) for part in stages]


def stage(number: int) -> nn.Module:
    torch.manual_seed(number)
    taken, given = FEATURES[number : number + 2]
    layers = nn.Linear(taken, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, given, bias=False)
    return nn.Sequential(*layers, nn.BatchNorm1d(given), nn.Tanh()).double()


def _like_a_micro_batch(number: int) -> Tensor:
    """A tensor like the input of stage `number`. Without such tensors torch runs a stage to infer its output."""
    samples = SAMPLES // SHARES // CHUNKS
    return torch.empty(samples, FEATURES[number], dtype=torch.float64, device="meta", requires_grad=number > 0)


def _micro_batches(whole: Tensor) -> list[Tensor]:
    shares = [share.chunk(CHUNKS) for share in whole.chunk(SHARES)]
    return [torch.cat(parts) for parts in zip(*shares, strict=True)]


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, factors = (
        torch.randn(SAMPLES, features, generator=generator, dtype=torch.float64)
        for features in (FEATURES[0], FEATURES[-1])
    )
    return x, factors


def _loss(output: Tensor, factors: Tensor) -> Tensor:
    return (output * factors).sum()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
