"""A member that runs one command after the other from a pipe, while tests kill or freeze it."""

import ctypes
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
from torch import distributed

import client
from client.session.connection import Connection
from client.session.protocol.member import OVER_PROCESS_GROUP
from client.transports.choose import transport_for
from statsd_bn import Rows
from support.memory_members import outcome

BUSY_SECONDS = 4.5
HELD_SECONDS = 4.5

ROW = Rows((1,), np.ones((1, 2, 3)))


def exchange(_: Connection) -> int:
    return transport_for("bn", None).run_slave(ROW).count


def exchange_and_fail(_: Connection) -> None:
    """An error closes the channel that received it; the process continues."""
    outcome(lambda: transport_for("bn", None).run_slave(Rows((1,), np.ones((1, 2, 4)))))


def transport(connection: Connection) -> str:
    return connection.transport


def compute(_: Connection) -> None:
    """Pure Python, which never releases the global lock explicitly."""
    end = time.monotonic() + BUSY_SECONDS
    while time.monotonic() < end:
        pass


def hold_the_lock(_: Connection) -> None:
    """A call into C that keeps Python's global lock."""
    ctypes.PyDLL(None).usleep(int(HELD_SECONDS * 1e6))


COMMANDS: dict[str, Callable[[Connection], Any]] = {
    program.__name__: program for program in (exchange, exchange_and_fail, transport, compute, hold_the_lock)
}


def take_commands(
    pipe: Pipe, endpoint: str, job: str, member: int, world_size: int, transport: str, store: str
) -> None:
    """Connect, report ready, and run the commands until the pipe is closed."""
    if transport == OVER_PROCESS_GROUP:
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=member, world_size=world_size)
    who: dict[str, Any] = {"job": job, "rank": member, "world_size": world_size, "transport": transport}
    os.environ["STATSD_BN_INSECURE"] = "1"  # `test_resets.py` has a server on TCP
    with client.connect(endpoint, **who, round_timeout=100.0) as connection:
        pipe.send("ready")
        while True:
            try:
                command = pipe.recv()
            except EOFError:
                return
            pipe.send(outcome(lambda command=command: COMMANDS[command](connection)))
