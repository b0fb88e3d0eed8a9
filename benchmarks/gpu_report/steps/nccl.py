"""Whether two ranks train with DistributedDataParallel over NCCL on one GPU, with and without `torch.cuda.set_device`.

NCCL refuses two ranks on one GPU unless they claim different hosts. This step may fail for reasons outside of this
project. The stand-in trains over gloo.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from gpu_report import reference
from gpu_report.networks import batch, check_close, compute_exactly, network, roundings
from gpu_report.rank_processes import Rank, on_ranks
from gpu_report.step import Step
from gpu_report.variants import rounds_on_device
from gpu_report.worlds import rows_on

RANKS = 2
SAMPLES = 12
TRAINING_STEPS = 10

# Two layers, forward and backward.
ROUNDS = 4 * TRAINING_STEPS

# Limit for each training: on a GPU, and on the CPU, where other load may slow it.
WAIT_SECONDS = 16.0
STAND_IN_SECONDS = 100.0

# NCCL sees two hosts, and connects the ranks by TCP.
ENVIRONMENTS = [
    {
        "NCCL_HOSTID": f"gpu-report-{number}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_DEBUG": "WARN",
    }
    for number in range(RANKS)
]


def run(step: Step) -> None:
    """Trains with and without `set_device`, and once on the whole batch with torch's own layers."""
    compute_exactly()
    whole = network(step.device, synchronised=False)
    expected = torch.tensor(_train(whole, whole, step.device, slice(0, SAMPLES)))
    for sets_device in (True, False):
        way = f"{'with' if sets_device else 'without'} set_device"
        with step.attempt(f"{way}: both ranks train"):
            backend = step.pick("nccl", "gloo")
            found = on_ranks(
                step,
                program,
                RANKS,
                seconds=step.pick(WAIT_SECONDS, STAND_IN_SECONDS),
                environments=ENVIRONMENTS,
                backend=backend,
                sets_device=sets_device,
            )
            _check(step, way, found, expected, dict(whole.named_parameters()))


def program(rank: Rank) -> dict[str, Any]:
    """Trains on this rank's half of the batch."""
    compute_exactly()
    is_cuda = rank.device.type == "cuda"
    if is_cuda and rank.options["sets_device"]:
        torch.cuda.set_device(rank.device)
    with rank.process_group(rank.options["backend"]), rows_on(rank.device), rounds_on_device() as rounds:
        made = network(rank.device)
        wrapped = DistributedDataParallel(made, device_ids=[rank.device] if is_cuda else None)
        share = SAMPLES // rank.size
        losses = _train(made, wrapped, rank.device, slice(rank.number * share, (rank.number + 1) * share))
    state = {name: each.cpu() for name, each in made.state_dict().items()}
    return {"losses": losses, "state": state, "rounds": rounds.number}


def _train(made: nn.Module, called: nn.Module, device: torch.device, own: slice) -> list[float]:
    """Returns the loss of each step."""
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number in range(TRAINING_STEPS):
        images, classes = (each[own] for each in batch(device, SAMPLES, seed=number))
        loss = functional.cross_entropy(called(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def _check(step: Step, way: str, found: list[dict[str, Any]], expected: Tensor, parameters: dict[str, Tensor]) -> None:
    rounds = [each["rounds"] for each in found]
    step.check(f"{way}: all rows stay on the device", set(rounds) == {ROUNDS}, f"{rounds} of {ROUNDS} rounds")
    same = reference.has_equal_bits(found[0]["state"], found[1]["state"])
    step.check(f"{way}: both ranks have the same bits in parameters and buffers", same)
    bound = 2 * TRAINING_STEPS * roundings(SAMPLES)
    with step.attempt(f"{way}: losses equal the whole batch's"):
        losses = torch.tensor([each["losses"] for each in found]).mean(0)
        step.figure("largest difference", check_close(losses, expected, bound, "losses"), "of its bound", ranks=way)
    with step.attempt(f"{way}: parameters equal the whole batch's"):
        for name, parameter in parameters.items():
            check_close(found[0]["state"][name], parameter.detach().cpu(), bound, name)
