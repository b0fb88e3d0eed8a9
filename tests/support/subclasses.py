"""Subclasses of torch's batch norm as libraries write them: one for each way to come to `batch_norm`."""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn


class Activated(nn.BatchNorm2d):
    """Calls torch's forward by `super()`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class ByName(nn.BatchNorm2d):
    """Calls torch's forward by the name of torch's class."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, x).tanh()


class Functional(nn.BatchNorm2d):
    """Calls `F.batch_norm`, drops and activates, as timm's BatchNormAct2d."""

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
        kept = not self.training or self.track_running_stats
        mean, variance = (self.running_mean, self.running_var) if kept else (None, None)
        is_training = self.training or self.running_mean is None
        x = F.batch_norm(x, mean, variance, self.weight, self.bias, is_training, factor, self.eps)
        return self.act(self.drop(x))


class Operator(nn.BatchNorm2d):
    """Calls torch's operator, whose arguments stand in another order."""

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
    """Calls a function of its module, which calls `F.batch_norm` with names."""

    def forward(self, x: Tensor) -> Tensor:
        return normalised(self, x) + x


class Scaled(nn.BatchNorm2d):
    """Normalises without weight and bias, and scales by an argument."""

    def forward(self, x: Tensor, by: float = 2.0) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        y = F.batch_norm(x, self.running_mean, self.running_var, None, None, self.training, 0.3, self.eps)
        return y * by * self.weight[:, None, None] + self.bias[:, None, None]


class Deeper(Functional):
    """A subclass of a subclass, with an attribute and no forward of its own."""

    def __init__(self, num_features: int, **options) -> None:
        super().__init__(num_features, **options)
        self.note = "kept"


class Configured(nn.BatchNorm2d):
    """Has other defaults, and no forward of its own."""

    def __init__(self, num_features: int, **options) -> None:
        super().__init__(num_features, **{"eps": 0.05, "momentum": 0.3, **options})


class AlwaysEval(nn.BatchNorm2d):
    """Normalises with the running statistics in training too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class Foreign(nn.BatchNorm2d):
    """Computes its statistics itself."""

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
        return (x - mean) / (variance + self.eps).sqrt()


class Evasive(nn.BatchNorm2d):
    """Mentions `batch_norm`, and never comes to it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else F.batch_norm(x, self.running_mean, self.running_var)


SYNCHRONISED = [Activated, ByName, Functional, Operator, Helped, Scaled, Deeper, Configured]
