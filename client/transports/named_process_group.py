"""Torch's process groups as layers keep them: by name, since a group itself can be neither copied nor pickled."""

from dataclasses import dataclass
from typing import Any

from torch import distributed

from statsd_bn.errors import ConfigurationError

# Of this build of torch.
_IS_AVAILABLE = distributed.is_available()


@dataclass(frozen=True)
class NamedProcessGroup:
    """A process group of torch's.

    Attributes:
        name: torch's name for it in this process.
        size: how many ranks it has; 0 of one that this process is not in, which torch gives no name.
    """

    name: str
    size: int

    def __str__(self) -> str:
        return f"process group {self.name!r} of {self.size} ranks"

    def find(self) -> Any:
        """Returns the group itself, or what torch has in place of one that this process is not in.

        Raises:
            ConfigurationError: this process has no such group, or has it no longer.
        """
        if not self.size:
            return distributed.GroupMember.NON_GROUP_MEMBER
        if distributed.is_available():
            from torch._C import _distributed_c10d  # noqa: PLC0415 - missing where torch was built without it

            try:
                name: Any = self.name  # torch has a type of its own for these texts
                found = _distributed_c10d._resolve_process_group(name)  # noqa: SLF001 - has no public name
            except (RuntimeError, ValueError):
                pass
            else:
                if found is not distributed.group.WORLD:  # which means all ranks, however many there are now
                    self._check_size(found.size())
                return found
        raise ConfigurationError(
            f"process_group: expected one that this process is in, got {self.name!r}, which it does not have or has "
            "destroyed"
        )

    def _check_size(self, size: int) -> None:
        """Torch gives the names of groups that were destroyed to others."""
        if size != self.size:
            raise ConfigurationError(
                f"process_group: expected {self.name!r} of {self.size} ranks, as when the layer was given it, and this "
                f"process has one of {size} by that name now; revert the model, and convert it with the new one"
            )


def default() -> NamedProcessGroup | None:
    """Returns torch's default process group; None without one, or where this process is alone in it.

    Where a call is traced, the compiler watches WORLD, as it does not watch `is_initialized`. That of torch 2.6 takes
    WORLD for a group even where it is None.
    """
    if not _IS_AVAILABLE:
        return None
    world = distributed.group.WORLD
    if world is None or not distributed.is_initialized() or world.size() == 1:
        return None
    return NamedProcessGroup(world.group_name, world.size())


def named(process_group: Any) -> NamedProcessGroup:
    """Returns what a layer keeps of a process group of torch's, whatever its size.

    Raises:
        ConfigurationError: it is something else.
    """
    if distributed.is_available():
        if process_group is distributed.GroupMember.NON_GROUP_MEMBER:
            return NamedProcessGroup("", 0)
        if isinstance(process_group, distributed.ProcessGroup):
            return NamedProcessGroup(process_group.group_name, process_group.size())
    raise ConfigurationError(
        "process_group: expected one of torch's, as torch.distributed.new_group() makes them, "
        f"got {process_group!r:.80}"
    )
