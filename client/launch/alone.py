"""Alone: what a connection of one asks instead of a server.

A plain script, a notebook or a debugger has nobody to exchange with, and needs no server for that. But all that a
connection can do has to work there as anywhere else. So such a connection goes the usual way, with the same frames, and
this module gives the answers that a server would give to the only member of a strict job.
"""

from client.connection.channel_pool import MemoryChannelPool
from client.connection.connection import IN_PROCESS
from statsd_bn import limits
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Contribution, Message, Participation, Register, Registered
from statsd_bn.reduction import join_in_order, sum_in_order
from statsd_bn.round_key import GATHER
from statsd_bn.tokens import digest
from statsd_bn.wire import decode, encode

# The life of a server, which here is that of the process.
_SERVER = bytes(limits.TOKEN_BYTES - 1) + b"\1"

_ONLY = Members.of([0])


def channel_pool() -> MemoryChannelPool:
    """Returns a channel pool to nobody: the process itself answers."""
    return MemoryChannelPool(_receive, IN_PROCESS)


def _receive(peer: bytes, frame: bytes) -> list[tuple[bytes, bytes]]:
    answer = _answer(decode(frame))
    return [] if answer is None else [(peer, encode(answer))]


def _answer(message: Message) -> Registered | Aggregate | None:
    """Returns what a server tells the only member of a group; None where it says nothing."""
    if isinstance(message, Register):
        return _registered(message)
    if isinstance(message, Contribution):
        return _reduced(message)
    return None


def _registered(message: Register) -> Registered:
    # Whoever is back from an absence begins a step of its own.
    first_step = message.step + 1 if message.participation == Participation.REJOINING else message.first_step
    return Registered(digest(message.session), _SERVER, message.epoch, first_step, 0, _ONLY)


def _reduced(message: Contribution) -> Aggregate:
    rows = message.rows
    combine = join_in_order if message.key.phase == GATHER else sum_in_order
    return Aggregate(message.key, len(rows.counts), sum(rows.counts), _ONLY, combine(rows.values))
