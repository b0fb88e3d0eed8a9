"""Comparison of the results of several processes with those of one process on the whole batch, in float64."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Another order of summation causes errors of some 1e-16 per operation; a wrong weight or statistic causes 1e-3 or more.
TOLERANCE = 1e-10


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def share_of(whole: Mapping[str, Tensor], rank: int, shares: Sequence[int], split: Sequence[str]) -> dict[str, Tensor]:
    """A rank's share of `whole`: its samples of values whose names begin with one of `split`; other values in full."""
    return {
        name: value.split(list(shares))[rank] if name.startswith(tuple(split)) else value
        for name, value in whole.items()
    }
