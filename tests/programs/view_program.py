"""A rank that trains until it is killed: `RANK ENDPOINT`.

Rank 2 brings infinity into its third layer in step 20, and rank 1 has data that are shifted.
"""

import logging
import sys
import time
from contextlib import suppress
from itertools import count

import torch
from torch import nn

import client
from statsd_bn.errors import StatsdBNError

WORLD_SIZE, SICK_RANK, SICK_LAYER, SICK_STEP = 4, 2, 2, 20
SHIFTED_RANK, SHIFT = 1, 3.0
LAYERS, CHANNELS = 5, 8

# Some twenty steps a second, so that a person or a test can follow them.
PAUSE_SECONDS = 0.05


def main(rank: int, endpoint: str) -> None:
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    model = client.convert_model(nn.Sequential(*(nn.BatchNorm1d(CHANNELS) for _ in range(LAYERS))))
    where = {"endpoint": endpoint, "rank": rank, "world_size": WORLD_SIZE, "job": "<script>alert(1)</script>"}
    with suppress(StatsdBNError), client.connect(**where):
        for step in count():
            x = torch.randn(6, CHANNELS) + (SHIFT if rank == SHIFTED_RANK else 0.0)
            if (rank, step) == (SICK_RANK, SICK_STEP):
                hook = model[SICK_LAYER].register_forward_pre_hook(lambda _, inputs: (spoilt(inputs[0]),))
                y = model(x)
                hook.remove()
            else:
                y = model(x)
            y.square().sum().backward()  # a step ends with it
            time.sleep(PAUSE_SECONDS)


def spoilt(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, 1] = torch.inf
    return x


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
