"""A small network for the steps that train one, and the rounding errors that its results may have."""

import math
from typing import Any

import torch
from torch import Tensor, nn

import client

CLASSES = 5
WIDTHS = (3, 8, 16)
KERNEL = 3


class Network(nn.Module):
    """Two convolutions with batch norm, and a classifier.

    The activations are smooth: near 0 the last bit of a ReLU's input would decide whether its gradient is 0.
    """

    def __init__(self) -> None:
        super().__init__()
        first, second, third = WIDTHS
        self.features = nn.Sequential(
            nn.Conv2d(first, second, KERNEL, padding=1, bias=False),
            nn.BatchNorm2d(second),
            nn.SiLU(),
            nn.Conv2d(second, third, KERNEL, stride=2, bias=False),
            nn.BatchNorm2d(third),
            nn.SiLU(),
        )
        self.classifier = nn.Linear(third, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits, shape (N, classes)."""
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


def network(device: torch.device, *, synchronised: bool = True, process_group: Any = None) -> Network:
    """Returns a network in training, with the same parameters each time.

    Args:
        device: of the parameters.
        synchronised: convert the layers; else they are torch's.
        process_group: of the converted layers.
    """
    torch.manual_seed(0)
    made = Network()
    if synchronised:
        client.convert_model(made, process_group=process_group)
    return made.to(device)


def batch(device: torch.device, nr_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns images and their classes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(nr_samples, WIDTHS[0], 15, 15, generator=generator) * 2 + 1
    classes = torch.randint(CLASSES, (nr_samples,), generator=generator)
    return images.to(device), classes.to(device)


def compute_exactly() -> None:
    """Makes convolutions compute in float32, as matrix products do by default, and in the same order each time."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def roundings(nr_samples: int) -> float:
    """Returns how often a value is rounded on its way through the network and back, at most.

    Each addition rounds once, and so does each of some ten operations around them. A convolution and the classifier add
    up their inputs, a gradient of a weight is a sum over all positions, and so are a layer's statistics. Sums over
    positions are added up as trees.
    """
    fan_ins = sum(KERNEL * KERNEL * width for width in WIDTHS[:-1]) + WIDTHS[-1]
    fan_outs = sum(KERNEL * KERNEL * width for width in WIDTHS[1:]) + CLASSES
    trees = 4 * len(WIDTHS) * math.log2(nr_samples * 15 * 15)
    return fan_ins + fan_outs + trees + 10 * len(WIDTHS)


def check_close(found: Tensor, expected: Tensor, nr_roundings: float, what: str) -> float:
    """Returns the largest difference, as a share of a bound: `nr_roundings` roundings of the largest expected value.

    Raises:
        AssertionError: the difference exceeds the bound, or types or shapes differ.
    """
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise AssertionError(
            f"{what}: expected {expected.dtype} of {tuple(expected.shape)}, got {found.dtype} of {tuple(found.shape)}"
        )
    bound = nr_roundings * torch.finfo(found.dtype).eps / 2 * float(expected.abs().max())
    difference = float((found.double() - expected.double()).abs().nan_to_num(nan=math.inf).max())
    if not difference <= bound:
        raise AssertionError(f"{what}: expected a difference of at most {bound:.3g}, got {difference:.3g}")
    return difference / bound if bound else 0.0
