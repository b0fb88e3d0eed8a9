"""Settings: everything that `client.connect` has to know, and where each value came from.

An argument wins over a variable named for us, that wins over the launcher's variables, these win over torch's process
group, and that wins over the default. A launcher that has started one process does not know of those which that process
has started, so a process group of several wins over it.
`resolve` is the only place that decides this. It is a function of its arguments, so a test needs no environment of its
own; only `Settings.member` and `Settings.keys` ask the machine for something.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from client.launch import launchers
from client.launch.launchers import ARGUMENT, DEFAULT, PROCESS_GROUP, ProcessGroup, Setting, StoreAddress, found
from client.session.groups import this_place
from client.session.protocol.member import (
    DEFAULT_ABORT_AFTER,
    DEFAULT_ROUND_TIMEOUT,
    ELASTIC,
    ON_NONFINITE,
    OVER_PROCESS_GROUP,
    STRICT,
    TRANSPORT_CHOICES,
    Member,
)
from statsd_bn import limits
from statsd_bn.checks import check_name, shown
from statsd_bn.environment import PREFIX, boolean
from statsd_bn.errors import ConfigurationError, ProtocolError
from statsd_bn.keys import ClientKeys, load_client
from statsd_bn.messages import WORLD

JOB = "default"

# What each argument may be, in words and in Python. A bool is an int to Python, and never meant here.
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("endpoint", "job", "policy", "transport", "on_nonfinite"), ("a str", (str,))),
    **dict.fromkeys(("rank", "world_size", "min_members"), ("an int", (int,))),
    **dict.fromkeys(("round_timeout", "join_timeout", "abort_after"), ("a number of seconds", (int, float))),
    "curve": ("a path", (str, os.PathLike)),
}
# The others are None by default.
_DEFAULTS = {"round_timeout": DEFAULT_ROUND_TIMEOUT, "policy": STRICT, "abort_after": DEFAULT_ABORT_AFTER}
_MAY_BE_NONE = _TYPES.keys() - {"round_timeout", "policy"}


@dataclass(frozen=True, slots=True)
class Settings:
    """All that `client.connect` has to know: its arguments with their defaults resolved, and what follows from them.

    Attributes:
        endpoint: where the server listens; None where rank 0 starts one, or this user's own is to be found.
        min_members: how few members an elastic job may go on with; 0 in a strict job.
        epoch: how often the launcher has restarted the processes.
        insecure: whether it may connect to a server by TCP without keys.
        store: where torch's store is, in which rank 0 says where its server is; None where there is an endpoint, or
            no launcher.
        is_one_node: whether all processes are on this host, as far as the launcher says.
        is_process_group: whether the processes are those of torch's process group, and no launcher says where a store
            is; then they meet in the group's store.
        launched: how many processes the launcher or the process group counts, where `world_size` says more; else None.
        stacks: whether this process tells where it is when others wait for it.
    """

    endpoint: Setting[str | None]
    job: Setting[str]
    rank: Setting[int]
    world_size: Setting[int]
    round_timeout: Setting[float]
    join_timeout: Setting[float]
    policy: Setting[str]
    min_members: Setting[int]
    epoch: Setting[int]
    curve: Setting[str | os.PathLike[str] | None]
    insecure: Setting[bool]
    store: Setting[StoreAddress] | None
    is_one_node: bool
    abort_after: Setting[float | None]
    stacks: Setting[bool]
    transport: Setting[str]
    on_nonfinite: Setting[str]
    is_process_group: bool
    launched: Setting[int] | None

    @property
    def is_alone(self) -> bool:
        """Whether this process is the only one there can be, and no server is named."""
        return self.world_size.value == 1 and not self.min_members.value and self.endpoint.value is None

    def __str__(self) -> str:
        all_of_them = (getattr(self, each.name) for each in fields(self))
        return ", ".join(str(one) for one in all_of_them if isinstance(one, Setting) and one.value is not None)

    def member(self) -> Member:
        """Returns who this process is, with the name of its host and its process id."""
        return Member(
            job=self.job.value,
            group=WORLD,
            epoch=self.epoch.value,
            rank=self.rank.value,
            world_size=self.world_size.value,
            round_timeout=self.round_timeout.value,
            host_and_pid=this_place(),
            min_members=self.min_members.value,
            join_timeout=self.join_timeout.value,
            abort_after=self.abort_after.value,
            tells_stacks=self.stacks.value,
            transport=self.transport.value,
            on_nonfinite=self.on_nonfinite.value,
        )

    def keys(self) -> ClientKeys | None:
        """Reads this client's keys; returns None where no file is named.

        Raises:
            ConfigurationError: there is no such file, or it is not a key file.
        """
        return load_client(Path(self.curve.value)) if self.curve.value else None


def resolve(environ: Mapping[str, str], group: ProcessGroup | None = None, **arguments: Any) -> Settings:
    """Finds the value of each setting.

    Args:
        environ: the environment.
        group: torch's process group; None where it is not initialised.
        arguments: those of `client.connect`.

    Raises:
        ConfigurationError: a value is unusable; the text says what it is and where it came from.
    """
    given = {**dict.fromkeys(_TYPES), **_DEFAULTS, **arguments}
    _check_types(given)
    at = _named(environ, "STATSD_BN_ENDPOINT", given)
    size = found("world_size", given["world_size"], ARGUMENT) or launchers.world_size(environ)
    number = found("rank", given["rank"], ARGUMENT) or launchers.rank(environ)
    if group:
        size, number = launchers.merged(size, number, group)
    if size and number is None:
        _check_is_alone(size)
    size, number = size or Setting("world_size", 1, DEFAULT), number or Setting("rank", 0, DEFAULT)
    _check_world_size(size)
    least = _min_members(given["policy"], given["min_members"], size)
    launched = _launched(environ, group)
    if launched and not least.value:  # newcomers may join an elastic job
        _check_is_whole(size, number, launched)
    _check_rank(number, size, is_elastic=least.value > 0)
    transport = _one_of(TRANSPORT_CHOICES, _named(environ, "STATSD_BN_TRANSPORT", given, TRANSPORT_CHOICES[0]))
    if least.value and transport.value == OVER_PROCESS_GROUP:
        raise ConfigurationError(f"{transport}: expected one that goes on without a lost rank, as the job is elastic")
    in_round, to_join = _timeouts(given["round_timeout"], given["join_timeout"])
    store = None if at.value else _store(environ, size)
    is_of_group = group is not None and group.size > 1 and (number.value, size.value) == group
    meets_in_group = at.value is None and is_of_group and not (store and _is_launched(number, environ))
    store = None if meets_in_group else store
    return Settings(
        endpoint=at,
        job=_job(environ, given["job"]),
        rank=number,
        world_size=size,
        round_timeout=in_round,
        join_timeout=to_join,
        policy=Setting("policy", given["policy"], DEFAULT if given["policy"] == STRICT else ARGUMENT),
        min_members=least,
        epoch=_epoch(environ),
        curve=_named(environ, "STATSD_BN_CURVE", given),
        insecure=_flag(environ, "STATSD_BN_INSECURE", default=False),
        store=store,
        is_one_node=store is not None and launchers.is_one_node(environ, store.value, size.value),
        is_process_group=meets_in_group,
        launched=launched if launched and launched.value < size.value else None,
        abort_after=_seconds("abort_after", given["abort_after"], or_none=" or None"),
        stacks=_flag(environ, "STATSD_BN_STACKS", default=True),
        transport=transport,
        on_nonfinite=_one_of(ON_NONFINITE, _named(environ, "STATSD_BN_ON_NONFINITE", given, ON_NONFINITE[0])),
    )


def _check_types(arguments: Mapping[str, Any]) -> None:
    for name, (expected, types) in _TYPES.items():
        value = arguments[name]
        if value is None and name in _MAY_BE_NONE:
            continue
        if isinstance(value, bool) or not isinstance(value, types):
            raise ConfigurationError(f"{name}: expected {expected}, got {shown(value)}")


def _named(environ: Mapping[str, str], variable: str, given: Mapping[str, Any], default: str | None = None) -> Any:
    """Returns the setting of the argument that a variable is named after, else of the variable, else the default."""
    name = variable.removeprefix(PREFIX).lower()
    return (
        found(name, given[name] or None, ARGUMENT)
        or found(name, environ.get(variable) or None, variable)
        or Setting(name, default, DEFAULT)
    )


def _job(environ: Mapping[str, str], given: str | None) -> Setting[str]:
    job = (
        found("job", given, ARGUMENT)
        or found("job", environ.get("STATSD_BN_JOB") or None, "STATSD_BN_JOB")
        or launchers.job(environ)
        or Setting("job", JOB, DEFAULT)
    )
    try:
        check_name("job", job.value, limits.MAX_NAME_BYTES)
    except ProtocolError as error:
        raise ConfigurationError(f"{error.message} ({job.source})") from None
    return job


def _epoch(environ: Mapping[str, str]) -> Setting[int]:
    epoch = launchers.epoch(environ) or Setting("epoch", 0, DEFAULT)
    if not 0 <= epoch.value <= limits.MAX_COUNTER:
        raise ConfigurationError(f"{epoch.source}: expected 0 to {limits.MAX_COUNTER}, got {epoch.value}")
    return epoch


def _check_is_alone(size: Setting[int]) -> None:
    """Of several processes without ranks each would take itself for rank 0."""
    if size.source != ARGUMENT and size.value > 1:
        raise ConfigurationError(
            f"RANK: expected this process's rank, since {size.source} says {size.value}, got nothing; set it for each "
            "process, or pass rank"
        )


def _check_world_size(size: Setting[int]) -> None:
    if not 1 <= size.value <= limits.MAX_MEMBERS:
        raise ConfigurationError(
            f"world_size: expected 1 to {limits.MAX_MEMBERS}, got {shown(size.value)} ({size.source})"
        )


def _launched(environ: Mapping[str, str], group: ProcessGroup | None) -> Setting[int] | None:
    """Returns the number of processes of a launcher of several, or of torch's process group; None if unknown."""
    with suppress(ConfigurationError):  # an argument may stand for a variable that is wrong
        if (launched := launchers.world_size(environ)) and launched.value > 1:
            return launched
    return Setting("world_size", group.size, PROCESS_GROUP) if group and group.size > 1 else None


def _check_is_whole(size: Setting[int], rank: Setting[int], launched: Setting[int]) -> None:
    """Raises ConfigurationError for a job of some of the launched processes, unless they have ranks of their own."""
    if size.value < launched.value and rank.source != ARGUMENT:
        raise ConfigurationError(
            f"world_size: expected at least {launched.value}, as {launched.source} says, got {size.value} "
            f"({size.source}); leave it out, or pass rank too for a job of some of these processes"
        )


def _check_rank(rank: Setting[int], size: Setting[int], *, is_elastic: bool) -> None:
    # Newcomers to an elastic job may bring it above the size that it began with.
    least_above, of = (limits.MAX_MEMBERS, "MAX_MEMBERS") if is_elastic else (size.value, "world_size")
    if not 0 <= rank.value < least_above:
        raise ConfigurationError(
            f"rank: expected a number in [0, {of}), here [0, {least_above}), "
            f"got {shown(rank.value)} ({rank.source}); {size}"
        )


def _min_members(policy: str, given: int | None, size: Setting[int]) -> Setting[int]:
    if policy not in {STRICT, ELASTIC}:
        raise ConfigurationError(f"policy: expected {STRICT!r} or {ELASTIC!r}, got {policy!r:.80}")
    if policy == STRICT:
        if given is not None:
            raise ConfigurationError(
                f"min_members: expected no value under the policy {STRICT!r}, got {shown(given)} ({ARGUMENT})"
            )
        return Setting("min_members", 0, DEFAULT)
    if given is None:
        return Setting("min_members", 1, DEFAULT)
    if not 1 <= given <= size.value:
        raise ConfigurationError(f"min_members: expected 1 to {size}, got {shown(given)} ({ARGUMENT})")
    return Setting("min_members", given, ARGUMENT)


def _timeouts(in_round: float, to_join: float | None) -> tuple[Setting[float], Setting[float]]:
    round_timeout, join_timeout = _seconds("round_timeout", in_round), _seconds("join_timeout", to_join)
    if to_join is None:
        source = DEFAULT if round_timeout.source == DEFAULT else "round_timeout"
        join_timeout = Setting("join_timeout", round_timeout.value, source)
    return round_timeout, join_timeout


def _seconds(name: str, given: float | None, or_none: str = "") -> Setting[Any]:
    if given is not None and not 0 < given <= limits.MAX_DEADLINE:
        raise ConfigurationError(
            f"{name}: expected seconds in (0, {limits.MAX_DEADLINE:g}]{or_none}, got {shown(given)} ({ARGUMENT})"
        )
    source = DEFAULT if given == _DEFAULTS.get(name) else ARGUMENT
    return Setting(name, None if given is None else float(given), source)


def _flag(environ: Mapping[str, str], variable: str, *, default: bool) -> Setting[bool]:
    name = variable.removeprefix(PREFIX).lower()
    is_set = bool(environ.get(variable, "").strip())
    return Setting(name, boolean(environ, variable), variable) if is_set else Setting(name, default, DEFAULT)


def _one_of(choices: Sequence[str], setting: Setting[str]) -> Setting[str]:
    if setting.value not in choices:
        expected = ", ".join(choices)
        raise ConfigurationError(
            f"{setting.name}: expected one of {expected}, got {setting.value!r:.80} ({setting.source})"
        )
    return setting


def _store(environ: Mapping[str, str], size: Setting[int]) -> Setting[StoreAddress] | None:
    store = launchers.store_address(environ)
    # Variables that are left in a shell do not make a launcher.
    is_launched = size.value > 1 or launchers.world_size(environ) is not None
    return store if is_launched else None


def _is_launched(rank: Setting[int], environ: Mapping[str, str]) -> bool:
    """Whether a launcher has given this process its rank."""
    launched = launchers.rank(environ)
    return launched is not None and launched.value == rank.value and rank.source != PROCESS_GROUP
