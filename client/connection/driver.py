"""Driver: the one loop that runs a machine; it has the channel and the clock."""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from client.connection.transport import Channel
from client.conversation.machine import Machine, Turn

ResultT = TypeVar("ResultT")

Wait = Callable[[Callable[[], ResultT]], ResultT]
"""Calls what waits for long."""


def run(machine: Machine[ResultT], channel: Channel, wait: Wait[ResultT] | None = None) -> ResultT:
    """Runs a machine to its end and returns its result.

    Args:
        machine: what waits for the server.
        channel: the way there.
        wait: calls what is left of it if it is not over soon; default: nothing needs to be done for that.

    Raises:
        StatsdBNError: how the machine ended otherwise.
        ConnectionClosed: another thread closed the transport.
    """
    turn = machine.begin(time.monotonic())
    _send(turn, channel)
    if turn[2] is None and (answer := channel.receive_soon()) is not None:
        turn = machine.step(time.monotonic(), answer)
        _send(turn, channel)
    if (result := turn[2]) is not None:
        return result
    rest = partial(_to_its_end, machine, channel, turn)
    return wait(rest) if wait else rest()


def _to_its_end(machine: Machine[ResultT], channel: Channel, turn: Turn[ResultT]) -> ResultT:
    monotonic = time.monotonic
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
