"""Groups: which members of a job synchronise together.

A member is in as many groups as it names. A group is the `size` members that name it, whoever they are, so the members
need not be listed anywhere, and nobody outside of it takes notice.
"""

import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from client.session.protocol.member import Member
from statsd_bn import limits
from statsd_bn.checks import check_integer, check_name
from statsd_bn.environment import integer
from statsd_bn.errors import ConfigurationError, ProtocolError
from statsd_bn.messages import WORLD
from statsd_bn.text import plain

# The rule: the members of this host.
LOCAL = "local"

# What the members tell one another their hosts under, where no launcher counts the members of a host.
HOSTS = "statsd_bn hosts"

# Differs from host to host, also where they are clones of one another; containers on a host share it.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# What a launcher of one process would say.
_ONE_HERE = {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}


@dataclass(frozen=True)
class Group:
    """The `size` members of the job that name it.

    Args:
        name: 1 to 256 bytes of UTF-8; "world", "local" and names that begin with "local " are taken.
        size: how many members name it.

    Raises:
        ConfigurationError: one of them is unusable.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        try:
            check_name("name", self.name, limits.MAX_NAME_BYTES)
            check_integer("size", self.size, 1, limits.MAX_MEMBERS)
        except ProtocolError as error:
            raise ConfigurationError(f"group: {error.message}") from None
        self._check_reserved()

    def _check_reserved(self) -> None:
        if self.name in {WORLD, LOCAL} or self.name.startswith(f"{LOCAL} "):
            raise ConfigurationError(
                f"group: expected a name of your own, got {self.name!r}, which is reserved; "
                f"the whole job is group=None, the members of a host are group={LOCAL!r}"
            )


class _RuledGroup(Group):
    """A group by a rule: its name is reserved, so that no group that somebody names can be taken for it."""

    def _check_reserved(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"Group(name={self.name!r}, size={self.size})"


def named(name: str, size: int) -> Group:
    """Returns the group of a name and a size that were a group's, by a rule or not."""
    return _RuledGroup(name, size) if name == WORLD or name.startswith(f"{LOCAL} ") else Group(name, size)


def world(size: int) -> Group:
    """Returns the group of all `size` members of a job."""
    return _RuledGroup(WORLD, size)


def is_told(environ: Mapping[str, str], world_size: int) -> bool:
    """Returns whether a launcher says how many members of a job of this size the host has.

    One that has started a single process does not know of those that this one has started.
    """
    return bool(environ.get("LOCAL_WORLD_SIZE")) and integer(environ, "WORLD_SIZE", world_size) == world_size


def local(environ: Mapping[str, str], host: str | None = None) -> Group:
    """Returns the group of this host's members, by the variables that torchrun sets.

    Raises:
        ConfigurationError: the environment does not say how many members the host has.
    """
    if not environ.get("LOCAL_WORLD_SIZE"):
        raise ConfigurationError(
            f"group {LOCAL!r}: expected LOCAL_WORLD_SIZE in the environment, as torchrun sets it, got none; "
            "start the members by torchrun, or give them client.Group(name, size)"
        )
    size = integer(environ, "LOCAL_WORLD_SIZE", 0)
    # LOCAL_WORLD_SIZE counts the processes of one torchrun agent, and GROUP_RANK numbers the agents, so these two
    # belong together. Host names do not: containers may share one, and two agents of a job may share a host, and both
    # would make one name with more members than its size. Only a launcher without agents is left with the host's name.
    node = environ.get("GROUP_RANK")
    return _RuledGroup(f"{LOCAL} node {node}" if node else f"{LOCAL} host {host or socket.gethostname()}", size)


def this_place() -> str:
    """Returns where this process runs, for people: host and process."""
    return f"{plain(socket.gethostname())[:200]}, pid {os.getpid()}"


def this_machine() -> str:
    """Returns a name for this machine that no other has; containers on it share the name."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return f"{socket.gethostname()} {uuid.getnode()}"


def of_hosts(told: Mapping[int, bytes], rank: int) -> Group:
    """Returns the group of a rank's host, which has the ranks that have told the same machine."""
    ranks = [each for each, machine in told.items() if machine == told[rank]]
    return _RuledGroup(f"{LOCAL} host of rank {min(ranks)}", len(ranks))


def check(group: Group | str | None) -> None:
    """Raises ConfigurationError where `group` is neither None nor a Group nor the name of a rule."""
    # In this order: older versions of torch.compile cannot compare a Group with a text.
    if group is None or isinstance(group, Group) or group == LOCAL:
        return
    hint = f"; a group by name needs its size, client.Group({group!r:.80}, size)" if isinstance(group, str) else ""
    raise ConfigurationError(f"group: expected None, {LOCAL!r} or a client.Group, got {group!r:.80}{hint}")


class GroupOfThisHost:
    """The group of the members of this host, once it is known who they are.

    Args:
        gather: gives the name of this machine to all members of the job, and returns theirs, by rank.

    Attributes:
        known: the group; None until the members have found it out.
    """

    def __init__(self, member: Member, gather: Callable[[bytes], dict[int, bytes]]) -> None:
        self._member = member
        self._gather = gather
        self._lock = threading.Lock()
        # Looked up now where that can be done: torch.compile follows a layer to its group, but not to the host's name.
        self.known: Group | None = None
        with suppress(ConfigurationError):
            self.known = self._told()

    def by_rule(self, rule: str) -> Group:
        """Returns the group; where nobody has said it, the members find it out now.

        Raises:
            ConfigurationError: `rule` is another one, or neither can be done.
            StatsdBNError: the round failed in which they find it out.
        """
        check(rule)
        # No cached_property: it takes a lock, and torch.compile follows a layer down to here.
        return self.known or self._found_out()

    def _found_out(self) -> Group:
        with self._lock:
            # Kept before another thread has the lock, or that would gather again.
            self.known = self.known or self._told() or self._gathered()
            return self.known

    def _told(self) -> Group | None:
        """By the environment; None where it does not say it, and the members can find out themselves."""
        member = self._member
        # No launcher is needed to say how many there are of one.
        is_alone = member.world_size == 1 and not member.is_elastic
        environ = {**os.environ, **(_ONE_HERE if is_alone else {})}
        can_ask = not member.is_elastic
        return None if can_ask and not is_told(environ, member.world_size) else local(environ)

    def _gathered(self) -> Group:
        return of_hosts(self._gather(this_machine().encode()), self._member.rank)
