"""What synchronised batch norm costs in a training step of ResNet-50, in bfloat16 and channels_last.

All batch norms of a network are of one kind, in a process group of one rank, so there are no waits for other ranks. The
trace has two steps with our layers and rows that stay on the device; chrome://tracing and ui.perfetto.dev open it.
"""

import torch
from torch import Tensor, nn

from gpu_report import measuring, variants
from gpu_report.resnet import resnet
from gpu_report.step import Step
from gpu_report.variants import Variant

DEPTHS, WIDTH, CLASSES, IMAGE = (3, 4, 6, 3), 64, 1000, 224
TINY_DEPTHS, TINY_WIDTH, TINY_CLASSES, TINY_IMAGE = (1, 1), 4, 10, 32
BATCHES = (32, 256)
TINY_BATCHES = (2,)

# Largest relative differences of losses and running statistics from nn.BatchNorm2d's: each activation is rounded to
# bfloat16's 8 significant bits, and two kinds of layers round some activations differently.
LOSS_TOLERANCE = 0.01
BUFFER_TOLERANCE = 0.05

# Steps before the measurement; their losses are compared.
FIRST_STEPS = 4
LEARNING_RATE = 0.01

TRACE = "two-steps.json.gz"


def run(step: Step) -> None:
    """Trains with each kind of layer at each batch size, and compares the first steps with the plain layers'."""
    batches = step.pick(BATCHES, TINY_BATCHES)
    with variants.in_a_world_of_one(step) as of_all:
        for batch in batches:
            plain: dict[str, Tensor] = {}
            for variant in of_all:
                with step.attempt(f"{variant.name} trains, batch {batch}"), variant.entered():
                    first = _train(step, variant, batch, plain, has_trace=batch == batches[0])
                    plain = first if variant is of_all[0] else plain
                if step.device.type == "cuda":
                    torch.cuda.empty_cache()


def _train(step: Step, variant: Variant, batch: int, plain: dict[str, Tensor], *, has_trace: bool) -> dict[str, Tensor]:
    """Returns the results of the first steps; the network is freed even if it cannot train."""
    training = Training(step, variant, batch)
    first = training.first_steps()
    if plain:
        training.compare(first, plain)
    training.measure(has_trace=has_trace)
    return first


class Training:
    """A network, its optimizer and a batch of noise."""

    def __init__(self, step: Step, variant: Variant, batch: int) -> None:
        self.step, self.variant = step, variant
        self.title = f"batch {batch}"
        self.of = {"batch": batch, "layers": variant.name}
        torch.manual_seed(0)
        depths, width, classes, image = step.pick(
            (DEPTHS, WIDTH, CLASSES, IMAGE), (TINY_DEPTHS, TINY_WIDTH, TINY_CLASSES, TINY_IMAGE)
        )
        network = resnet(depths, width, classes, variant.make)
        self.network = network.to(step.device, memory_format=torch.channels_last)  # type: ignore[call-overload] # torch has no type for this
        self.nr_layers = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())  # noqa: SLF001 - torch's base of all kinds
        self.optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE, momentum=0.9)
        images = torch.randn(batch, 3, image, image, device=step.device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(classes, (batch,), device=step.device)

    def once(self) -> Tensor:
        """Makes one step and returns the loss without waiting for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.step.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.network(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def first_steps(self) -> dict[str, Tensor]:
        """Makes the first steps; returns their losses, and the layers' running statistics after the first one."""
        with variants.rounds_on_device() as rounds:
            losses = [self.once()]
        buffers = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        if self.variant.name == variants.ON_DEVICE:
            expected = 2 * self.nr_layers
            self.step.check(
                f"each layer has a round on the device forward and backward, {self.title}",
                rounds.number == expected,
                f"expected {expected}, got {rounds.number}",
            )
        losses += [self.once() for _ in range(FIRST_STEPS - 1)]
        return {"losses": torch.stack(losses), **buffers}

    def compare(self, first: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
        """Compares the first steps with those of the plain network."""
        differences = {name: measuring.difference(first[name], value) for name, value in plain.items()}
        losses = differences.pop("losses")
        self.step.check(
            f"{self.variant.name}: the first losses are those of {variants.PLAIN}, {self.title}",
            losses <= LOSS_TOLERANCE,
            f"{[round(loss, 4) for loss in first['losses'].tolist()]}, off by {losses:.1e}",
        )
        worst = max(differences, key=differences.__getitem__)
        self.step.check(
            f"{self.variant.name}: the first running statistics are those of {variants.PLAIN}, {self.title}",
            all(share <= BUFFER_TOLERANCE for share in differences.values()),
            f"{worst} off by {differences[worst]:.1e}",
        )

    def measure(self, *, has_trace: bool) -> None:
        """Records the costs of a step."""
        step, device = self.step, self.step.device
        counts, profiler = measuring.counted(device, self.once, 2)
        if self.variant.name == variants.ON_DEVICE:
            step.check(
                f"{self.variant.name}: the host does not wait, {self.title}", not counts.waits, f"{counts.waits}"
            )
            if has_trace:
                profiler.export_chrome_trace(str(step.output / TRACE))
        runs = step.pick(10, 1)
        step.figure("step", measuring.device_microseconds(device, self.once, runs) / 1e3, "ms", **self.of)
        step.figure("host", measuring.host_microseconds(device, self.once, runs) / 1e3, "ms", **self.of)
        self.optimizer.zero_grad(set_to_none=True)  # as it is when a step begins
        step.figure("peak memory", measuring.peak_bytes(device, self.once) / 2**20, "MiB", **self.of)
        step.figure("launches", counts.launches, **self.of)
        step.figure("waits of the host", counts.waits, **self.of)
