"""Who this process is: as its arguments say, and else as the environment says, see `client.launch.launchers`.

Everything here is a function of a mapping, so that a test needs no environment of its own.
"""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from client.connection.member import DEFAULT_ROUND_TIMEOUT, ELASTIC, STRICT, Member
from client.launch import launchers
from statsd_bn import limits
from statsd_bn.checks import check_name
from statsd_bn.errors import ConfigurationError, ProtocolError
from statsd_bn.keys import ClientKeys, load_client
from statsd_bn.messages import WORLD
from statsd_bn.text import plain


def member_from(
    environ: Mapping[str, str],
    *,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    round_timeout: float = DEFAULT_ROUND_TIMEOUT,
    join_timeout: float | None = None,
    policy: str = STRICT,
    min_members: int | None = None,
) -> Member:
    """Returns who this process is, from arguments and, where they are None, environment variables.

    Raises:
        ConfigurationError: a value is unusable.
    """
    if job is None:
        job = environ.get("STATSD_BN_JOB") or launchers.job(environ) or "default"
    if world_size is None and rank is None:
        _check_is_numbered(environ)
    world_size = _first(world_size, launchers.world_size, environ, 1)
    rank = _first(rank, launchers.rank, environ, 0)
    if not 1 <= world_size <= limits.MAX_MEMBERS:
        raise ConfigurationError(f"world_size: expected 1 to {limits.MAX_MEMBERS}, got {world_size}")
    least = _min_members(policy, min_members, world_size)
    # Newcomers to an elastic job may bring it above the size that it began with.
    numbers = limits.MAX_MEMBERS if least else world_size
    if not 0 <= rank < numbers:
        what = "MAX_MEMBERS" if least else "world_size"
        raise ConfigurationError(f"rank: expected a number in [0, {what}), here [0, {numbers}), got {rank}")
    for name, seconds in (("round_timeout", round_timeout), ("join_timeout", join_timeout)):
        if seconds is not None and not 0 < seconds <= limits.MAX_DEADLINE:
            raise ConfigurationError(f"{name}: expected seconds in (0, {limits.MAX_DEADLINE:g}], got {seconds}")
    try:
        check_name("job", job, limits.MAX_NAME_BYTES)
    except ProtocolError as error:
        raise ConfigurationError(str(error)) from None
    return Member(
        job=job,
        group=WORLD,
        epoch=launchers.epoch(environ),
        rank=rank,
        world_size=world_size,
        round_timeout=float(round_timeout),
        host_and_pid=f"{plain(socket.gethostname())[:200]}, pid {os.getpid()}",
        min_members=least,
        join_timeout=join_timeout,
    )


def _first(
    given: int | None, said: Callable[[Mapping[str, str]], int | None], environ: Mapping[str, str], default: int
) -> int:
    """Returns what is given, else what the launcher says, which only then has to make sense, else the default."""
    if given is not None:
        return given
    found = said(environ)
    return default if found is None else found


def _check_is_numbered(environ: Mapping[str, str]) -> None:
    """Of several processes that nobody has numbered each would take itself for rank 0."""
    processes = launchers.world_size(environ)
    if processes is not None and processes > 1 and launchers.rank(environ) is None:
        raise ConfigurationError(
            f"RANK: expected this process's number, since WORLD_SIZE says {processes}, got none; set it for each "
            "process, or pass rank"
        )


def _min_members(policy: str, min_members: int | None, world_size: int) -> int:
    if policy not in {STRICT, ELASTIC}:
        raise ConfigurationError(f"policy: expected {STRICT!r} or {ELASTIC!r}, got {policy!r:.80}")
    if policy == STRICT:
        if min_members is not None:
            raise ConfigurationError(f"min_members: expected none under the policy {STRICT!r}, got {min_members!r:.80}")
        return 0
    least = 1 if min_members is None else min_members
    if type(least) is not int or not 1 <= least <= world_size:
        raise ConfigurationError(f"min_members: expected 1 to world_size, here {world_size}, got {least!r:.80}")
    return least


def keys_from(environ: Mapping[str, str], curve: str | Path | None = None) -> ClientKeys | None:
    """Returns this client's keys, from the file that is given or else that the environment names; None without any.

    Raises:
        ConfigurationError: there is no such file, or it is none.
    """
    path = curve or environ.get("STATSD_BN_CURVE")
    return load_client(path) if path else None
