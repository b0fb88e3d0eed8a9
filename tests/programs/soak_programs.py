"""What member processes do in the soak of shared memory: rounds of random sizes after random pauses, all checked."""

import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import torch

import client
from client.session.connection import Connection
from client.session.protocol.member import SHARED_MEMORY
from client.transports.choose import transport_for
from client.transports.server import SlavePipe
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import FloatArray, Rows, sum_in_order
from statsd_bn.round_key import BACKWARD

# Numbers of channels: usually of a small layer, sometimes of a wide layer, and rarely too many for shared memory.
SIZES = (1, 3, 16, 64, 256, 2048, 20_000)
WEIGHTS = (8, 8, 8, 8, 8, 2, 0.01)

# Pauses before a round, as (probability, most seconds): short ones, and ones so long that the server hears of the wait.
PAUSES = ((1e-2, 1e-3), (2e-5, 0.2))

# Probability that the same rows are also sent over the server.
OVER_SERVER = 1e-3

VECTORS = 2


@dataclass(frozen=True)
class Report:
    rounds: int  # finished, each with the right bits
    in_memory: int  # that this member did not report to the server
    over_server: int  # repeated over the server, with the same bits
    why: str = ""  # the error, or empty


def soak(endpoint: str, job: str, rank: int, size: int, rounds: int, pipe: Pipe, progress: Any) -> None:
    """Run a number of rounds, counted in `progress`; send a `Report`, then wait."""
    over_server = 0
    try:
        with client.connect(endpoint, job=job, rank=rank, world_size=size, round_timeout=120.0) as connection:
            over_server = _rounds(connection, rounds, progress)
            in_memory = connection.session(None).transport.bypassed_rounds
            pipe.send(Report(progress.value, in_memory, over_server, _wrong_transport(connection)))
            pipe.poll(120)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        pipe.send(Report(progress.value, 0, over_server, f"{type(error).__name__}: {error}"))


def _wrong_transport(connection: Connection) -> str:
    found = connection.transport
    return (
        ""
        if found == SHARED_MEMORY
        else f"expected transport {SHARED_MEMORY}, got {found}: {connection.why_not_faster}"
    )


def _rounds(connection: Connection, rounds: int, progress: Any) -> int:
    rank, size = connection.rank, connection.member.world_size
    everybodys, own = random.Random(1), random.Random(2 + rank)
    bases = [_base(member) for member in range(size)]
    transport, at_server = transport_for("bn", None), SlavePipe(connection, "by the server")
    over_server = 0
    forward = None
    for number in range(rounds):
        (channels,) = everybodys.choices(SIZES, WEIGHTS)
        factor = 1 + number % 1009 / 7
        contributions = [base[:, :channels] * factor for base in bases]
        rows = Rows((number % 7,), contributions[rank][np.newaxis])
        for chance, seconds in PAUSES:
            if own.random() < chance:
                time.sleep(own.uniform(0, seconds))
        found = transport.run_slave(rows, forward.key.of_phase(BACKWARD) if forward and number % 2 else None)
        forward = None if number % 2 else found
        expected = sum_in_order(np.stack(contributions))
        count = size * rows.counts[0]
        _check(number, found, count, expected)
        if everybodys.random() < OVER_SERVER:
            _check(number, at_server.run_slave(rows), count, expected)
            over_server += 1
        progress.value = number + 1
    return over_server


def _base(member: int) -> FloatArray:
    """Values of all magnitudes, so that each order of addition gives other bits."""
    generator = np.random.default_rng(member)
    shape = VECTORS, max(SIZES)
    return generator.standard_normal(shape) * 10.0 ** generator.integers(-8, 9, shape)


def _check(number: int, found: Aggregate, count: int, expected: FloatArray) -> None:
    if found.count != count:
        raise ValueError(f"round {number}: expected count {count}, got {found.count}")
    if found.values.tobytes() != expected.tobytes():
        raise ValueError(f"round {number}: expected other bits for shape {expected.shape}")


# Channels of rows in rounds with kills; the largest fill the buffers of a connection.
KILLED_SIZES = (1, 64, 2048, 60_000)
KILLED_WEIGHTS = (8, 8, 2, 1)


def rounds_without_end(
    endpoint: str, curve: str | None, job: str, rank: int, size: int, transport: str, flag: Any
) -> None:
    torch.set_num_threads(1)
    chance = random.Random(job)
    try:
        with client.connect(
            endpoint, job=job, rank=rank, world_size=size, curve=curve, transport=transport, round_timeout=60.0
        ):
            pipe = transport_for("bn", None)
            while True:
                (channels,) = chance.choices(KILLED_SIZES, KILLED_WEIGHTS)
                pipe.run_slave(Rows((1,), np.full((1, VECTORS, channels), float(rank))))
                flag.value = 1
    except StatsdBNError:
        return  # another rank was killed
