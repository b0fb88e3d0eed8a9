"""Groups: members of a job that use the same name synchronise together, `size` of them; a group lists no ranks."""

import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from client.session.protocol.member import Member
from statsd_bn import limits
from statsd_bn.checks import check_integer, check_name
from statsd_bn.environment import integer
from statsd_bn.errors import ConfigurationError, ProtocolError
from statsd_bn.messages import WORLD
from statsd_bn.text import escape

LOCAL = "local"  # specification of the group of this host's members
HOSTS = "statsd_bn hosts"  # name of the gather of machine IDs, needed if no launcher counts the members of a host
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # differs between hosts and their clones; containers share it
_ONE_PROCESS = {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}  # environment of a launcher of one process


@dataclass(frozen=True)
class Group:
    """The `size` members of the job that use this name.

    Args:
        name: 1 to 256 bytes of UTF-8; "world", "local" and names that begin with "local " are reserved.
        size: number of members.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        try:
            check_name("name", self.name, limits.MAX_NAME_BYTES)
            check_integer("size", self.size, 1, limits.MAX_MEMBERS)
        except ProtocolError as error:
            raise ConfigurationError(f"group: {error.message}") from None
        is_reserved = self.name in {WORLD, LOCAL} or self.name.startswith(f"{LOCAL} ")
        if is_reserved and not isinstance(self, _ReservedGroup):
            raise ConfigurationError(
                f"group: the name {self.name!r} is reserved; use group=None for the whole job, group={LOCAL!r} for "
                "the ranks of one host"
            )


class _ReservedGroup(Group):
    """A group with a reserved name, which no user's group can have."""

    def __repr__(self) -> str:
        return f"Group(name={self.name!r}, size={self.size})"


def group_named(name: str, size: int) -> Group:
    """Rebuild a group, reserved or not, from its name and size."""
    return _ReservedGroup(name, size) if name == WORLD or name.startswith(f"{LOCAL} ") else Group(name, size)


def has_local_size(environ: Mapping[str, str], world_size: int) -> bool:
    """Whether a launcher has started all members of a job of this size, and counts the members on this host."""
    return bool(environ.get("LOCAL_WORLD_SIZE")) and integer(environ, "WORLD_SIZE", world_size) == world_size


def from_environment(environ: Mapping[str, str], host: str | None = None) -> Group:
    """The group of this host's members, from the variables that torchrun sets."""
    if not environ.get("LOCAL_WORLD_SIZE"):
        raise ConfigurationError(
            f"group {LOCAL!r}: expected LOCAL_WORLD_SIZE in the environment, as torchrun sets it, got none; "
            "start the members by torchrun, or give them client.Group(name, size)"
        )
    size = integer(environ, "LOCAL_WORLD_SIZE", 0)
    # LOCAL_WORLD_SIZE counts the processes of one torchrun agent, and GROUP_RANK numbers the agents. Two agents may
    # share a host, or run in containers with equal host names: a group named after the host would have more members
    # than its size. Other launchers have no agents, so under them the group is named after the host.
    node = environ.get("GROUP_RANK")
    return _ReservedGroup(f"{LOCAL} node {node}" if node else f"{LOCAL} host {host or socket.gethostname()}", size)


def host_and_pid() -> str:
    """Host and ID of this process, for people."""
    return f"{escape(socket.gethostname())[:200]}, pid {os.getpid()}"


def machine_id() -> str:
    """Unique ID of this machine; its containers share the ID."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return f"{socket.gethostname()} {uuid.getnode()}"


def from_hosts(machines: Mapping[int, bytes], rank: int) -> Group:
    """The group of a rank's host: all ranks with the same machine ID."""
    ranks = [each for each, machine in machines.items() if machine == machines[rank]]
    return _ReservedGroup(f"{LOCAL} host of rank {min(ranks)}", len(ranks))


def check_group(group: Group | str | None) -> None:
    """Raise ConfigurationError unless `group` is None, a Group or "local"."""
    # In this order: older versions of torch.compile cannot compare a Group with a text.
    if group is None or isinstance(group, Group) or group == LOCAL:
        return
    hint = f"; a group by name needs its size, client.Group({group!r:.80}, size)" if isinstance(group, str) else ""
    raise ConfigurationError(f"group: expected None, {LOCAL!r} or a client.Group, got {group!r:.80}{hint}")


def host_group(member: Member) -> Group | None:
    """The group "local" of a member, from the environment; None if the members must gather to find it."""
    if member.is_elastic:
        return from_environment(os.environ)
    # A job of one member needs no launcher to count the members.
    environ = os.environ if member.world_size > 1 else {**os.environ, **_ONE_PROCESS}
    return from_environment(environ) if has_local_size(environ, member.world_size) else None
