"""Agreement: how the members of a strict group find out by which way their rows can pass the server by.

All of them go through the same two rounds over the server, right after the first round of the group. In the first one
each says whether it can and wants to use torch's default process group, and whether to share memory, and the first
member where it offers memory. If all are for the process group, or one is against memory, it ends there. In the second
one each says whether it has got that memory: a member finds out by trying whether it is on the same host, never by a
host's name. So all know the same, and use the memory if each of them has it.

They come to it from a round of the whole group, so nobody waits here for a member that is late or elsewhere: that is
told of a layer by its name.
"""

import logging
import platform
from contextlib import closing, nullcontext
from mmap import mmap

from torch import distributed

from client.session.connection import Connection
from client.session.groups import Group
from client.session.protocol.member import AUTO, OVER_PROCESS_GROUP, OVER_SERVER, SHARED_MEMORY, Member
from client.session.protocol.session import Session
from client.transports import device_rows, group_memory, named_process_group
from client.transports.group_memory import GroupMemory
from client.transports.passing import Offer, take, why_not
from statsd_bn.error_text import error_text
from statsd_bn.errors import ConfigurationError
from statsd_bn.messages import WORLD
from statsd_bn.round_key import MEMORY
from statsd_bn.skew_samples import Samples

logger = logging.getLogger("statsd_bn.client")

# Each member adds the rows of all.
MOST_MEMBERS = group_memory.MOST_MEMBERS

# Where rounds in memory have been run by the million; elsewhere somebody has to ask for them.
TRIED_ON = ("x86_64",)

# What a member that shares memory says in the first round, before the name of what it offers; others say why not.
_READY = b"ready "

# Between what a member says of the process group and of memory. What it says of the process group is why it does not
# use that, and begins with the mark if it wants nothing else.
_THEN, _INSISTS = b"\0", b"!"


def agree(connection: Connection, group: Group) -> GroupMemory | None:
    """Returns the memory that the members of a group share, if they do; it takes one or two rounds of the group.

    Raises:
        ConfigurationError: on all of them: one wants nothing but the process group, and another cannot use it.
    """
    session = connection.session(group)
    members = list(session.members)
    memory, why = _shared(connection, group, members)
    if agreed := session.transport.process_group:
        logger.info("group %r exchanges rows over torch's %s", group.name, agreed)
        return None
    if memory is None:
        session.transport.refuse(why)
        level = logging.WARNING if connection.member.transport == SHARED_MEMORY else logging.INFO
        logger.log(level, "group %r exchanges rows over the server, and not in shared memory: %s", group.name, why)
        return None
    me = members.index(connection.rank)
    found = GroupMemory(memory, len(members), me)
    connection.at_end.append(found.end)
    session.transport.memory = found
    # All see the same rows, so one member tells the server of them.
    session.transport.samples = Samples() if me == 0 else None
    logger.info("group %r exchanges rows in shared memory", group.name)
    return found


def _shared(connection: Connection, group: Group, members: list[int]) -> tuple[mmap | None, str]:
    """Returns the memory that all members have in common; or None, and why not."""
    session, are_too_many = connection.session(group), len(members) > MOST_MEMBERS
    is_offering = connection.rank == members[0] and not are_too_many
    offer, reason = _offer(connection.member, len(members) if is_offering else 0)
    with closing(offer) if offer else nullcontext():
        mine = _THEN.join((_of_process_group(session), reason.encode() or _ready(offer)))
        parts = [one.partition(_THEN) for one in connection.gather_in(group, MEMORY, mine)]
        if _take_process_group(session, members, [of_group for of_group, *_ in parts]):
            return None, ""
        if are_too_many:
            return None, f"{len(members)} ranks are in the group, more than {MOST_MEMBERS}"
        said = [of_memory for *_, of_memory in parts]
        if why := _refusals(members, [b"" if one.startswith(_READY) else one for one in said]):
            return None, why
        name = said[0].removeprefix(_READY).decode(errors="replace")
        memory, reason = (offer.memory, "") if offer else _taken(connection, name, len(members))
        said = connection.gather_in(group, MEMORY, reason.encode())
    why = _refusals(members, said)
    return (None, why) if why else (memory, "")


def _of_process_group(session: Session) -> bytes:
    """Returns what this member says of torch's default process group."""
    member = session.member
    insists = member.transport == OVER_PROCESS_GROUP and member.group == WORLD
    if not insists and not (member.transport == AUTO and session.transport.is_on_devices):
        return f"its transport is {member.transport!r}".encode()
    world = distributed.group.WORLD if distributed.is_available() else None
    found = "none" if world is None else f"rank {world.rank()} of {world.size()}"
    expected, why = f"rank {member.rank} of {member.world_size}", ""
    if world is None or found != expected:
        why = f"expected {expected} in torch's default process group, got {found}"
    elif not (insists or device_rows.gathers_on_devices(world)):
        why = "its process group gathers on the host"
    return _INSISTS * insists + why.encode()


def _take_process_group(session: Session, members: list[int], said: list[bytes]) -> bool:
    """Has the group use torch's default process group, if all members are for it.

    Raises:
        ConfigurationError: one wants nothing else, and another is against it.
    """
    why = _refusals(members, [one.removeprefix(_INSISTS) for one in said])
    if not why:
        session.transport.process_group = named_process_group.default()
    elif any(one.startswith(_INSISTS) for one in said):
        raise ConfigurationError(
            error_text(
                f"transport {OVER_PROCESS_GROUP!r} needs torch's default process group on all ranks: {why}",
                where=f"job {session.member.job!r}",
                advice="Call torch.distributed.init_process_group() before the first step, for the ranks of the job, "
                f"and give all of them this transport; or use {AUTO!r}.",
            )
        )
    return not why


def _offer(member: Member, members: int) -> tuple[Offer | None, str]:
    """Returns the memory that this member offers to so many members, if any; and why it does not share any, if so."""
    if why := _why_not_this_one(member):
        return None, why
    try:
        return Offer(group_memory.size_of(members)) if members else None, ""
    except OSError as error:
        return None, f"the system gives no memory to share: {error}"


def _ready(offer: Offer | None) -> bytes:
    return _READY + (offer.name.encode() if offer else b"")


def _taken(connection: Connection, name: str, members: int) -> tuple[mmap | None, str]:
    """Returns the memory that another member offers; or None, and why this member does not get it."""
    try:
        return take(name, group_memory.size_of(members), lambda: connection.is_broken), ""
    except OSError as error:
        return None, str(error) or type(error).__name__


def _why_not_this_one(member: Member) -> str:
    if member.transport == OVER_SERVER:
        return f"its transport is {OVER_SERVER!r}, as connect() or STATSD_BN_TRANSPORT says"
    if member.transport == AUTO and platform.machine() not in TRIED_ON:
        return (
            why_not() or f"nobody has tried it on {platform.machine()}; ask for it by the transport {SHARED_MEMORY!r}"
        )
    return why_not()


def _refusals(members: list[int], said: list[bytes]) -> str:
    """Returns who does not share memory, and why; empty if all do."""
    refusals = [(member, text.decode(errors="replace")) for member, text in zip(members, said, strict=True) if text]
    if not refusals:
        return ""
    member, why = refusals[0]
    others = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    return f"rank {member}: {why}{others}"
