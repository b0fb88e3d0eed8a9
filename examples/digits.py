"""The digits, their order and the network, the same in every training of the demo.

Nothing here depends on the number of processes, so two trainings differ only by their batch norm.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH = 8

# The remaining fifth of the 1,797 images is for the test.
TRAINING_IMAGES = 1437

# Seed of the split, the initial weights and the order.
SEED = 0

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Images:
    """Handwritten digits.

    Attributes:
        pixels: (N, 1, 8, 8), from 0 to 1.
        labels: (N,), from 0 to 9.
    """

    pixels: Tensor
    labels: Tensor


def load(device: torch.device | str = "cpu") -> tuple[Images, Images]:
    """Returns the images for training and for the test; shuffled, since the data set is sorted by writer."""
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(data.target, device=device)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    training, test = shuffled[:TRAINING_IMAGES], shuffled[TRAINING_IMAGES:]
    return Images(pixels[training], labels[training]), Images(pixels[test], labels[test])


def batches(steps: int) -> Iterator[Tensor]:
    """Yields the indices of `steps` whole batches, (BATCH,) each; each epoch has another order."""
    generator = torch.Generator().manual_seed(SEED)
    whole = TRAINING_IMAGES // BATCH
    for step in range(steps):
        if step % whole == 0:
            epoch = torch.randperm(TRAINING_IMAGES, generator=generator)[: whole * BATCH].view(whole, BATCH)
        yield epoch[step % whole]


def network() -> nn.Sequential:
    """Returns a small convolutional network, with the same initial weights each time.

    Its last batch norm follows a dense layer, with one value per image and channel, so two images give a mean of two
    values. It has SiLU, not ReLU, because a rounding error across ReLU's kink grows 10,000-fold in one step, and would
    hide whether two trainings are equal up to rounding.
    """
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64, bias=False),
        nn.BatchNorm1d(64),
        nn.SiLU(),
        nn.Linear(64, 10),
    )


def accuracy(state: State, test: Images) -> float:
    """Returns the share of `test` that the network with the weights and statistics of `state` recognises."""
    model = network()
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        return float((model(test.pixels).argmax(1) == test.labels).float().mean())
