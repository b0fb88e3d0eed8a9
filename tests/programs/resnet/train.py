"""A small ResNet under torchrun (`ENDPOINT FILE`) with the fault that FILE names; it trains until it is killed."""

import sys
import time
from itertools import count
from pathlib import Path

import torch
from loader import Loader
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import client

CLASSES, WIDTH = 10, 8

# The ranks with faults. The tests and the pictures name the same ranks and steps.
SLOW_RANK, SLOW_SECONDS = 1, 0.15
SICK_RANK, SICK_LAYER, SICK_STEP = 2, "layer1.0.bn2", 20

# Some ten steps a second, so that a person or a test can follow them.
PAUSE_SECONDS = 0.03


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = nn.Sequential()
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet(nn.Module):
    """ResNet-18 for images of 16 x 16, with an eighth of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH)
        widths = [WIDTH, WIDTH, 2 * WIDTH, 4 * WIDTH, 8 * WIDTH]
        for stage in range(1, 5):
            stride = 1 if stage == 1 else 2
            layers = [Block(widths[stage - 1], widths[stage], stride), Block(widths[stage], widths[stage], 1)]
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
        self.fc = nn.Linear(widths[4], CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


def main(endpoint: str, fault: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = client.convert_model(ResNet())
    if fault.read_text() == "nan" and rank == SICK_RANK:
        plant_nan(model.get_submodule(SICK_LAYER))
    # Without the broadcast of buffers, which are equal anyway, all ranks that wait do so in batch norm.
    model = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with client.connect(endpoint, job="resnet18"):
        for images, labels in Loader(rank, fault):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(PAUSE_SECONDS + SLOW_SECONDS * (fault.read_text() == "slow" and rank == SLOW_RANK))


def plant_nan(layer: nn.Module) -> None:
    """One NaN in the layer's input in step SICK_STEP."""
    calls = count()

    def spoil(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if next(calls) != SICK_STEP:
            return None
        x = inputs[0].clone()
        x[0, 1, 0, 0] = torch.nan
        return (x,)

    layer.register_forward_pre_hook(spoil)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
