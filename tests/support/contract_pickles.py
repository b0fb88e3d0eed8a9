"""The models whose pickles the contract keeps, and the training step to compare.

Pickles name `Functional` by this module, so it stays here. `tests/contract/make_pickles.py` wrote the pickles once.
Later code must load them: a failing test is no reason to write them again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

import client

CHANNELS = 3
SAMPLES = 4


class Functional(nn.BatchNorm2d):
    """Calls `F.batch_norm` in its own `forward`, and has a further attribute, like timm's BatchNormAct2d."""

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.act = nn.LeakyReLU(0.25)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return self.act(batch_norm(x, *tensors, self.training, self.momentum, self.eps))


@dataclass(frozen=True)
class Kept:
    """A model that was pickled: how it was made, and the shape of its input."""

    make: Callable[[], nn.Module]  # makes the model, in float32
    shape: tuple[int, ...]  # of an input, without its batch dimension
    dtype: torch.dtype = torch.float64

    def model(self) -> nn.Module:
        """A new model."""
        return self.make().to(self.dtype)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """An input, and the factors by which the training step multiplies the output."""
        along = torch.arange(1.0, SAMPLES * CHANNELS * 8 + 1, dtype=torch.float64)
        x = (along * along * 0.37).sin() * 3 + 1
        shape = SAMPLES, *self.shape
        return tuple(part[: torch.Size(shape).numel()].view(shape).to(self.dtype) for part in (x, (along * 0.73).cos()))


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS), nn.ReLU())


def _patched() -> nn.DataParallel:
    model = nn.DataParallel(client.convert_model(_network()))
    client.patch_replication_callback(model)
    return model


PLANE = (CHANNELS, 2, 2)

MODELS = {
    "1d": Kept(lambda: client.SynchronizedBatchNorm1d(CHANNELS), (CHANNELS, 2)),
    "2d": Kept(lambda: client.SynchronizedBatchNorm2d(CHANNELS), PLANE),
    "3d": Kept(lambda: client.SynchronizedBatchNorm3d(CHANNELS), (CHANNELS, 2, 2, 2)),
    "of any dimension": Kept(lambda: client.SynchronizedBatchNorm(CHANNELS, momentum=None), PLANE),
    "without affine": Kept(lambda: client.SynchronizedBatchNorm2d(CHANNELS, affine=False), PLANE),
    "eps_mode": Kept(lambda: client.SynchronizedBatchNorm2d(CHANNELS, eps=4.0, eps_mode="clamp"), PLANE),
    "chunks and group": Kept(
        lambda: client.SynchronizedBatchNorm2d(CHANNELS, chunks=2, group=client.Group("pair", 2)), PLANE
    ),
    "lazy": Kept(lambda: client.LazySynchronizedBatchNorm2d(eps=0.5), PLANE, torch.float32),
    "converted network": Kept(lambda: client.convert_model(_network()), PLANE),
    "converted subclass": Kept(lambda: client.convert_model(Functional(CHANNELS, eps=0.5)), PLANE),
    "converted subclass with chunks": Kept(lambda: client.convert_model(Functional(CHANNELS), chunks=2), PLANE),
    "DataParallelWithCallback": Kept(
        lambda: client.DataParallelWithCallback(client.convert_model(_network()), ["cpu"] * 2), PLANE
    ),
    "patched DataParallel": Kept(_patched, PLANE),
}


def is_lazy(model: nn.Module) -> bool:
    """Whether the model has lazy layers without a first forward pass, so that it cannot be replicated yet."""
    return any(isinstance(each, nn.parameter.UninitializedTensorMixin) for each in model.parameters())


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    """The output in eval mode."""
    return model.eval()(x).detach()


def trained(model: nn.Module, x: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """The results of one training step, in two replicas if the model can be replicated."""
    has_replicas = not (isinstance(model, nn.DataParallel) or is_lazy(model))
    x = x.clone().requires_grad_()
    output = (client.DataParallelWithCallback(model, ["cpu"] * 2) if has_replicas else model)(x)
    (output * factors).sum().backward()
    client.commit_running_statistics(model)
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {"output": output.detach(), "gradient of x": x.grad, **gradients, **dict(model.named_buffers())}
