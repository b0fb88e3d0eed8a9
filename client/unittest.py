"""What users of Synchronized-BatchNorm-PyTorch import from `sync_batchnorm.unittest`: a test case for tensors."""

import unittest

import torch
from torch import Tensor

__all__ = ["TorchTestCase"]

RELATIVE = 1e-3
ABSOLUTE = 1e-5


class TorchTestCase(unittest.TestCase):
    """A test case that compares tensors."""

    def assertTensorClose(self, x: Tensor, y: Tensor) -> None:  # noqa: N802 - unittest's way to name it
        """Fails where an entry of `x` is further from that of `y` than 1e-5 and 1e-3 of it together.

        Args:
            x: found.
            y: expected; of the same shape as `x`, or of one that is expanded to it.
        """
        if torch.allclose(x, y, rtol=RELATIVE, atol=ABSOLUTE):
            return
        furthest = (x - y).abs().max().item()
        self.fail(
            f"tensors: expected them within {ABSOLUTE:g} plus {RELATIVE:g} of the second, got {furthest:g} between"
        )
