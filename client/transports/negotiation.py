"""Negotiation of a strict group's transport: shared memory, torch's default process group, or the server.

It takes one or two gathers over the server, which follow the group's first round. In the first gather each member says
whether it accepts the process group and whether it can share memory, and the first member offers memory. The
negotiation ends there if all members accept the process group, or if the group cannot share memory. In the second
gather each member says whether it has received the memory: equal host names would not prove that they can share it.
"""

import logging
import platform
from collections.abc import Iterable
from contextlib import closing, nullcontext
from mmap import mmap

from torch import distributed

from client.session.connection import Connection
from client.session.groups import Group
from client.session.protocol.member import AUTO, OVER_PROCESS_GROUP, OVER_SERVER, SHARED_MEMORY, Member
from client.session.protocol.session import Session
from client.transports import device_rows, group_memory
from client.transports.group_memory import MAX_MEMBERS, GroupMemory, MemoryOffer, receive_memory
from client.transports.process_group import default_group
from statsd_bn.errors import ConfigurationError
from statsd_bn.messages import WORLD
from statsd_bn.round_key import MEMORY_GATHER
from statsd_bn.skew_samples import SkewSampler
from statsd_bn.text import error_text

logger = logging.getLogger("statsd_bn.client")

TESTED_MACHINES = ("x86_64",)  # on other machines shared memory is used only if the user asks for it

# A reply has two parts, with _SEPARATOR between them. The first part is the reason against the process group, empty for
# consent; _INSISTS precedes it if the member accepts no other transport. The second part is the reason against shared
# memory, or else _READY; in the first member's reply the name of the offered memory follows _READY.
_INSISTS, _SEPARATOR, _READY = b"!", b"\0", b"ready "


def negotiate(connection: Connection, group: Group) -> GroupMemory | None:
    """Negotiate the group's transport in one or two gathers; return the shared memory, or None for other transports."""
    session = connection.session(group)
    members = list(session.members)
    mapped, reason = _shared_memory(connection, group, members)
    if process_group := session.transport.process_group:
        logger.info("group %r exchanges rows over torch's %s", group.name, process_group)
        return None
    if mapped is None:
        session.transport.fall_back(reason)
        level = logging.WARNING if connection.member.transport == SHARED_MEMORY else logging.INFO
        logger.log(level, "group %r exchanges rows over the server, and not in shared memory: %s", group.name, reason)
        return None
    index = members.index(connection.rank)
    memory = GroupMemory(mapped, len(members), index)
    connection.close_callbacks.append(memory.leave)
    session.transport.memory = memory
    # All members see the same rows, so one of them samples them for the server.
    session.transport.samples = SkewSampler() if index == 0 else None
    logger.info("group %r exchanges rows in shared memory", group.name)
    return memory


def _shared_memory(connection: Connection, group: Group, members: list[int]) -> tuple[mmap | None, str]:
    """Memory that all members share; or None and the reason, which is empty if they use the process group."""
    session, are_too_many = connection.session(group), len(members) > MAX_MEMBERS
    offer, reason = None, _refusal(connection.member)
    if connection.rank == members[0] and not (reason or are_too_many):
        try:
            offer = MemoryOffer(group_memory.size_of(len(members)))
        except OSError as error:
            reason = f"it cannot allocate shared memory: {error}"
    with closing(offer) if offer else nullcontext():
        ready = _READY + (offer.name.encode() if offer else b"")
        reply = _process_group_reply(session) + _SEPARATOR + (reason.encode() or ready)
        replies = connection.gather_in_group(group, MEMORY_GATHER, reply).values()
        about_group, _, about_memory = zip(*(each.partition(_SEPARATOR) for each in replies), strict=True)
        if _accept_process_group(session, members, about_group):
            return None, ""
        if are_too_many:
            return None, f"{len(members)} ranks are in the group, more than {MAX_MEMBERS}"
        if reason := _refusals(members, [b"" if each.startswith(_READY) else each for each in about_memory]):
            return None, reason
        name, size = about_memory[0].removeprefix(_READY).decode(errors="replace"), group_memory.size_of(len(members))
        memory: mmap | None = None
        try:
            memory = offer.memory if offer else receive_memory(name, size, lambda: connection.broken_job.is_broken)
        except OSError as error:
            reason = str(error) or type(error).__name__
        received = connection.gather_in_group(group, MEMORY_GATHER, reason.encode())
    reason = _refusals(members, received.values())
    return (None, reason) if reason else (memory, "")


def _process_group_reply(session: Session) -> bytes:
    """This member's reply about torch's default process group."""
    member = session.member
    insists = member.transport == OVER_PROCESS_GROUP and member.group == WORLD
    if not insists and not (member.transport == AUTO and session.transport.is_on_devices):
        return f"its transport is {member.transport!r}".encode()
    world = distributed.group.WORLD if distributed.is_available() else None
    found = "none" if world is None else f"rank {world.rank()} of {world.size()}"
    expected, reason = f"rank {member.rank} of {member.world_size}", ""
    if world is None or found != expected:
        reason = f"expected {expected} in torch's default process group, got {found}"
    elif not (insists or device_rows.gathers_on_devices(world)):
        reason = "its process group's backend gathers in host memory"
    return _INSISTS * insists + reason.encode()


def _accept_process_group(session: Session, members: list[int], replies: Iterable[bytes]) -> bool:
    """Use torch's default process group if all members consent; return whether they do."""
    reason = _refusals(members, [reply.removeprefix(_INSISTS) for reply in replies])
    if not reason:
        session.transport.process_group = default_group()
    elif any(reply.startswith(_INSISTS) for reply in replies):
        raise ConfigurationError(
            error_text(
                f"transport {OVER_PROCESS_GROUP!r} needs torch's default process group on all ranks: {reason}",
                where=f"job {session.member.job!r}",
                advice="Call torch.distributed.init_process_group() before the first step, for the ranks of the job, "
                f"and give all of them this transport; or use {AUTO!r}.",
            )
        )
    return not reason


def _refusal(member: Member) -> str:
    """Why this member does not share memory; empty if it can and wants to."""
    if member.transport == OVER_SERVER:
        return f"its transport is {OVER_SERVER!r}, as connect() or STATSD_BN_TRANSPORT says"
    if reason := group_memory.unavailable_reason():
        return reason
    if member.transport == AUTO and platform.machine() not in TESTED_MACHINES:
        return f"shared memory is untested on {platform.machine()}; pass transport={SHARED_MEMORY!r} to use it"
    return ""


def _refusals(members: list[int], reasons: Iterable[bytes]) -> str:
    """The first refusal, with its rank, and the number of further ones; empty if all members consent."""
    refusals = [(member, text.decode(errors="replace")) for member, text in zip(members, reasons, strict=True) if text]
    others = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    return next((f"rank {member}: {reason}{others}" for member, reason in refusals), "")
