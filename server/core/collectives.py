"""Collectives: members that wait in a collective of torch for others, which may wait here.

torch counts the operations that a process has begun on a process group. All ranks of a group begin the same ones in the
same order, so a rank that is inside of its n-th operation needs every rank that has begun fewer than n. This is what
tells a deadlock from an asynchronous collective that has been begun everywhere and is merely slow: that one needs
nobody. A rank whose number is not known counts as needed, so that whatever frees it frees all who may wait for it. On
gloo, messages between two ranks are counted too; then a rank may seem to have begun enough, and nothing is concluded.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from server.group.slave import Slave


@dataclass(frozen=True, slots=True)
class Held:
    """A member that waits in a collective of torch.

    Attributes:
        slave: the member.
        since: when it was first seen there.
        missing: the ranks that it needs, or may need.
    """

    slave: Slave
    since: float
    missing: frozenset[int]


def held_members(slaves: Iterable[Slave]) -> list[Held]:
    """Those of some members of a job that wait in a collective for a rank that has not begun it."""
    by_member = {slave.member: slave for slave in slaves}
    found = (_held(slave, by_member) for slave in by_member.values())
    return [held for held in found if held]


def _held(slave: Slave, others: dict[int, Slave]) -> Held | None:
    sighting = slave.sighting
    if sighting is None or not sighting.is_held or sighting.latest is None:
        return None
    latest = sighting.latest
    group = (latest.torch_group, latest.members)
    needed, is_needed_for_sure = set(), False
    for member in latest.members:
        if member == slave.member:
            continue
        other = others.get(member)
        has = other.sighting.has_launched(group, latest.launched) if other and other.sighting else None
        if not has:
            needed.add(member)
        is_needed_for_sure |= has is False
    return Held(slave, sighting.since, frozenset(needed)) if is_needed_for_sure else None
