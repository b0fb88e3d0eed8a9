"""Random networks with branches, which a compiler may reorder, and their results on the whole batch."""

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from support.subclasses import Functional

Results = dict[str, np.ndarray]

FEATURES = 6
CHANNELS = 4

# Size of the images in a network of convolutions.
HEIGHT, WIDTH = 2, 3

# Least number of images: inductor of torch 2.13 fails in a convolution's gradient if the batch is empty.
LEAST_IMAGES = 1


class Flat(Functional):
    """`Functional` for inputs of shape (N, C)."""

    def _check_input_dim(self, x: torch.Tensor) -> None:
        assert x.dim() == 2


class _Activated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class FlatActivated(_Activated, nn.BatchNorm1d):
    """For inputs of shape (N, C)."""


class ImageActivated(_Activated, nn.BatchNorm2d):
    """For inputs of shape (N, C, H, W)."""


# Layer classes by whether the network has convolutions. The last class of each tuple is not used with a cumulative
# average: the compiler does not know the value of `num_batches_tracked`.
KINDS = {False: (nn.BatchNorm1d, FlatActivated, Flat), True: (nn.BatchNorm2d, ImageActivated, Functional)}


# Widths of narrow and wide branches: inductor orders branches by the memory that they need.
WIDTHS = (4, 8, 64, 256)


@dataclass
class Network:
    seed: int  # determines all other fields
    ranks: int
    branches: list[tuple[int, list[int]]] = field(init=False)
    momentum: float | None = field(init=False)  # of all layers
    has_images: bool = field(init=False)  # samples become images, for convolutions
    kinds: list[type[nn.Module]] = field(init=False)  # the class of each layer
    dynamic: bool | None = field(init=False)  # of torch.compile
    is_checkpointed: bool = field(init=False)  # the compiled model runs in a checkpoint
    batches: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        uses = [layer for layer in range(2) for _ in range(draw.randint(1, 3))]
        draw.shuffle(uses)
        self.branches = []
        while uses:
            taken = [uses.pop() for _ in range(min(len(uses), draw.randint(1, 2)))]
            self.branches.append((draw.choice(WIDTHS), taken))
        self.momentum = draw.choice((0.1, None))
        self.dynamic = draw.choice((False, False, None, True))
        self.is_checkpointed = draw.random() < 0.25
        self.batches = [[draw.choice((0, 2, 3, 17, 256)) for _ in range(self.ranks)] for _ in range(2)]
        for sizes in self.batches:
            if sum(sizes) < 2:
                sizes[draw.randrange(self.ranks)] = 256
        # Drawn last, so that a seed's branches and batch sizes above do not depend on the draws below.
        kinds = [draw.randrange(2 if self.momentum is None else 3) for _ in range(2)]
        self.has_images = draw.random() < 0.5
        self.kinds = [KINDS[self.has_images][kind] for kind in kinds]
        if self.has_images:
            self.batches = [[size or LEAST_IMAGES for size in sizes] for sizes in self.batches]

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return _Model(self).double()

    def inputs(self, step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 10 + step)
        sizes = self.batches[step]
        return [torch.randn(size, FEATURES, generator=generator, dtype=torch.float64) for size in sizes]


class _Model(nn.Module):
    def __init__(self, network: Network) -> None:
        super().__init__()
        used = {layer for _, layers in network.branches for layer in layers}
        made = {f"{i}": network.kinds[i](CHANNELS, momentum=network.momentum) for i in sorted(used)}
        self.layers = nn.ModuleDict(made)
        self.has_images = network.has_images
        self.before = nn.ModuleList(self._before(width) for width, _ in network.branches)
        self.into = nn.ModuleList(self._into(width) for width, _ in network.branches)
        self.uses = [[f"{layer}" for layer in layers] for _, layers in network.branches]

    def _before(self, width: int) -> nn.Module:
        if not self.has_images:
            return nn.Linear(FEATURES, width)
        return nn.Sequential(nn.Unflatten(1, (1, HEIGHT, WIDTH)), nn.Conv2d(1, width, 3, padding=1))

    def _into(self, width: int) -> nn.Module:
        # No bias before a batch norm: its gradient is 0 up to rounding.
        if self.has_images:
            return nn.Conv2d(width, CHANNELS, 2, bias=False)
        return nn.Linear(width, CHANNELS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for i, uses in enumerate(self.uses):
            y = self.into[i](self.before[i](x).tanh())
            for nr, layer in enumerate(uses):
                y = self.layers[layer](y * (1 + 0.5 * nr)).sin()
            total = total + (i + 1) * y
        return total


def loss(output: torch.Tensor) -> torch.Tensor:
    """A sum over samples, so that the ranks' gradients add up to the whole batch's."""
    return (output**3 + output).sum()


def whole_batch(network: Network) -> Results:
    """Results of one process for the whole batch, under the names of the ranks' results."""
    model = network.model()
    found: Results = {}
    for step in range(len(network.batches)):
        shards = network.inputs(step)
        x = torch.cat(shards).requires_grad_()
        output = model(x)
        loss(output).backward()
        sizes = network.batches[step]
        for rank, (y, grad) in enumerate(zip(output.split(sizes), x.grad.split(sizes), strict=True)):
            found |= {f"{step}/{rank}/output": y.detach().numpy(), f"{step}/{rank}/input gradient": grad.numpy()}
    return found | state(model)


def state(model: nn.Module) -> Results:
    """Copies of the buffers and of the parameters' gradients; other threads of the process continue to train."""
    found = {name: buffer.numpy().copy() for name, buffer in model.named_buffers()}
    return found | {f"gradient {name}": p.grad.numpy().copy() for name, p in model.named_parameters()}
