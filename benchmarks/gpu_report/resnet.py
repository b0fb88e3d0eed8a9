"""ResNet with bottlenecks (He and others, 2015), with the stride in the 3x3 convolutions, as is usual now."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

EXPANSION = 4

MakeNorm = Callable[[int], nn.Module]


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut.

    The last scale of the branch starts at 0, so that the branches of a new network add nothing to the shortcuts:
    rounding differences between two kinds of layers then do not grow with the depth.
    """

    def __init__(self, channels: int, width: int, stride: int, norm: MakeNorm) -> None:
        super().__init__()
        out = width * EXPANSION
        self.branch = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            norm(out),
        )
        nn.init.zeros_(self.branch[-1].weight)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), norm(out))
            if (stride, channels) != (1, out)
            else nn.Identity()
        )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, channels, H, W) to (N, 4 * width, H / stride, W / stride)."""
        output: Tensor = self.activation(self.branch(x) + self.shortcut(x))
        return output


def resnet(depths: Sequence[int], width: int, classes: int, norm: MakeNorm) -> nn.Sequential:
    """Returns a new network.

    Args:
        depths: blocks of each stage, (3, 4, 6, 3) for ResNet-50.
        width: channels of the first stage's inner convolutions, 64 for ResNet-50.
        classes: outputs.
        norm: makes a normalisation layer for a number of channels.
    """
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        norm(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *_blocks(depths, width, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width * EXPANSION << len(depths) - 1, classes),
    )


def _blocks(depths: Sequence[int], width: int, norm: MakeNorm) -> Iterator[Bottleneck]:
    channels = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            yield Bottleneck(channels, width << stage, stride, norm)
            channels = EXPANSION * width << stage
