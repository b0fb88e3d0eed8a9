"""Driver: the one loop that runs a machine; it has the channel and the clock."""

import time
from typing import TypeVar

from client.connection.channel_pool import Channel
from client.conversation.machine import Machine, Turn

ResultT = TypeVar("ResultT")


def run(machine: Machine[ResultT], channel: Channel) -> ResultT:
    """Runs a machine to its end and returns its result.

    Args:
        machine: what waits for the server.
        channel: the way there.

    Raises:
        StatsdBNError: how the machine ended otherwise.
        ConnectionClosed: another thread closed the channel pool.
    """
    monotonic = time.monotonic
    turn = machine.begin(monotonic())
    _send(turn, channel)
    if turn[2] is None and (answer := channel.receive_soon()) is not None:
        turn = machine.step(monotonic(), answer)
        _send(turn, channel)
    _, due, result = turn
    while result is None:
        answer = channel.receive(due - monotonic())
        turn = machine.step(monotonic(), answer)
        _send(turn, channel)
        _, due, result = turn
    return result


def _send(turn: Turn[ResultT], channel: Channel) -> None:
    for frame in turn[0]:
        channel.send(frame)
