"""Torch's process groups by name, as layers store them: a group itself can be neither copied nor pickled."""

from dataclasses import dataclass
from typing import Any

from torch import distributed

from statsd_bn.errors import ConfigurationError

# In this build of torch.
_IS_AVAILABLE = distributed.is_available()


@dataclass(frozen=True)
class NamedProcessGroup:
    """A process group of torch; name empty and size 0 for a group that this process is not in."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"process group {self.name!r} of {self.size} ranks"

    def find(self) -> Any:
        """The group itself, or torch's placeholder for a group that this process is not in."""
        if not self.size:
            return distributed.GroupMember.NON_GROUP_MEMBER
        if distributed.is_available():
            from torch._C import _distributed_c10d  # noqa: PLC0415 - missing where torch was built without it

            try:
                name: Any = self.name  # torch declares a separate type for group names
                found = _distributed_c10d._resolve_process_group(name)  # noqa: SLF001 - has no public name
            except (RuntimeError, ValueError):
                pass
            else:
                if found is not distributed.group.WORLD:  # all ranks, whatever their number is now
                    self._check_size(found.size())
                return found
        raise ConfigurationError(
            f"process_group: process group {self.name!r} does not exist in this process, or was destroyed"
        )

    def _check_size(self, size: int) -> None:
        """Raise ConfigurationError if torch has given the name of a destroyed group to another one."""
        if size != self.size:
            raise ConfigurationError(
                f"process_group: process group {self.name!r} has {size} ranks now, {self.size} when the layer was "
                "converted; revert the model and convert it with the new group"
            )


def default() -> NamedProcessGroup | None:
    """Torch's default process group; None without one, or if this process is its only rank.

    In a traced call torch.compile guards WORLD, but not `is_initialized`. The compiler of torch 2.6 takes WORLD for a
    group even if it is None.
    """
    if not _IS_AVAILABLE:
        return None
    world = distributed.group.WORLD
    if world is None or not distributed.is_initialized() or world.size() == 1:
        return None
    return NamedProcessGroup(world.group_name, world.size())


def named(process_group: Any) -> NamedProcessGroup:
    """Convert a process group of torch, of any size."""
    if distributed.is_available():
        if process_group is distributed.GroupMember.NON_GROUP_MEMBER:
            return NamedProcessGroup("", 0)
        if isinstance(process_group, distributed.ProcessGroup):
            return NamedProcessGroup(process_group.group_name, process_group.size())
    raise ConfigurationError(
        f"process_group: expected a torch process group, as new_group() returns it, got {process_group!r:.80}"
    )
