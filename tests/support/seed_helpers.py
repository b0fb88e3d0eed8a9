"""`TorchTestCase` and `BatchNorm2dReimpl` of Synchronized-BatchNorm-PyTorch, for its own tests."""

import unittest

import torch
from torch import Tensor, nn

RELATIVE = 1e-3
ABSOLUTE = 1e-5


class BatchNorm2dReimpl(nn.Module):
    """Batch norm over (N, C, H, W) by its definition with batch statistics, in float64, rounded as torch does."""

    running_mean: Tensor  # shape (C,)
    running_var: Tensor  # shape (C,), of unbiased variances

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.empty(num_features))
        self.bias = nn.Parameter(torch.empty(num_features))
        self.register_buffer("running_mean", torch.empty(num_features))
        self.register_buffer("running_var", torch.empty(num_features))
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        nn.init.uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        wide = input.double()
        variance, mean = (found.to(input.dtype) for found in torch.var_mean(wide, dim=(0, 2, 3), correction=0))
        values = input.numel() // self.num_features
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * values / (values - 1), self.momentum)
        scale, shift, mean, inverse = (
            one.double()[:, None, None] for one in (self.weight, self.bias, mean, (variance + self.eps).rsqrt())
        )
        return ((wide - mean) * inverse * scale + shift).to(input.dtype)


class TorchTestCase(unittest.TestCase):
    def assertTensorClose(self, x: Tensor, y: Tensor) -> None:  # noqa: N802 - unittest's way to name it
        """Fail where `x` differs from `y` by more than 1e-5 + 1e-3 * |y|."""
        if torch.allclose(x, y, rtol=RELATIVE, atol=ABSOLUTE):
            return
        furthest = (x - y).abs().max().item()
        self.fail(
            f"tensors: expected |x - y| <= {ABSOLUTE:g} + {RELATIVE:g} |y|, got a largest |x - y| of {furthest:g}"
        )
