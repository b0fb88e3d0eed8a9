"""Driver: the one loop that runs a machine; it has the channel and the clock."""

import time
from typing import TypeVar

from client.connection.machine import Machine
from client.connection.transport import Channel

ResultT = TypeVar("ResultT")


def run(machine: Machine[ResultT], channel: Channel) -> ResultT:
    """Runs a machine to its end and returns its result.

    Raises:
        StatsdBNError: how the machine ended otherwise.
        ConnectionClosed: another thread closed the transport.
    """
    monotonic = time.monotonic
    frames, due, result = machine.begin(monotonic())
    while True:
        for frame in frames:
            channel.send(frame)
        if result is not None:
            return result
        answer = channel.receive(due - monotonic())
        frames, due, result = machine.step(monotonic(), answer)
