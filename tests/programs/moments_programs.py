"""What processes do in `test_moments.py`: moments of every kind of input, and running moments with a checkpoint."""

import copy
import io
import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

import client

# Rows of each rank; the second has none.
SIZES = (4, 0, 1, 6)
FEATURES = (3, 2)
BATCHES = 4


def whole(seed: int, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    """The rows of all ranks, shape (11, 3, 2)."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(sum(SIZES), *FEATURES, generator=generator, dtype=torch.float64) + offset).to(dtype)


def mask_of(x: Tensor) -> Tensor:
    """A mask for the whole batch `x`, shape (11, 2): which rows and positions of the last dimension count."""
    return (torch.arange(len(x) * FEATURES[1]) % 3 > 0).view(-1, FEATURES[1])


# Of the whole batch: input, dimensions, mask and correction.
CASES: dict[str, tuple[Tensor, Any, Tensor | None, float]] = {
    "rows": (whole(0, torch.float64), 0, None, 1),
    "biased, the last dimension stays": (whole(1, torch.float32), (1, 0), None, 0),
    "everything": (whole(2, torch.float64), None, None, 1),
    "masked": (whole(3, torch.float64), (0, -1), mask_of(whole(3, torch.float64)), 1),
    "mask for every position": (whole(4, torch.float32), (0, 2), torch.arange(sum(SIZES)).view(-1, 1) % 2 > 0, 1),
    "float32, far from 0": (whole(5, torch.float32, 1000.0), 0, None, 1),
    "float16, far from 0": (whole(6, torch.float16, 1000.0), 0, None, 1),
    "bfloat16, far from 0": (whole(7, torch.bfloat16, 1000.0), 0, None, 1),
}


def moments(process: Any) -> dict[str, np.ndarray]:
    """Count, mean and variance in each case; the variance is the same in inference mode with a process group."""
    found = {}
    for name, (x, dim, mask, correction) in CASES.items():
        mine = x.split(SIZES)[process.rank].requires_grad_()
        own_mask = None if mask is None else mask.split(SIZES)[process.rank]
        for what, values in client.moments(mine, dim, own_mask, correction=correction)._asdict().items():
            assert not values.requires_grad
            found[f"{name}, {what}"] = values.numpy()
    group = distributed.group.WORLD if distributed.is_initialized() else None
    with torch.inference_mode():
        again = client.moments(CASES["rows"][0].split(SIZES)[process.rank], name="again", process_group=group)
    assert np.array_equal(again.var.numpy(), found["rows, var"])
    return found


def running(process: Any) -> dict[str, np.ndarray]:
    """The buffers after four batches; the third comes after a load from a checkpoint, the last after a copy."""
    statistics = client.RunningMoments(FEATURES, name="observations")
    for number in range(BATCHES):
        x, mask = masked_batch(number)
        statistics.update(x.split(SIZES)[process.rank], mask.split(SIZES)[process.rank])
        statistics.eval().update(torch.ones(1, *FEATURES))
        statistics.train()
        if number == 1:
            file = io.BytesIO()
            torch.save(statistics.state_dict(), file)
            file.seek(0)
            statistics = client.RunningMoments(FEATURES, name="observations")
            statistics.load_state_dict(torch.load(file))
        if number == 2:
            statistics = pickle.loads(pickle.dumps(copy.deepcopy(statistics)))  # noqa: S301 - our own
    return {name: values.numpy() for name, values in statistics.state_dict().items()}


def masked_batch(number: int) -> tuple[Tensor, Tensor]:
    """A batch of all ranks, and its mask, which leaves out all of batch 0."""
    return whole(10 + number, torch.float32, 1000.0 * number), torch.arange(sum(SIZES)) % 4 < number
