"""Meeting place: how the members of a group find out whether they share a host, and then share memory.

All of them go through the same two rounds over the server, when they use the group for the first time: in the first
one the first member says where the memory is to be had, and in the second each says whether it has it. Only if all have
it do they use it, so either all members of a group do, or none.
"""

import logging
from contextlib import closing, nullcontext
from mmap import mmap

from client.connection.connection import Connection
from client.connection.groups import Group
from client.connection.member import SHARED_MEMORY
from client.shared_memory.meeting import Meetings
from client.shared_memory.passing import Offer, take, why_not
from client.shared_memory.region import size_of
from statsd_bn.round_key import MEMORY

logger = logging.getLogger("statsd_bn.client")

# Each member adds the rows of all.
MOST_MEMBERS = 64

# What a member that shares memory says in the first round, before the name of what it offers; others say why not.
_READY = b"ready "


def find(connection: Connection, group: Group) -> Meetings | None:
    """Returns where the members of a group meet; None where they share no memory. It takes two rounds of the group."""
    members = list(connection.session(group).members)
    me = members.index(connection.rank)
    memory, why = _agree(connection, group, members, me)
    if memory is None:
        logger.warning("group %r meets at the server, and shares no memory: %s", group.name, why)
        return None
    logger.info("group %r meets in shared memory", group.name)
    if connection.is_everybody(group):
        connection.lane = SHARED_MEMORY
    meetings = Meetings(memory, len(members), me)
    connection.at_end.append(meetings.close)
    return meetings


def _agree(connection: Connection, group: Group, members: list[int], me: int) -> tuple[mmap | None, str]:
    """Returns the memory that all members have; or None, and why not."""
    size = size_of(len(members))
    offer, reason = _offer(len(members), size, is_first=me == 0)
    with closing(offer) if offer else nullcontext():
        said = connection.gather_in(group, MEMORY, reason.encode() or _READY + _name(offer))
        if why := _why_not(members, [b"" if one.startswith(_READY) else one for one in said]):
            return None, why
        memory, reason = _taken(offer, said[0].removeprefix(_READY).decode(), size)
        said = connection.gather_in(group, MEMORY, reason.encode())
    why = _why_not(members, said)
    return (None, why) if why else (memory, "")


def _offer(members: int, size: int, *, is_first: bool) -> tuple[Offer | None, str]:
    if members > MOST_MEMBERS:
        return None, f"the group has {members} members, more than {MOST_MEMBERS}"
    if why := why_not():
        return None, why
    if not is_first:
        return None, ""
    try:
        return Offer(size), ""
    except OSError as error:
        return None, f"the system gives no memory to share: {error}"


def _name(offer: Offer | None) -> bytes:
    return offer.name.encode() if offer else b""


def _taken(offer: Offer | None, name: str, size: int) -> tuple[mmap | None, str]:
    try:
        return (offer.memory if offer else take(name, size)), ""
    except OSError as error:
        return None, str(error)


def _why_not(members: list[int], said: list[bytes]) -> str:
    refusals = [(member, text.decode(errors="replace")) for member, text in zip(members, said, strict=True) if text]
    if not refusals:
        return ""
    member, why = refusals[0]
    others = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    return f"rank {member}: {why}{others}"
