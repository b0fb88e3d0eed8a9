"""What one layer costs, forward and backward: kernel launches, copies, waits of the host, time and memory.

Our layer is compared with `nn.BatchNorm2d`, which is not synchronised, and with torch's `SyncBatchNorm`, in a process
group of one rank. A single rank waits for no other, so only the layer's own costs count.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn

from gpu_report import measuring, variants
from gpu_report.step import Step
from gpu_report.variants import Variant

SHAPES = [(32, 64, 112, 112), (32, 256, 56, 56), (32, 512, 7, 7), (2, 64, 7, 7)]
SMALL_SHAPES = [(2, 4, 3, 3)]

# Largest difference from nn.BatchNorm2d in float64, as a share of the largest value: bfloat16 has 8 significant bits,
# and float32 results are sums of 400,000 values.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2.0**-7}

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

WARM_UP = 3

# Layers in a row, so that one backward pass switches to autograd's thread once for all of them.
IN_A_ROW = 10

Results = dict[str, Tensor]


def run(step: Step) -> None:
    """Measures each variant with each shape, type and layout, and compares the results."""
    measuring.check_counts(step)
    with variants.in_a_world_of_one(step) as of_all:
        for shape, dtype, layout in product(step.pick(SHAPES, SMALL_SHAPES), TOLERANCES, FORMATS):
            case = Case(step, shape, dtype, layout)
            expected = case.expected()
            for variant in of_all:
                with step.attempt(f"{variant.name} runs, {case.title}"), variant.entered():
                    case.measure(variant, expected)
            del case, expected
            if step.device.type == "cuda":
                torch.cuda.empty_cache()


class Case:
    """Input of one shape, type and layout, with a gradient of the output and with parameters that are not 1 and 0."""

    def __init__(self, step: Step, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
        self.step = step
        self.dtype = dtype
        self.of = {"shape": str(shape), "dtype": str(dtype).removeprefix("torch."), "layout": layout}
        self.title = ", ".join(self.of.values())
        chance = torch.Generator(step.device).manual_seed(0)

        def values(size: tuple[int, ...]) -> Tensor:
            return torch.randn(size, device=step.device, generator=chance)

        self.x = values(shape).mul_(2).add_(1).to(dtype).contiguous(memory_format=FORMATS[layout]).requires_grad_()
        self.gradient = values(shape).to(dtype).contiguous(memory_format=FORMATS[layout])
        self.weight, self.bias = values(shape[1:2]), values(shape[1:2])

    def layer(self, make: Callable[[int], nn.Module]) -> nn.Module:
        """Returns a layer with this case's parameters."""
        layer = make(self.x.shape[1]).to(self.step.device)
        with torch.no_grad():
            layer.weight.copy_(self.weight)
            layer.bias.copy_(self.bias)
        return layer

    def expected(self) -> Results:
        """Returns what `nn.BatchNorm2d` computes in float64."""
        x = self.x.detach().double().requires_grad_()
        return _results(self.layer(nn.BatchNorm2d).double(), x, self.gradient.double())

    def measure(self, variant: Variant, expected: Results) -> None:
        """Compares the results of one variant, and records its costs."""
        step, layer, of = self.step, self.layer(variant.make), {**self.of, "layer": variant.name}
        with variants.rounds_on_device() as rounds:
            found = _results(layer, self.x, self.gradient)
        self._compare(variant, found, expected)
        del found

        def once() -> None:
            self.x.grad = None
            layer(self.x).backward(self.gradient)

        for _ in range(WARM_UP):
            once()
        counts, _ = measuring.counted(step.device, once, step.pick(5, 1))
        if variant.name == variants.ON_DEVICE:
            step.check(
                f"{variant.name}: rows stay there, {self.title}", rounds.number == 2, f"{rounds.number} of 2 rounds"
            )
            step.check(
                f"{variant.name}: the host does not wait, {self.title}",
                not counts.waits,
                f"{counts.waits} waits per call",
            )
        elif variant.name == variants.OVER_HOST:
            step.check(
                f"{variant.name}: rows leave the device, {self.title}",
                rounds.number == 0,
                f"{rounds.number} rounds on it",
            )

        def in_a_row() -> None:
            self.x.grad = None
            output = self.x
            for _ in range(IN_A_ROW):
                output = layer(output)
            output.backward(self.gradient)

        forward = measuring.host_microseconds(step.device, lambda: layer(self.x), step.pick(20, 2))
        row = measuring.host_microseconds(step.device, in_a_row, step.pick(4, 1)) / IN_A_ROW
        host = measuring.host_microseconds(step.device, once, step.pick(20, 2))
        device = measuring.device_microseconds(step.device, once, step.pick(20, 2))
        self.x.grad = None  # as it is when a pass begins
        peak = measuring.peak_bytes(step.device, once)
        step.figure("launches", counts.launches, **of)
        step.figure("copies", counts.copies, **of)
        step.figure("copies to the host", counts.to_host, **of)
        step.figure("waits of the host", counts.waits, **of)
        step.figure("host", round(host, 1), "µs", **of)
        step.figure("host, forward only", round(forward, 1), "µs", **of)
        step.figure("host, of ten layers in a row", round(row, 1), "µs", **of)
        step.figure("device", round(device, 1), "µs", **of)
        step.figure("device busy", round(counts.busy, 1), "µs", **of)
        step.figure("peak memory", round(peak / 2**20, 3), "MiB", **of)

    def _compare(self, variant: Variant, found: Results, expected: Results) -> None:
        differences = {name: measuring.difference(found[name], value) for name, value in expected.items()}
        wrong = {name: share for name, share in differences.items() if not share <= TOLERANCES[self.dtype]}
        wrong |= {name: float("nan") for name in ("output", "input's gradient") if found[name].dtype != self.dtype}
        worst = max(differences, key=differences.__getitem__)
        self.step.check(
            f"{variant.name} computes what BatchNorm2d does, {self.title}",
            not wrong,
            ", ".join(f"{name} off by {share:.1e}" for name, share in (wrong or {worst: differences[worst]}).items()),
        )


def _results(layer: nn.Module, x: Tensor, gradient: Tensor) -> Results:
    x.grad = None
    output = layer(x)
    output.backward(gradient)
    gradients = {f"{name}'s gradient": parameter.grad for name, parameter in layer.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return {"output": output.detach(), "input's gradient": x.grad, **gradients, **buffers}
