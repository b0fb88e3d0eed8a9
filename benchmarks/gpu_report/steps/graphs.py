"""Whether CUDA graphs replay what eager training computes, autocast keeps its types, and no step waits for the device.

Rows stay on the device: over a process group of one rank, and between virtual replicas. A stand-in for the graph
records operators and runs them again.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu_report import reference
from gpu_report.networks import Network, batch, check_close, compute_exactly, network
from gpu_report.recorder import Recorder
from gpu_report.step import Step
from gpu_report.variants import rounds_on_device
from gpu_report.worlds import Replicas, world_of_one
from support.no_host import host_looks_at_nothing

SAMPLES = 12
SHARES = (7, 5)
TRAINING_STEPS = 4
WARM_UP = 3

# Scale of the loss, which keeps the gradients above float16's smallest numbers, as a GradScaler would.
LOSS_SCALE = 64.0

# Two compared computations, each with 11 roundings to half precision: two convolutions, their two weights, two batch
# norms, two activations, a mean, the classifier and its weight.
HALF_ROUNDINGS = 2 * 11

Called = Callable[[Network], nn.Module]


def run(step: Step) -> None:
    """Runs all checks over a process group and in replicas. Graphs come last: a failed capture may break the device."""
    compute_exactly()
    device = step.device
    with world_of_one(device) as group:
        with step.attempt("world of one: a training step waits for nothing"):
            made = network(device, process_group=group)
            _train_without_waiting(step, made, Guarded(made))
        with step.attempt("replicas: a training step waits for nothing"):
            made = network(device)
            guarded = Guarded(made)
            _train_without_waiting(step, made, guarded, Replicas(guarded, device, SHARES))
        for dtype in (torch.bfloat16, torch.float16):
            with step.attempt(f"world of one: autocast to {dtype} keeps the types, and is within float64's bounds"):
                _autocast(step, network(device, process_group=group), dtype)
            with step.attempt(f"replicas: autocast to {dtype} is as near to one device as rounding allows"):
                _autocast_in_replicas(step, dtype)
        with step.attempt("world of one: replays of a graph give the bits of eager steps"):
            _replay(step, lambda: network(device, process_group=group), lambda made: made)
        if step.stand_in:
            step.note("the stand-in for a graph records only one thread, so replicas, which have several, are left out")
            return
        with step.attempt("replicas: replays of a graph give the bits of eager steps"):
            _replay(step, lambda: network(device), lambda made: Replicas(made, device, SHARES))


class Guarded(nn.Module):
    """A network whose forward passes run in a context, in the thread of each replica.

    Attributes:
        guard: makes the context manager.
    """

    def __init__(self, made: Network) -> None:
        super().__init__()
        self.made = made
        self.guard: Callable[[], AbstractContextManager[object]] = nullcontext

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        with self.guard():
            logits: Tensor = self.made(x)
        return logits


def _train_without_waiting(step: Step, made: Network, guarded: Guarded, called: nn.Module | None = None) -> None:
    """Trains; all steps but the first, in which ranks negotiate and buffers are allocated, may not wait."""
    called = called or guarded
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    with rounds_on_device() as rounds:
        for number in range(TRAINING_STEPS):
            images, classes = batch(step.device, SAMPLES, seed=number)
            with nothing_waits(step.device, guarded) if number else nullcontext():
                functional.cross_entropy(called(images), classes).backward()
                optimizer.step()
                optimizer.zero_grad()
    if not rounds.number:
        raise AssertionError("expected rows on the device, got none")


@contextmanager
def nothing_waits(device: torch.device, guarded: Guarded) -> Iterator[None]:
    """Makes an operation raise if the host waits for a GPU in it, or would wait if the tensors were on a GPU."""
    if device.type != "cuda":
        guarded.guard = host_looks_at_nothing  # a guard covers only the thread that enters it
        try:
            with host_looks_at_nothing():
                yield
        finally:
            guarded.guard = nullcontext
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Seen:
    """Input and output of a layer, and the gradients of both."""

    def __init__(self, layer: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        layer.register_forward_hook(self._note)

    def _note(self, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for name, tensor in (("input", inputs[0]), ("output", output)):
            self.tensors[name] = tensor.detach()
            tensor.register_hook(lambda grad, name=name: self.tensors.update({f"{name} gradient": grad}))


def _autocast(step: Step, made: Network, dtype: torch.dtype) -> None:
    """Checks that each layer has the types of torch's layer, and results within the bounds of the float64 reference."""
    torchs = network(step.device, synchronised=False)
    layers = [module for module in made.modules() if isinstance(module, nn.BatchNorm2d)]
    seen = [Seen(layer) for layer in layers]
    seen_by_torch = [Seen(module) for module in torchs.modules() if isinstance(module, nn.BatchNorm2d)]
    for each in (made, torchs):
        _backward(step, each, dtype)
    for number, (layer, ours, theirs) in enumerate(zip(layers, seen, seen_by_torch, strict=True)):
        if ours.tensors["output"].dtype != theirs.tensors["output"].dtype or ours.tensors["input"].dtype != dtype:
            types = {name: tensor.dtype for name, tensor in ours.tensors.items()}
            raise AssertionError(f"layer {number}: expected {theirs.tensors['output'].dtype} of {dtype}, got {types}")
        x, grad = (ours.tensors[name].cpu() for name in ("input", "output gradient"))
        expected = reference.expected(x, grad, layer.weight.cpu(), layer.bias.cpu())
        found = {name: ours.tensors[name] for name in ("output", "input gradient")}
        found |= {f"{name} gradient": each.grad for name, each in layer.named_parameters()}
        found |= {"running mean": layer.running_mean, "running variance": layer.running_var}
        reference.distances({name: each.cpu() for name, each in found.items()}, expected)


def _autocast_in_replicas(step: Step, dtype: torch.dtype) -> None:
    """Compares with torch; each operation between input and output may round to half precision."""
    made, torchs = network(step.device), network(step.device, synchronised=False)
    found = _backward(step, Replicas(made, step.device, SHARES), dtype)
    expected = _backward(step, torchs, dtype)
    check_close(found, expected, HALF_ROUNDINGS, "output")
    for (name, ours), theirs in zip(made.named_parameters(), torchs.parameters(), strict=True):
        if ours.grad is None or theirs.grad is None or ours.grad.dtype != theirs.grad.dtype:
            raise AssertionError(f"gradient of {name}: expected {theirs.grad}, got {ours.grad}")


def _backward(step: Step, called: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns the output of a forward pass under autocast, after its backward pass."""
    images, classes = batch(step.device, SAMPLES)
    with torch.autocast(step.device.type, dtype):
        output: Tensor = called(images)
    (functional.cross_entropy(output.float(), classes) * LOSS_SCALE).backward()
    return output.detach()


def _replay(step: Step, make: Callable[[], Network], wrap: Called) -> None:
    eager, captured = make(), make()
    called = wrap(eager)
    images, classes = (each.clone() for each in batch(step.device, SAMPLES))
    images.requires_grad_()
    replay, results = _captured(step, captured, wrap(captured), images, classes)
    captured.load_state_dict(eager.state_dict())
    for number in range(TRAINING_STEPS):
        new_images, new_classes = batch(step.device, SAMPLES, seed=number)
        with torch.no_grad():
            images.copy_(new_images)
            classes.copy_(new_classes)
        replay()
        new_images.requires_grad_()
        eager.zero_grad()
        loss = functional.cross_entropy(called(new_images), new_classes)
        loss.backward()
        expected = {"loss": loss.detach(), "input gradient": new_images.grad, **_state(eager)}
        for name, found in {**results(), **_state(captured)}.items():
            if reference.bits(found) != reference.bits(expected[name]):
                difference = float((found.double() - expected[name].double()).abs().max())
                raise AssertionError(f"replay {number}: {name} differs from eager's, by up to {difference:.3g}")


def _state(made: Network) -> dict[str, Tensor]:
    gradients = {f"{name} gradient": each.grad for name, each in made.named_parameters() if each.grad is not None}
    return {**gradients, **dict(made.named_buffers())}


def _captured(
    step: Step, made: Network, called: nn.Module, images: Tensor, classes: Tensor
) -> tuple[Callable[[], None], Callable[[], dict[str, Tensor]]]:
    """Captures forward and backward; returns a function that replays them, and one that returns the last results."""
    losses = []

    def train() -> None:
        loss = functional.cross_entropy(called(images), classes)
        loss.backward()
        losses.append(loss.detach())

    def forget() -> None:
        made.zero_grad()
        images.grad = None
        losses.clear()

    with _side_stream(step.device):
        for _ in range(WARM_UP):
            train()
            forget()
    if step.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train()
        replay: Callable[[], None] = graph.replay
    else:
        recorder = Recorder()
        with recorder:
            train()
        replay = recorder.replay
    return replay, lambda: {"loss": losses[0], "input gradient": images.grad}


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """A side stream for the runs before a capture, as torch demands."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    within: AbstractContextManager[object] = torch.cuda.stream(stream)
    with within:
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
