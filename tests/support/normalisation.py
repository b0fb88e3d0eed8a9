"""A function that subclasses of batch norms in other modules call."""

import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn


def normalised(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
    if layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    return F.batch_norm(x, *tensors, layer.training or layer.running_mean is None, layer.momentum, layer.eps)
