"""What the environment says: launchers tell a process who it is by variables, and torchrun's names are the common ones.

Everything here is a function of a mapping, so that a test needs no environment of its own.
"""

import os
import socket
from collections.abc import Mapping

from client.session import Member
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError
from statsd_bn.messages import WORLD

DEFAULT_DEADLINE = 600.0


def member_from(
    environ: Mapping[str, str],
    *,
    job: str | None = None,
    member: int | None = None,
    world_size: int | None = None,
    deadline: float = DEFAULT_DEADLINE,
) -> Member:
    """Returns who this process is, from arguments and, where they are None, environment variables.

    Raises:
        ConfigurationError: a value is unusable.
    """
    if job is None:
        job = environ.get("STATSD_BN_JOB") or environ.get("TORCHELASTIC_RUN_ID") or "default"
    world_size = integer(environ, "WORLD_SIZE", 1) if world_size is None else world_size
    member = integer(environ, "RANK", 0) if member is None else member
    if not 1 <= world_size <= limits.MAX_MEMBERS:
        raise ConfigurationError(f"world_size: expected 1 to {limits.MAX_MEMBERS}, got {world_size}")
    if not 0 <= member < world_size:
        raise ConfigurationError(f"member: expected a number in [0, world_size), here [0, {world_size}), got {member}")
    if not 0 < deadline <= limits.MAX_DEADLINE:
        raise ConfigurationError(f"deadline: expected seconds in (0, {limits.MAX_DEADLINE:g}], got {deadline}")
    if not 1 <= len(job.encode()) <= limits.MAX_NAME_BYTES:
        raise ConfigurationError(f"job: expected a name of 1 to {limits.MAX_NAME_BYTES} bytes, got {job!r:.80}")
    return Member(
        job=job,
        group=WORLD,
        epoch=integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        member=member,
        world_size=world_size,
        deadline=float(deadline),
        place=f"{socket.gethostname()[:200]}, pid {os.getpid()}",
    )


def integer(environ: Mapping[str, str], name: str, default: int) -> int:
    """Returns a variable's value, or the default where it is not set or empty.

    Raises:
        ConfigurationError: it is no integer.
    """
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as error:
        raise ConfigurationError(f"{name}: expected an integer, got {text!r}") from error
