"""Relay: the lane of a group that is spread over hosts, where some of its members share one; see `carried_round`."""

import time
from functools import partial

from client.connection.connection import Connection
from client.conversation.machine import Turn
from client.conversation.session import Session
from client.lanes.carried_round import CarriedRound
from client.lanes.round_in_memory import AtServer
from client.shared_memory.host_memory import HostMemory
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows


def take_part(connection: Connection, memory: HostMemory, session: Session, key: RoundKey, rows: Rows) -> Aggregate:
    """Takes part in a round, together with the other members on this host."""
    if session.is_uneven:
        return connection.over_server(session, key, rows)
    begin_trip = partial(connection.round_trip, session, key, rows)
    with memory.lock:
        if connection.is_broken:
            # The server may have lost this member, and nobody is to speak for it any more.
            memory.close()
        round_ = CarriedRound(session, key, rows, memory, begin_trip)
        try:
            found = connection.wait_for_others(partial(_run, round_, memory, connection))
        except BaseException:
            # Whoever leaves a round early is out of step with the others for good.
            memory.close()
            raise
    # Without the lock: two threads may wait for each other there, on this member and on another.
    return found if isinstance(found, Aggregate) else connection.run(found.trip)


def _run(round_: CarriedRound, memory: HostMemory, connection: Connection) -> Aggregate | AtServer:
    now = time.monotonic
    turn = round_.begin(now())
    while not turn[0] and turn[2] is None:
        memory.wait_for_answer(turn[1] - now())
        turn = round_.step(now(), None)
    frames, _, found = turn
    return found if found is not None else _carried(frames[0], turn, round_, connection)


def _carried(
    frame: bytes, turn: Turn[Aggregate | AtServer], round_: CarriedRound, connection: Connection
) -> Aggregate | AtServer:
    now = time.monotonic
    _, due, found = turn
    with connection.transport.channel() as channel:
        channel.send(frame)
        while found is None:
            _, due, found = round_.step(now(), channel.receive(due - now()))
    return found
