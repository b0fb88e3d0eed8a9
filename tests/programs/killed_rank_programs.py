"""What ranks do that are killed: rounds of random sizes without an end."""

import random
from typing import Any

import numpy as np
import torch

import client
from client.transports.choose import transport_for
from statsd_bn.errors import StatsdBNError
from statsd_bn.reduction import Rows

# Of the rows: as small as those of a small layer, of a wide one, and some that fill the buffers of a connection.
SIZES = (1, 64, 2048, 60_000)
WEIGHTS = (8, 8, 2, 1)

VECTORS = 2


def rounds_without_end(
    endpoint: str, curve: str | None, job: str, rank: int, size: int, transport: str, begun: Any
) -> None:
    """Takes part in rounds until this rank is killed, or another one.

    Args:
        endpoint: of the server.
        curve: the file with the client's secret key; None if the server asks for none.
        job: its name, which decides the sizes of the rows.
        rank: which rank this is.
        size: how many ranks the job has.
        transport: how the rows travel.
        begun: is set to 1 after the first round.
    """
    torch.set_num_threads(1)
    chance = random.Random(job)
    try:
        with client.connect(
            endpoint, job=job, rank=rank, world_size=size, curve=curve, transport=transport, round_timeout=60.0
        ):
            pipe = transport_for("bn", None)
            while True:
                (channels,) = chance.choices(SIZES, WEIGHTS)
                pipe.run_slave(Rows((1,), np.full((1, VECTORS, channels), float(rank))))
                begun.value = 1
    except StatsdBNError:
        return  # another rank was killed
