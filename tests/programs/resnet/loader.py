"""The data of `train.py`: images of stripes with a direction per class, and faults of one rank's data."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch

BATCH, SIZE, CLASSES = 8, 16, 10

TRIPLED_RANK, HUNG_RANK = 1, 3


class Loader:
    """Endless batches of a rank. The file `fault` may say "tripled" (one rank's images) or "hung" (one rank waits)."""

    def __init__(self, rank: int, fault: Path) -> None:
        self.rank, self.fault = rank, fault
        self.chance = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            labels = torch.randint(CLASSES, (BATCH,), generator=self.chance)
            yield torch.stack([self.decode(int(label)) for label in labels]), labels

    def decode(self, label: int) -> torch.Tensor:
        while self.fault.read_text() == "hung" and self.rank == HUNG_RANK:
            time.sleep(0.1)
        angle = torch.tensor(torch.pi * label / CLASSES)
        at = torch.arange(SIZE) / 2
        stripes = torch.sin(at[:, None] * torch.sin(angle) + at * torch.cos(angle))
        image = stripes + 0.5 * torch.randn(SIZE, SIZE, generator=self.chance)
        is_tripled = self.fault.read_text() == "tripled" and self.rank == TRIPLED_RANK
        return (3 * image if is_tripled else image)[None]
