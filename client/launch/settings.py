"""Settings: the resolved configuration of `client.connect`, with the source of each value.

The precedence is: argument, STATSD_BN_ variable, the launcher's variables, torch's process group, default. A launcher
of one process cannot see the processes that its process starts, so a process group of several overrides it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
    **dict.fromkeys(("endpoint", "job", "transport", "on_nonfinite"), ("a str", str | None)),
    "policy": ("a str", str),
    **dict.fromkeys(("rank", "world_size", "min_members"), ("an int", int | None)),
    "round_timeout": ("a number of seconds", int | float),
    **dict.fromkeys(("join_timeout", "abort_after"), ("a number of seconds", int | float | None)),
    "curve": ("a path", str | os.PathLike | None),
}
# The other arguments default to None.
_DEFAULTS = {"round_timeout": DEFAULT_ROUND_TIMEOUT, "policy": STRICT, "abort_after": DEFAULT_ABORT_AFTER}


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved configuration of `client.connect`.

    Without `endpoint` rank 0 starts a server, and announces it in the launcher's store or, if `uses_process_group`, in
    the process group's. `launched` is the number of processes that were started, if `world_size` is larger.
    """

    member: Member
    endpoint: str | None
    store: StoreAddress | None
    is_one_node: bool
    uses_process_group: bool
    launched: Setting | None
    resolved: Mapping[str, Setting]

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
        curve = self.resolved["curve"].value
        return load_client(Path(curve)) if curve else None


def resolve(environ: Mapping[str, str], group: ProcessGroup | None = None, **arguments: Any) -> Settings:
    """Resolves the arguments of `client.connect`; a ConfigurationError contains the invalid value and its source."""
    given = {**dict.fromkeys(_TYPES), **_DEFAULTS, **arguments}
    for name, (expected, types) in _TYPES.items():
        if isinstance(given[name], bool) or not isinstance(given[name], types):
            raise ConfigurationError(f"{name}: expected {expected}, got {short_repr(given[name])}")
    if given["policy"] not in {STRICT, ELASTIC}:
        raise ConfigurationError(f"policy: expected {STRICT!r} or {ELASTIC!r}, got {given['policy']!r:.80}")
    endpoint = _text(environ, "STATSD_BN_ENDPOINT", given)
    try:
        launched = launchers.world_size(environ)
    except ConfigurationError:
        if given["world_size"] is None:
            raise
        launched = None  # the argument replaces an invalid variable
    # The launcher may have started only one process, which has started the members of the process group.
    of_group = group and Setting("world_size", group.size, PROCESS_GROUP)
    several = next((each for each in (launched, of_group) if each and each.value > 1), None)
    size, rank = _size_and_rank(environ, given, launched, several, group)
    min_members = _min_members(given, size)
    transport = _text(environ, "STATSD_BN_TRANSPORT", given, TRANSPORT_CHOICES)
    if given["policy"] == ELASTIC and transport.value == OVER_PROCESS_GROUP:
        raise ConfigurationError(
            f"{transport}: expected 'auto' or 'server' for an elastic job; a process group ends with a lost rank"
        )
    round_timeout, join_timeout, abort_after = (
        _seconds(given, name) for name in ("round_timeout", "join_timeout", "abort_after")
    )
    if join_timeout.value is None:
        source = DEFAULT if round_timeout.source == DEFAULT else "round_timeout"
        join_timeout = Setting("join_timeout", round_timeout.value, source)
    store, uses_process_group = (None, False) if endpoint.value else _store(environ, size, rank, launched, group)
    settings: tuple[Setting | None, ...] = (
        *(endpoint, _job(environ, given["job"]), rank, size, round_timeout, join_timeout),
        Setting("policy", given["policy"], DEFAULT if given["policy"] == STRICT else ARGUMENT),
        *(min_members, launchers.epoch(environ), _text(environ, "STATSD_BN_CURVE", given)),
        *(_flag(environ, "STATSD_BN_INSECURE", default=False), store, abort_after),
        *(_flag(environ, "STATSD_BN_STACKS", default=True), transport),
        _text(environ, "STATSD_BN_ON_NONFINITE", given, ON_NONFINITE),
    )
    resolved = {setting.name: setting for setting in settings if setting}
    of_member = {each.name: resolved[each.name].value for each in fields(Member) if each.name in resolved}
    return Settings(
        member=Member(group=WORLD, host_and_pid=host_and_pid(), reports_stacks=resolved["stacks"].value, **of_member),
        endpoint=endpoint.value,
        store=store.value if store else None,
        is_one_node=store is not None and launchers.is_one_node(environ, store.value, size.value),
        uses_process_group=uses_process_group,
        launched=several if several and several.value < size.value else None,
        resolved=resolved,
    )


def _text(environ: Mapping[str, str], variable: str, given: Mapping[str, Any], choices: Sequence[str] = ()) -> Setting:
    """Resolves an argument that has a STATSD_BN_ variable of the same name; without a value, to the first choice."""
    name = variable.removeprefix(PREFIX).lower()
    # An empty text is no value.
    setting = optional(name, given[name] or None, ARGUMENT) or optional(name, environ.get(variable) or None, variable)
    setting = setting or Setting(name, choices[0] if choices else None, DEFAULT)
    if choices and setting.value not in choices:
        got = f"got {setting.value!r:.80} ({setting.source})"
        raise ConfigurationError(f"{setting.name}: expected one of {', '.join(choices)}, {got}")
    return setting


def _flag(environ: Mapping[str, str], variable: str, *, default: bool) -> Setting:
    name = variable.removeprefix(PREFIX).lower()
    if not environ.get(variable, "").strip():
        return Setting(name, default, DEFAULT)
    return Setting(name, boolean(environ, variable), variable)


def _seconds(given: Mapping[str, Any], name: str) -> Setting:
    seconds = given[name]
    if seconds is not None and not 0 < seconds <= limits.MAX_DEADLINE:
        or_none = " or None" if name == "abort_after" else ""
        got = f"got {short_repr(seconds)} ({ARGUMENT})"
        raise ConfigurationError(f"{name}: expected seconds in (0, {limits.MAX_DEADLINE:g}]{or_none}, {got}")
    source = DEFAULT if seconds == _DEFAULTS.get(name) else ARGUMENT
    return Setting(name, None if seconds is None else float(seconds), source)


def _job(environ: Mapping[str, str], argument: str | None) -> Setting:
    job = optional("job", argument, ARGUMENT) or optional("job", environ.get("STATSD_BN_JOB") or None, "STATSD_BN_JOB")
    job = job or launchers.job(environ) or Setting("job", "default", DEFAULT)
    try:
        check_name("job", job.value, limits.MAX_NAME_BYTES)
    except ProtocolError as error:
        raise ConfigurationError(f"{error.message} ({job.source})") from None
    return job


def _size_and_rank(
    environ: Mapping[str, str],
    given: Mapping[str, Any],
    launched: Setting | None,
    several: Setting | None,
    group: ProcessGroup | None,
) -> tuple[Setting, Setting]:
    size = optional("world_size", given["world_size"], ARGUMENT) or launched
    rank = optional("rank", given["rank"], ARGUMENT) or launchers.rank(environ)
    if group:
        if size and size.source != ARGUMENT and size.value == 1 < group.size:
            # The launcher has started one process, which has started the others.
            size, rank = None, rank if rank and rank.source == ARGUMENT else None
        for setting, value in ((size, group.size), (rank, group.rank)):
            if setting and setting.source != ARGUMENT and setting.value != value:
                raise ConfigurationError(
                    f"{setting.name}: expected the same from the launcher and from torch's process group, got "
                    f"{setting.value} ({setting.source}) and {value}; pass rank and world_size"
                )
        size = size or Setting("world_size", group.size, PROCESS_GROUP)
        rank = rank or Setting("rank", group.rank, PROCESS_GROUP)
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
    is_elastic = given["policy"] == ELASTIC
    # New members may raise an elastic job above its initial size.
    if several and size.value < several.value and rank.source != ARGUMENT and not is_elastic:
        raise ConfigurationError(
            f"world_size: expected at least {several.value}, as {several.source} says, got {size.value} "
            f"({size.source}); omit it, or pass rank too for a job of some of these processes"
        )
    bound, name = (limits.MAX_MEMBERS, "MAX_MEMBERS") if is_elastic else (size.value, "world_size")
    if not 0 <= rank.value < bound:
        raise ConfigurationError(
            f"rank: expected a number in [0, {name}), here [0, {bound}), got {short_repr(rank.value)} ({rank.source}); "
            f"{size}"
        )
    return size, rank


def _min_members(given: Mapping[str, Any], size: Setting) -> Setting:
    policy, argument = given["policy"], given["min_members"]
    if argument is None:
        return Setting("min_members", 1 if policy == ELASTIC else 0, DEFAULT)
    if policy == STRICT:
        raise ConfigurationError(
            f"min_members: expected no value under the policy {STRICT!r}, got {short_repr(argument)} ({ARGUMENT}); "
            f"pass policy={ELASTIC!r}, or omit min_members"
        )
    if not 1 <= argument <= size.value:
        raise ConfigurationError(f"min_members: expected 1 to {size}, got {short_repr(argument)} ({ARGUMENT})")
    return Setting("min_members", argument, ARGUMENT)


def _store(
    environ: Mapping[str, str], size: Setting, rank: Setting, launched: Setting | None, group: ProcessGroup | None
) -> tuple[Setting | None, bool]:
    """Returns the launcher's store, and whether the store of torch's process group replaces it."""
    # Leftover variables in a shell do not mean that there is a launcher.
    store = launchers.store_address(environ) if launched or size.value > 1 else None
    if group is None or group.size == 1 or (rank.value, size.value) != group:
        return store, False
    of_launcher = launchers.rank(environ) if store and rank.source != PROCESS_GROUP else None
    has_launched = of_launcher is not None and of_launcher.value == rank.value
    return (store, False) if has_launched else (None, True)
