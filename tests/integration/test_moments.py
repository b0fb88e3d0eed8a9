"""Moments over several processes equal the moments in one process, over every transport."""

import numpy as np
import torch

from programs import moments_programs
from programs.moments_programs import BATCHES, CASES, FEATURES, SIZES
from support.transports import TRANSPORTS

RANKS = len(SIZES)


def same_on_all(over, program):
    """Rank 0's result, after a check that all ranks have the same result over all transports."""
    found = [rank for transport in TRANSPORTS for rank in over(transport, RANKS, program)]
    assert len(found) == RANKS * len(TRANSPORTS)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, values in found[0].items():
            assert (other[name].dtype, other[name].tobytes()) == (values.dtype, values.tobytes()), name
    return found[0]


def test_moments_are_those_of_the_whole_batch(over):
    found = same_on_all(over, moments_programs.moments)
    for name, (x, dim, mask, correction) in CASES.items():
        count, mean, var = (found[f"{name}, {what}"] for what in ("count", "mean", "var"))
        values = x.double() if mask is None else x.double().masked_fill(~mask.unsqueeze(1), np.nan)
        exact = x.dtype == torch.float64
        assert mean.dtype == var.dtype == (np.float64 if exact else np.float32)
        assert (count == (~values.isnan()).numpy().sum(dim)).all(), name
        rounding = {"rtol": 1e-13 if exact else 1e-7, "err_msg": name}
        np.testing.assert_allclose(mean, np.nanmean(values.numpy(), dim), **rounding)
        np.testing.assert_allclose(var, np.nanvar(values.numpy(), dim, ddof=correction), **rounding)


def test_running_moments_are_those_of_all_values(over):
    found = same_on_all(over, moments_programs.running)
    batches = map(moments_programs.masked_batch, range(BATCHES))
    values = torch.cat([x[mask].double() for x, mask in batches])
    assert found["count"] == len(values) > 0
    assert found["mean"].shape == found["var"].shape == FEATURES
    np.testing.assert_allclose(found["mean"], values.mean(0), rtol=1e-13)
    np.testing.assert_allclose(found["var"], values.var(0, correction=0), rtol=1e-12)
