"""Settings: the resolved configuration of `client.connect`, with the source of each value.

The precedence is: argument, STATSD_BN_ variable, the launcher's variables, torch's process group, default. A launcher
of one process cannot see the processes that this one has started, so a process group of several overrides it.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.launch import launchers
from client.launch.launchers import ARGUMENT, DEFAULT, PROCESS_GROUP, ProcessGroup, Setting, StoreAddress, optional
from client.session.groups import host_and_pid
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
from statsd_bn.checks import check_name, short_repr
from statsd_bn.environment import PREFIX, boolean
from statsd_bn.errors import ConfigurationError, ProtocolError
from statsd_bn.keys import ClientKeys, load_client
from statsd_bn.messages import WORLD

# The types of the arguments, as text and in Python. A bool is an int in Python, but invalid for each of them.
_TYPES: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(("endpoint", "job", "policy", "transport", "on_nonfinite"), ("a str", str)),
    **dict.fromkeys(("rank", "world_size", "min_members"), ("an int", int)),
    **dict.fromkeys(("round_timeout", "join_timeout", "abort_after"), ("a number of seconds", int | float)),
    "curve": ("a path", str | os.PathLike),
}
# The other arguments default to None.
_DEFAULTS = {"round_timeout": DEFAULT_ROUND_TIMEOUT, "policy": STRICT, "abort_after": DEFAULT_ABORT_AFTER}

# The settings that are attributes of `Member`, under the same names.
_MEMBER_SETTINGS = (
    *("job", "epoch", "rank", "world_size", "min_members", "round_timeout", "join_timeout", "abort_after"),
    *("transport", "on_nonfinite"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved configuration of `client.connect`.

    Without `endpoint` rank 0 starts a server, and announces it in the launcher's store or, if `uses_process_group`, in
    the process group's. `launched` is the launcher's or the process group's size, if `world_size` is larger.
    """

    member: Member
    endpoint: str | None
    curve: str | os.PathLike[str] | None
    insecure: bool
    store: StoreAddress | None
    is_one_node: bool
    uses_process_group: bool
    launched: Setting[int] | None
    resolved: Mapping[str, Setting[Any]]

    @property
    def is_alone(self) -> bool:
        """Whether the job can have no other process, and no server is named."""
        return self.member.world_size == 1 and not self.member.is_elastic and self.endpoint is None

    def __str__(self) -> str:
        return ", ".join(str(setting) for setting in self.resolved.values() if setting.value is not None)

    def source(self, name: str) -> str:
        """Returns the source of a setting."""
        return self.resolved[name].source

    def load_keys(self) -> ClientKeys | None:
        """Reads this client's keys; returns None if no file is configured."""
        return load_client(Path(self.curve)) if self.curve else None


def resolve(environ: Mapping[str, str], group: ProcessGroup | None = None, **arguments: Any) -> Settings:
    """Resolves the arguments of `client.connect`; a ConfigurationError contains the invalid value and its source."""
    given = {**dict.fromkeys(_TYPES), **_DEFAULTS, **arguments}
    _check_types(given)
    endpoint = _text(environ, "STATSD_BN_ENDPOINT", given)
    size = optional("world_size", given["world_size"], ARGUMENT) or launchers.world_size(environ)
    rank = optional("rank", given["rank"], ARGUMENT) or launchers.rank(environ)
    if group:
        size, rank = launchers.merge_process_group(size, rank, group)
    size, rank = _checked_size_and_rank(size, rank)
    policy = Setting("policy", given["policy"], DEFAULT if given["policy"] == STRICT else ARGUMENT)
    min_members = _min_members(policy.value, given["min_members"], size)
    is_elastic = min_members.value > 0
    launched = _launched(environ, group)
    # New members may raise an elastic job above its initial size.
    if launched and size.value < launched.value and rank.source != ARGUMENT and not is_elastic:
        raise ConfigurationError(
            f"world_size: expected at least {launched.value}, as {launched.source} says, got {size.value} "
            f"({size.source}); omit it, or pass rank too for a job of some of these processes"
        )
    bound, name = (limits.MAX_MEMBERS, "MAX_MEMBERS") if is_elastic else (size.value, "world_size")
    if not 0 <= rank.value < bound:
        raise ConfigurationError(
            f"rank: expected a number in [0, {name}), here [0, {bound}), got {short_repr(rank.value)} ({rank.source}); "
            f"{size}"
        )
    transport = _choice(TRANSPORT_CHOICES, _text(environ, "STATSD_BN_TRANSPORT", given, TRANSPORT_CHOICES[0]))
    if is_elastic and transport.value == OVER_PROCESS_GROUP:
        raise ConfigurationError(
            f"{transport}: expected 'auto' or 'server' for an elastic job; a process group ends with a lost rank"
        )
    round_timeout, join_timeout = (_seconds(name, given[name]) for name in ("round_timeout", "join_timeout"))
    if join_timeout.value is None:
        source = DEFAULT if round_timeout.source == DEFAULT else "round_timeout"
        join_timeout = Setting("join_timeout", round_timeout.value, source)
    store, uses_process_group = (None, False) if endpoint.value else _store(environ, size, rank, group)
    settings: tuple[Setting[Any] | None, ...] = (
        endpoint,
        _job(environ, given["job"]),
        rank,
        size,
        round_timeout,
        join_timeout,
        policy,
        min_members,
        _epoch(environ),
        _text(environ, "STATSD_BN_CURVE", given),
        _flag(environ, "STATSD_BN_INSECURE", default=False),
        store,
        _seconds("abort_after", given["abort_after"], or_none=" or None"),
        _flag(environ, "STATSD_BN_STACKS", default=True),
        transport,
        _choice(ON_NONFINITE, _text(environ, "STATSD_BN_ON_NONFINITE", given, ON_NONFINITE[0])),
    )
    resolved = {setting.name: setting for setting in settings if setting}
    member = Member(
        group=WORLD,
        host_and_pid=host_and_pid(),
        reports_stacks=resolved["stacks"].value,
        **{name: resolved[name].value for name in _MEMBER_SETTINGS},
    )
    return Settings(
        member=member,
        endpoint=endpoint.value,
        curve=resolved["curve"].value,
        insecure=resolved["insecure"].value,
        store=store.value if store else None,
        is_one_node=store is not None and launchers.is_one_node(environ, store.value, size.value),
        uses_process_group=uses_process_group,
        launched=launched if launched and launched.value < size.value else None,
        resolved=resolved,
    )


def _check_types(arguments: Mapping[str, Any]) -> None:
    for name, (expected, types) in _TYPES.items():
        value = arguments[name]
        if value is None and name not in {"round_timeout", "policy"}:
            continue
        if isinstance(value, bool) or not isinstance(value, types):
            raise ConfigurationError(f"{name}: expected {expected}, got {short_repr(value)}")


def _text(environ: Mapping[str, str], variable: str, given: Mapping[str, Any], default: str | None = None) -> Any:
    """Resolves an argument that has a STATSD_BN_ variable of the same name; empty values count as missing."""
    name = variable.removeprefix(PREFIX).lower()
    setting = optional(name, given[name] or None, ARGUMENT) or optional(name, environ.get(variable) or None, variable)
    return setting or Setting(name, default, DEFAULT)


def _job(environ: Mapping[str, str], argument: str | None) -> Setting[str]:
    variable = optional("job", environ.get("STATSD_BN_JOB") or None, "STATSD_BN_JOB")
    job = (
        optional("job", argument, ARGUMENT) or variable or launchers.job(environ) or Setting("job", "default", DEFAULT)
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


def _checked_size_and_rank(size: Setting[int] | None, rank: Setting[int] | None) -> tuple[Setting[int], Setting[int]]:
    if size and rank is None and size.source != ARGUMENT and size.value > 1:
        # Each of these processes would connect as rank 0.
        raise ConfigurationError(
            f"RANK: expected this process's rank, since {size.source} says {size.value}, got nothing; set it for each "
            "process, or pass rank"
        )
    size, rank = size or Setting("world_size", 1, DEFAULT), rank or Setting("rank", 0, DEFAULT)
    if not 1 <= size.value <= limits.MAX_MEMBERS:
        got = f"got {short_repr(size.value)} ({size.source})"
        raise ConfigurationError(f"world_size: expected 1 to {limits.MAX_MEMBERS}, {got}")
    return size, rank


def _launched(environ: Mapping[str, str], group: ProcessGroup | None) -> Setting[int] | None:
    """Returns the number of processes of a launcher of several, or of torch's process group; None if unknown."""
    with suppress(ConfigurationError):  # an argument may replace an invalid variable
        if (launched := launchers.world_size(environ)) and launched.value > 1:
            return launched
    return Setting("world_size", group.size, PROCESS_GROUP) if group and group.size > 1 else None


def _min_members(policy: str, argument: int | None, size: Setting[int]) -> Setting[int]:
    if policy not in {STRICT, ELASTIC}:
        raise ConfigurationError(f"policy: expected {STRICT!r} or {ELASTIC!r}, got {policy!r:.80}")
    if policy == STRICT:
        if argument is not None:
            raise ConfigurationError(
                f"min_members: expected no value under the policy {STRICT!r}, got {short_repr(argument)} ({ARGUMENT}); "
                f"pass policy={ELASTIC!r}, or omit min_members"
            )
        return Setting("min_members", 0, DEFAULT)
    if argument is None:
        return Setting("min_members", 1, DEFAULT)
    if not 1 <= argument <= size.value:
        raise ConfigurationError(f"min_members: expected 1 to {size}, got {short_repr(argument)} ({ARGUMENT})")
    return Setting("min_members", argument, ARGUMENT)


def _seconds(name: str, argument: float | None, or_none: str = "") -> Setting[Any]:
    if argument is not None and not 0 < argument <= limits.MAX_DEADLINE:
        got = f"got {short_repr(argument)} ({ARGUMENT})"
        raise ConfigurationError(f"{name}: expected seconds in (0, {limits.MAX_DEADLINE:g}]{or_none}, {got}")
    source = DEFAULT if argument == _DEFAULTS.get(name) else ARGUMENT
    return Setting(name, None if argument is None else float(argument), source)


def _flag(environ: Mapping[str, str], variable: str, *, default: bool) -> Setting[bool]:
    name = variable.removeprefix(PREFIX).lower()
    if not environ.get(variable, "").strip():
        return Setting(name, default, DEFAULT)
    return Setting(name, boolean(environ, variable), variable)


def _choice(choices: Sequence[str], setting: Setting[str]) -> Setting[str]:
    if setting.value not in choices:
        got = f"got {setting.value!r:.80} ({setting.source})"
        raise ConfigurationError(f"{setting.name}: expected one of {', '.join(choices)}, {got}")
    return setting


def _store(
    environ: Mapping[str, str], size: Setting[int], rank: Setting[int], group: ProcessGroup | None
) -> tuple[Setting[StoreAddress] | None, bool]:
    """Returns the launcher's store, and whether the store of torch's process group replaces it."""
    store = launchers.store_address(environ)
    if size.value == 1 and launchers.world_size(environ) is None:
        store = None  # leftover variables in a shell do not mean that there is a launcher
    if group is None or group.size == 1 or (rank.value, size.value) != group:
        return store, False
    launched = launchers.rank(environ) if store else None
    has_launched = launched is not None and launched.value == rank.value and rank.source != PROCESS_GROUP
    return (store, False) if has_launched else (None, True)
