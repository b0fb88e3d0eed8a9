"""Subclasses of torch's batch norm as libraries write them: one for each way to reach `batch_norm`."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from support import normalisation

# If several threads make the first call of one of these functions together, torch sometimes returns 8 right digits of
# 16: in 3 of 8,000 processes. It never did after a first call in a single thread.
for _function in (torch.sin, torch.cos, torch.tanh):
    _function(torch.ones(1, dtype=torch.float64))


class Activated(nn.BatchNorm2d):
    """Calls torch's forward by `super()`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class ByName(nn.BatchNorm2d):
    """Calls torch's forward by the name of torch's class."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, x).tanh()


class Functional(nn.BatchNorm2d):
    """Calls `F.batch_norm`, a dropout and an activation, like timm's BatchNormAct2d."""

    def __init__(self, num_features: int, **options) -> None:
        super().__init__(num_features, **options)
        self.drop = nn.Identity()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        uses_buffers = not self.training or self.track_running_stats
        mean, variance = (self.running_mean, self.running_var) if uses_buffers else (None, None)
        is_training = self.training or self.running_mean is None
        x = F.batch_norm(x, mean, variance, self.weight, self.bias, is_training, factor, self.eps)
        return self.act(self.drop(x))


class Operator(nn.BatchNorm2d):
    """Calls torch's operator, whose arguments have another order."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        tensors = self.weight, self.bias, self.running_mean, self.running_var
        return torch.batch_norm(x, *tensors, self.training, self.momentum, self.eps, cudnn_enabled=False).sigmoid()


def normalised(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    if layer.training:
        layer.num_batches_tracked.add_(1)
    return F.batch_norm(
        weight=layer.weight,
        bias=layer.bias,
        input=x,
        running_mean=layer.running_mean,
        running_var=layer.running_var,
        training=layer.training,
        momentum=layer.momentum,
        eps=layer.eps,
    )


class Helped(nn.BatchNorm2d):
    """Calls a function of this module, which passes keyword arguments to `F.batch_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return normalised(self, x) + x


class Decorated(nn.BatchNorm2d):
    """Its `forward` has a decorator, and calls a function of another module."""

    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return normalisation.normalised(self, x) + x


class Scaled(nn.BatchNorm2d):
    """Applies its weight, its bias and an additional factor after `batch_norm`."""

    def forward(self, x: Tensor, by: float = 2.0) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        y = F.batch_norm(x, self.running_mean, self.running_var, None, None, self.training, 0.3, self.eps)
        return y * by * self.weight[:, None, None] + self.bias[:, None, None]


class Deeper(Functional):
    """A subclass of a subclass with an additional attribute and an inherited forward."""

    def __init__(self, num_features: int, **options) -> None:
        super().__init__(num_features, **options)
        self.note = "kept"


class Configured(nn.BatchNorm2d):
    """Has other defaults, and inherits its forward."""

    def __init__(self, num_features: int, **options) -> None:
        super().__init__(num_features, **{"eps": 0.05, "momentum": 0.3, **options})


class InPlace(Functional):
    """Activates in place, as timm's BatchNormAct2d does by default."""

    def __init__(self, num_features: int, **options) -> None:
        super().__init__(num_features, **options)
        self.act = nn.ReLU(inplace=True)


class Fused(nn.BatchNorm2d):
    """A convolution and a normalisation, fused into one convolution in eval mode."""

    def __init__(self, num_features: int, **options) -> None:
        super().__init__(num_features, **options)
        self.conv = nn.Conv2d(num_features, num_features, 1, dtype=options.get("dtype"))

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.running_var is None:
            return super().forward(self.conv(x))
        scale = (1.0 if self.weight is None else self.weight) / (self.running_var + self.eps).sqrt()
        bias = (self.conv.bias - self.running_mean) * scale + (0.0 if self.bias is None else self.bias)
        return F.conv2d(x, self.conv.weight * scale[:, None, None, None], bias)


class OfLists(nn.BatchNorm2d):
    """Takes a tensor, or a list of tensors, each a separate batch."""

    def forward(self, x: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        if isinstance(x, list):
            return [super(OfLists, self).forward(one) for one in x]
        return super().forward(x)


class SkipsEmpty(nn.BatchNorm2d):
    """Returns an empty batch unchanged, as detectron2's layer did when torch's kernels refused empty batches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.numel() else x * 1


class Sized(nn.BatchNorm2d):
    """Its constructor has other arguments than torch's."""

    def __init__(self, width: int, gain: float = 3.0, **options) -> None:
        super().__init__(num_features=width, **options)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Remembering(nn.BatchNorm2d):
    """Defines `__getstate__`, and does not call torch's."""

    def __init__(self, num_features: int, **options) -> None:
        super().__init__(num_features, **options)
        self.seen = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        return super().forward(x)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "seen"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, seen=[])


class OfAnyDimension(nn.modules.batchnorm._BatchNorm):
    """A subclass of the common base of torch's three layers."""

    def _check_input_dim(self, x: Tensor) -> None:
        assert x.dim() > 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


class Slotted(nn.BatchNorm2d):
    """Has a slot, which it must save in `__getstate__`: torch's modules drop slots."""

    __slots__ = ("note",)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).cos()

    def __getstate__(self) -> tuple[dict[str, Any], str]:
        return dict(self.__dict__), self.note

    def __setstate__(self, state: tuple[dict[str, Any], str]) -> None:
        self.__dict__.update(state[0])
        self.note = state[1]


class Frozen(nn.BatchNorm2d):
    """Stays in eval mode."""

    def train(self, mode: bool = True) -> "Frozen":  # noqa: ARG002 - ignored
        return super().train(mode=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Centred(nn.BatchNorm2d):
    """Stores its weight less 1, and passes `weight + 1` to `batch_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight + 1
        tracks = self.running_mean is not None
        if self.training and tracks:
            self.num_batches_tracked.add_(1)
        is_training = self.training or not tracks
        return F.batch_norm(x, self.running_mean, self.running_var, weight, self.bias, is_training, 0.1, self.eps)


class Standardising(nn.BatchNorm2d):
    """Standardises a kernel by a `batch_norm` without tensors, like timm's `StdConv2d`, then normalises its input."""

    def __init__(self, num_features: int, **options) -> None:
        super().__init__(num_features, **options)
        values = torch.linspace(-1, 1, 6 * num_features, dtype=torch.float64)
        self.kernel = nn.Parameter(values.view(6, num_features, 1, 1))
        self.back = nn.Parameter(values.view(num_features, 6, 1, 1).exp())

    def forward(self, x: Tensor) -> Tensor:
        rows = self.kernel.reshape(1, 6, -1)
        standard = F.batch_norm(rows, None, None, training=True, momentum=0.0).reshape_as(self.kernel)
        return super().forward(F.conv2d(F.conv2d(x, standard), self.back))


class Twice(nn.BatchNorm2d):
    """Normalises twice without tensors: the calls are indistinguishable."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(F.batch_norm(x, None, None, training=True).relu(), None, None, training=True)


class AlwaysEval(nn.BatchNorm2d):
    """Normalises with the running statistics in training too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class Foreign(nn.BatchNorm2d):
    """Computes its statistics itself."""

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
        return (x - mean) / (variance + self.eps).sqrt()


def differentiable_all_reduce(x: Tensor) -> Tensor:
    """The function of fvcore with this name; a single process has nothing to add."""
    return x


class SynchronisesItself(nn.BatchNorm2d):
    """All-reduces its statistics itself in training, as detectron2's NaiveSyncBatchNorm."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        moments = torch.cat([x.mean((0, 2, 3)), (x * x).mean((0, 2, 3))])
        mean, square = differentiable_all_reduce(moments).view(2, -1, 1, 1)
        return (x - mean) * (square - mean * mean + self.eps).rsqrt()


class Reduced(nn.BatchNorm2d):
    """Leaves the statistics to `batch_norm`, and all-reduces another value."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = differentiable_all_reduce(x.detach().sum())
        if self.training:
            self.num_batches_tracked.add_(1)
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(x, *tensors, self.training, self.momentum, self.eps)


SYNCHRONISED = [
    *(Activated, ByName, Functional, Operator, Helped, Scaled, Deeper, Configured, InPlace, Fused, OfLists, SkipsEmpty),
    *(Sized, Remembering, OfAnyDimension, Centred, Standardising),
]


# One for each way to reach `batch_norm`; some disable autocast, or use float32 after `batch_norm`.
OWN_FORWARDS = [Activated, Functional, Operator, Helped, Decorated, Scaled, ByName, Centred, OfAnyDimension]
