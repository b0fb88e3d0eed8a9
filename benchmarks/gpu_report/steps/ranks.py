"""Whether several ranks on one GPU equal one rank with the whole batch, and all raise when they call different layers.

NCCL takes one rank per GPU, so the ranks gather over gloo, with their rows on the device. Then they use shared memory,
which `client.connect()` chooses on one host. Virtual replicas in one process get the same slices.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

import client
from client.transports import group_memory
from gpu_report import reference
from gpu_report.rank_processes import Rank, on_ranks
from gpu_report.reference import TooFar
from gpu_report.step import Step
from gpu_report.variants import rounds_on_device
from gpu_report.worlds import Replicas, rows_on
from statsd_bn.errors import StatsdBNError

CHANNELS = 16
POSITIONS = (7, 9)

# Samples of each rank; the second of four has none.
SIZES = {2: (4, 3), 4: (5, 0, 3, 4)}

# In float64 the order of an addition shows in the buffers.
KINDS = {
    "float32": (torch.float32, torch.contiguous_format),
    "bfloat16, channels_last": (torch.bfloat16, torch.channels_last),
    "float64": (torch.float64, torch.contiguous_format),
}
ROUNDS = 2 * len(KINDS)

# Limit for a part of the step on a GPU. The first part has to import torch.
FIRST_SECONDS = 20.0
WAIT_SECONDS = 12.0

# Limit for a part on the CPU, where other load may slow it.
STAND_IN_SECONDS = 100.0

BUFFERS = ("running mean", "running variance")

NAN = "the output is NaN before the error"
STAYED = "running statistics do not move"

Found = Mapping[str, Mapping[str, Tensor]]


def run(step: Step) -> None:
    """Runs each part on four ranks, and then compares replicas."""
    gloo: list[dict[str, Any]] = []
    with step.attempt("gloo: all ranks answer"):
        gloo = on_ranks(step, over_gloo, 4, seconds=step.pick(FIRST_SECONDS, STAND_IN_SECONDS))
    for size in SIZES if gloo else ():
        way, answers = f"gloo, {size} ranks", gloo[:size]
        _check(step, way, size, [answer[way] for answer in answers])
        numbers = [answer[f"{way}: rounds"] for answer in answers]
        step.check(f"{way}: all rows stay on the device", set(numbers) == {ROUNDS}, f"{numbers} of {ROUNDS} rounds")
    with step.attempt("ranks in different layers: all ranks answer"):
        _check_mismatch(step, on_ranks(step, part_ways, 4, seconds=step.pick(WAIT_SECONDS, STAND_IN_SECONDS)))
    with step.attempt("shared memory: all ranks answer"):
        found, transports = zip(
            *on_ranks(step, over_shared_memory, 4, seconds=step.pick(WAIT_SECONDS, STAND_IN_SECONDS)), strict=True
        )
        _check(step, "shared memory, 4 ranks", 4, found)
        reason = group_memory.unavailable_reason()
        what = f"over the server, since {reason}" if reason else "shared memory: rows reach the others in memory"
        step.check(what, set(transports) == {"server" if reason else "shared_memory"}, transports)
    for size, sizes in SIZES.items():
        with step.attempt(f"{size} replicas: they run"):
            replicas = _of_replicas(step, sizes)
            _check_near(step, f"{size} replicas", size, [replicas])
            ranks = gloo[0][f"gloo, {size} ranks"] if gloo else {}
            others = [kind for kind in ranks if _buffers(replicas[kind]) != _buffers(ranks[kind])]
            what = f"{size} replicas: running statistics have the bits of as many ranks"
            step.check(what, gloo and not others, "; ".join(others))


def over_gloo(rank: Rank) -> dict[str, Any]:
    """Returns this rank's results in each group, and the number of its rounds on the device."""
    found: dict[str, Any] = {}
    with rank.process_group("gloo") as world, rows_on(rank.device, also_over_gloo=True):
        for group, size in ((world, 4), (distributed.new_group([0, 1]), 2)):
            if rank.number < size:
                with rounds_on_device() as rounds:
                    found[f"gloo, {size} ranks"] = _of_slice(rank, SIZES[size], group)
                found[f"gloo, {size} ranks: rounds"] = rounds.number
    return found


def over_shared_memory(rank: Rank) -> tuple[Found, str]:
    """Returns this rank's results, and the name of the transport."""
    with (
        rank.process_group("gloo"),
        client.connect(job="gpu-report", round_timeout=rank.seconds, join_timeout=rank.seconds) as connection,
    ):
        return _of_slice(rank, SIZES[4], None), connection.transport


def part_ways(rank: Rank) -> dict[str, Any]:
    """Rank 1 calls another layer than the other ranks, after the first rounds of both layers."""
    with rank.process_group("gloo") as world, rows_on(rank.device, also_over_gloo=True):
        layers = [_layer("float32", name, rank.device, world) for name in ("stem.bn", "head.bn")]
        x = torch.randn(3, CHANNELS, *POSITIONS, device=rank.device)
        for layer in layers:
            layer(x)
        layer = layers[rank.number == 1]
        before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        started, error, is_nan = time.monotonic(), "no error", True
        try:
            is_nan = bool(layer(x).isnan().all())  # waits for the device, so that the next call raises
            layer(x)
        except StatsdBNError as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.monotonic() - started
        stayed = all(torch.equal(each, before[name]) for name, each in layer.named_buffers())
        return {"error": error, "seconds": seconds, NAN: is_nan, STAYED: stayed}


def _check(step: Step, way: str, size: int, found: Sequence[Found]) -> None:
    _check_near(step, way, size, found)
    others = [kind for kind in KINDS if len({_buffers(each[kind]) for each in found}) > 1]
    step.check(f"{way}: all have the same bits in their running statistics", not others, "; ".join(others))


def _check_near(step: Step, way: str, size: int, found: Sequence[Found]) -> None:
    """Checks the results of all ranks together, or of all replicas."""
    for kind in KINDS:
        x, grad = _whole(kind, sum(SIZES[size]))
        layer = _layer(kind, "", torch.device("cpu"))
        expected = reference.expected(x, grad, layer.weight, layer.bias)
        try:
            shares = reference.distances(_joined([each[kind] for each in found]), expected)
        except TooFar as error:
            step.check(f"{way}, {kind}: results equal the whole batch's", passed=False, detail=error)
        else:
            step.check(f"{way}, {kind}: results equal the whole batch's", passed=True)
            step.figure("largest error", max(shares.values()), "of its bound", ranks=way, input=kind)


def _joined(found: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Joins the ranks' slices, and adds their gradients of the parameters, to get the whole batch's results."""
    joined = {name: torch.cat([each[name] for each in found]) for name in ("output", "input gradient")}
    for name in ("weight gradient", "bias gradient"):
        joined[name] = torch.stack([each[name].double() for each in found]).sum(0).to(found[0][name].dtype)
    return joined | {name: found[0][name] for name in BUFFERS}


def _buffers(found: Mapping[str, Tensor]) -> tuple[bytes, ...]:
    return tuple(reference.bits(found[name]) for name in BUFFERS)


def _check_mismatch(step: Step, found: list[dict[str, Any]]) -> None:
    errors = [each["error"] for each in found]
    step.check(
        "ranks in different layers: all raise RoundMismatch",
        all(error.startswith("RoundMismatch: ") for error in errors),
        "\n".join(errors),
    )
    for what in (NAN, STAYED):
        step.check(
            f"ranks in different layers: {what}", all(each[what] for each in found), [each[what] for each in found]
        )
    step.figure("time until RoundMismatch", max(each["seconds"] for each in found), "s")


def _of_slice(rank: Rank, sizes: tuple[int, ...], group: Any) -> dict[str, dict[str, Tensor]]:
    """Returns what one call of a layer gives this rank, for each kind of input."""
    found = {}
    for kind in KINDS:
        x, grad = (each.split(sizes)[rank.number] for each in _whole(kind, sum(sizes)))
        layer = _layer(kind, kind, rank.device, group)
        found[kind] = _call(layer, layer, x.to(rank.device), grad.to(rank.device))
    return found


def _of_replicas(step: Step, sizes: tuple[int, ...]) -> dict[str, dict[str, Tensor]]:
    found = {}
    with rows_on(step.device):
        for kind in KINDS:
            x, grad = (each.to(step.device) for each in _whole(kind, sum(sizes)))
            layer = _layer(kind, kind, step.device)
            found[kind] = _call(layer, Replicas(layer, step.device, sizes), x, grad)
    return found


def _call(layer: nn.Module, called: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    output = called(x)
    output.backward(grad)
    found = {"output": output, "input gradient": x.grad, "weight gradient": layer.weight.grad}
    found |= {
        "bias gradient": layer.bias.grad,
        "running mean": layer.running_mean,
        "running variance": layer.running_var,
    }
    return {name: each.detach().cpu().clone() for name, each in found.items()}


def _layer(kind: str, name: str, device: torch.device, group: Any = None) -> nn.Module:
    dtype = torch.float64 if kind == "float64" else torch.float32
    layer: nn.Module = client.SynchronizedBatchNorm2d(CHANNELS, dtype=dtype, process_group=group)
    layer.layer_name = name
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1.5, 2.0, CHANNELS))
        layer.bias.copy_(torch.linspace(1.0, -1.0, CHANNELS))
    return layer.to(device)


def _whole(kind: str, nr_samples: int) -> list[Tensor]:
    """Returns input and gradient of the whole batch, on the host, the same in every process."""
    dtype, layout = KINDS[kind]
    generator = torch.Generator().manual_seed(len(kind))
    shape = nr_samples, CHANNELS, *POSITIONS
    parts = (torch.randn(shape, generator=generator, dtype=torch.float64) + shift for shift in (3, 0))
    return [part.to(dtype).contiguous(memory_format=layout) for part in parts]
