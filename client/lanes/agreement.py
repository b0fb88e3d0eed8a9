"""Agreement: how the members of a strict group find out who of them can share memory, and then share it or do not.

All of them go through the same rounds over the server, right after the first round of the group. In the first one each
says whether it can and wants to, and where it offers memory. Where somebody does not, that is all. Then each takes the
memory of the first member that it can reach; who is on one host is found out by trying, never by a host's name. In the
second round each says whose memory it has. So all know the same, and those of one memory use it: all members of the
group, with no server in their rounds; or those of each host, of whom one carries the rows of all to the server.

They come to it from a round of the whole group, so nobody waits here for a member that is late or elsewhere: that is
told of a layer by its name.
"""

import logging
import platform
from contextlib import closing, nullcontext
from hashlib import blake2b
from mmap import mmap
from typing import NamedTuple

from client.connection.connection import Connection
from client.connection.groups import Group
from client.conversation.member import AUTO, RELAY, SHARED_MEMORY, ZEROMQ, Member
from client.shared_memory.group_memory import GroupMemory
from client.shared_memory.host_memory import HostMemory, size_of
from client.shared_memory.passing import Offer, take, why_not
from statsd_bn.errors import ProtocolError
from statsd_bn.round_key import MEMORY
from statsd_bn.skew_samples import Samples

logger = logging.getLogger("statsd_bn.client")

# Each member adds the rows of all, and of those of a host one carries so many.
MOST_MEMBERS = 64

# Where rounds in memory have been run by the million; elsewhere somebody has to ask for them.
TRIED_ON = ("x86_64",)

# What a member that shares memory says in the first round, before the name of what it offers, the digest of its key,
# and the lane that it asks for; others say why not.
_READY = b"ready "

_KEY_BYTES = 8


class _Shared(NamedTuple):
    """Memory, and which members of the group have it; why not all, if so."""

    memory: mmap
    members: list[int]
    why_not_all: str


def agree(connection: Connection, group: Group) -> GroupMemory | None:
    """Returns the memory that the members of a group share, all of them or those of this host, if they do.

    It takes one or two rounds of the group.
    """
    session = connection.session(group)
    shared, why = _shared(connection, group, list(session.members))
    if shared is None:
        session.lane.refuse(why)
        _log(connection.member, f"group {group.name!r} exchanges rows over the server, and not in shared memory: {why}")
        return None
    found = _memory(connection, group, shared)
    connection.at_end.append(found.end)
    session.lane.use(found, shared.why_not_all)
    return found


def _memory(connection: Connection, group: Group, shared: _Shared) -> GroupMemory:
    session, (memory, members, why) = connection.session(group), shared
    me = members.index(connection.rank)
    if why:
        logger.info(
            "group %r exchanges rows in the memory of each host, and from there over the server; not all in one "
            "memory: %s",
            group.name,
            why,
        )
        return HostMemory(memory, len(members), me, session.token)
    logger.info("group %r exchanges rows in shared memory", group.name)
    # All see the same rows, so one member tells the server of them.
    session.lane.samples = Samples() if me == 0 else None
    return GroupMemory(memory, len(members), me)


def _log(member: Member, text: str) -> None:
    logger.log(logging.WARNING if member.lane in {SHARED_MEMORY, RELAY} else logging.INFO, "%s", text)


def _shared(connection: Connection, group: Group, members: list[int]) -> tuple[_Shared | None, str]:
    """Returns the memory that this member has in common with others; or None, and why not."""
    size = size_of(min(len(members), MOST_MEMBERS))
    offer, reason = _offer(connection.member, size)
    with closing(offer) if offer else nullcontext():
        said = connection.gather_in(
            group, MEMORY, reason.encode() or _ready(offer, connection.transport.key, connection.member.lane)
        )
        if why := _refusals(members, [b"" if one.startswith(_READY) else one for one in said]):
            return None, why
        ready = [_parsed(one) for one in said]
        me = members.index(connection.rank)
        memory, taken_of, reason = _first_in_reach(connection, offer, [name for name, *_ in ready], me, size)
        said = connection.gather_in(group, MEMORY, f"{taken_of} {reason}".encode())
    owners, reasons = _told(said)
    why = _refusals(members, reasons)
    company = [place for place, owner in enumerate(owners) if owner == taken_of]
    if not why and len(company) <= MOST_MEMBERS:
        return _Shared(memory, members, ""), ""
    if others := [member for member, (*_, lane) in zip(members, ready, strict=True) if lane != RELAY]:
        if not why:
            return None, f"{len(company)} ranks of the group share this host, more than {MOST_MEMBERS}"
        asked = f"lane {RELAY!r} needs all ranks to ask for it, and rank {others[0]} does not; "
        return None, why if len(others) == len(members) else asked + why
    if reason := _why_alone(owners, [ready[place][1] for place in company], len(company)):
        return None, why if len(set(owners)) == len(members) else f"{reason}; {why}" if why else reason
    return _Shared(memory, [members[place] for place in company], why), ""


def _why_alone(owners: list[int], keys: list[str], size: int) -> str:
    """Returns why the members that have one memory do not use it; empty if they do."""
    if any(owners[owner] != owner for owner in owners):
        return "the ranks of one host did not find the same memory"
    if size > MOST_MEMBERS:
        return f"{size} ranks of the group share this host, more than {MOST_MEMBERS}"
    if size == 1:
        return "no other rank of the group is on this host"
    return "the ranks on this host have different keys" if len(set(keys)) > 1 else ""


def _first_in_reach(
    connection: Connection, offer: Offer | None, names: list[str], me: int, size: int
) -> tuple[mmap, int, str]:
    """Returns the memory of the first member that this one can reach, whose it is, and why it is not the very first."""
    reason = ""
    for place, name in enumerate(names[:me]):
        try:
            return take(name, size, lambda: connection.is_broken), place, reason
        except OSError as error:
            reason = reason or str(error) or type(error).__name__
    assert offer  # noqa: S101 - whoever has none has said why
    return offer.memory, me, reason


def _offer(member: Member, size: int) -> tuple[Offer | None, str]:
    """Returns what this member offers; or why it does not share memory, if it does not."""
    if why := _why_not_this_one(member):
        return None, why
    try:
        return Offer(size), ""
    except OSError as error:
        return None, f"the system gives no memory to share: {error}"


def _why_not_this_one(member: Member) -> str:
    if member.lane == ZEROMQ:
        return f"its lane is {ZEROMQ!r}, as connect() or STATSD_BN_LANE says"
    if member.lane == AUTO and platform.machine() not in TRIED_ON:
        return why_not() or f"nobody has tried it on {platform.machine()}; ask for it by the lane {SHARED_MEMORY!r}"
    return why_not()


def _ready(offer: Offer | None, key: str, lane: str) -> bytes:
    digest = blake2b(key.encode(), digest_size=_KEY_BYTES).hexdigest()
    return _READY + f"{offer.name} {digest} {lane}".encode() if offer else b""


def _parsed(said: bytes) -> tuple[str, str, str]:
    """Returns the name of what a member offers, the digest of its key, and the lane that it asks for."""
    name, _, rest = said.removeprefix(_READY).decode(errors="replace").partition(" ")
    key, _, lane = rest.partition(" ")
    return name, key, lane


def _told(said: list[bytes]) -> tuple[list[int], list[bytes]]:
    """Returns whose memory each member has, by its place in the group, and why not the very first one's."""
    parts = [one.partition(b" ") for one in said]
    places = [int(place) if place.isdigit() else -1 for place, _, _ in parts]
    if any(not 0 <= place < len(said) for place in places):
        raise ProtocolError(f"{MEMORY}: expected the place of a member from each, got {places}")
    return places, [reason for _, _, reason in parts]


def _refusals(members: list[int], said: list[bytes]) -> str:
    """Returns who does not share memory, and why; empty if all do."""
    refusals = [(member, text.decode(errors="replace")) for member, text in zip(members, said, strict=True) if text]
    if not refusals:
        return ""
    member, why = refusals[0]
    others = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    return f"rank {member}: {why}{others}"
