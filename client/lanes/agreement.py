"""Agreement: how the members of a strict group find out whether they can share memory, and then share it or do not.

All of them go through the same rounds over the server, right after the first round of the group. In the first one each
says whether it can and wants to, and the first member where the memory is to be had. Where somebody does not, that is
all. In the second one each says whether it has the memory. Only if all have it do they use it, so either all members of
a group do, or none.

They come to it from a round of the whole group, so nobody waits here for a member that is late or elsewhere: that is
told of a layer by its name.
"""

import logging
import platform
from contextlib import closing, nullcontext
from mmap import mmap

from client.connection.connection import Connection
from client.connection.groups import Group
from client.connection.member import AUTO, SHARED_MEMORY, ZEROMQ, Member
from client.shared_memory.group_memory import GroupMemory
from client.shared_memory.passing import Offer, take, why_not
from client.shared_memory.region import size_of
from statsd_bn.round_key import MEMORY
from statsd_bn.skew.samples import Samples

logger = logging.getLogger("statsd_bn.client")

# Each member adds the rows of all.
MOST_MEMBERS = 64

# Where rounds in memory have been run by the million; elsewhere somebody has to ask for them.
TRIED_ON = ("x86_64",)

# What a member that shares memory says in the first round, before the name of what it offers; others say why not.
_READY = b"ready "


def agree(connection: Connection, group: Group) -> GroupMemory | None:
    """Returns the memory that the members of a group share, if they do. It takes one or two rounds of the group."""
    session = connection.session(group)
    members = list(session.members)
    me = members.index(connection.rank)
    memory, why = _shared(connection, group, members, me)
    if memory is None:
        session.lane.refuse(why)
        level = logging.WARNING if connection.member.lane == SHARED_MEMORY else logging.INFO
        logger.log(level, "group %r exchanges rows over the server, and not in shared memory: %s", group.name, why)
        return None
    logger.info("group %r exchanges rows in shared memory", group.name)
    found = GroupMemory(memory, len(members), me)
    # All see the same rows, so one member tells the server of them.
    session.lane.samples = Samples() if me == 0 else None
    session.lane.use(found)
    connection.at_end.append(found.end)
    return found


def _shared(connection: Connection, group: Group, members: list[int], me: int) -> tuple[mmap | None, str]:
    """Returns the memory that all members have; or None, and why not."""
    size = size_of(len(members))
    offer, reason = _offer(connection.member, len(members), size, is_first=me == 0)
    with closing(offer) if offer else nullcontext():
        said = connection.gather_in(group, MEMORY, reason.encode() or _READY + _name(offer))
        if why := _refusals(members, [b"" if one.startswith(_READY) else one for one in said]):
            return None, why
        memory, reason = _taken(offer, said[0].removeprefix(_READY).decode(errors="replace"), size)
        said = connection.gather_in(group, MEMORY, reason.encode())
    why = _refusals(members, said)
    return (None, why) if why else (memory, "")


def _offer(member: Member, members: int, size: int, *, is_first: bool) -> tuple[Offer | None, str]:
    """Returns what the first member offers; or why this one does not share memory, if it does not."""
    if why := _why_not_this_one(member, members):
        return None, why
    try:
        return (Offer(size) if is_first else None), ""
    except OSError as error:
        return None, f"the system gives no memory to share: {error}"


def _why_not_this_one(member: Member, members: int) -> str:
    if member.lane == ZEROMQ:
        return f"its lane is {ZEROMQ!r}, as connect() or STATSD_BN_LANE says"
    if members > MOST_MEMBERS:
        return f"the group has {members} members, more than {MOST_MEMBERS}"
    if member.lane == AUTO and platform.machine() not in TRIED_ON:
        return why_not() or f"nobody has tried it on {platform.machine()}; ask for it by the lane {SHARED_MEMORY!r}"
    return why_not()


def _name(offer: Offer | None) -> bytes:
    return offer.name.encode() if offer else b""


def _taken(offer: Offer | None, name: str, size: int) -> tuple[mmap | None, str]:
    try:
        return (offer.memory if offer else take(name, size)), ""
    except OSError as error:
        return None, str(error) or type(error).__name__


def _refusals(members: list[int], said: list[bytes]) -> str:
    """Returns who does not share memory, and why; empty if all do."""
    refusals = [(member, text.decode(errors="replace")) for member, text in zip(members, said, strict=True) if text]
    if not refusals:
        return ""
    member, why = refusals[0]
    others = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    return f"rank {member}: {why}{others}"
