"""Configuration: flags and STATSD_BN_* variables, resolved once into a frozen object. All commands use `Parser`."""

import argparse
import difflib
import logging
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from server.security.quota import Quota, option_range
from statsd_bn import PROTOCOL_VERSION, __version__
from statsd_bn.checks import short_repr
from statsd_bn.endpoints import MAX_PORT, check_endpoint, default_endpoint, is_port, needs_keys
from statsd_bn.environment import LOG_LEVELS, boolean, log_level
from statsd_bn.errors import ConfigurationError
from statsd_bn.text import escape

CONSOLE_SCRIPT, USAGE_ERROR = "statsd-bn", 2


class Parser(argparse.ArgumentParser):
    """An argument parser with short errors. Flags cannot be abbreviated, because a new flag may share the prefix."""

    def __init__(self, *command: str, **given: Any) -> None:
        # As the user typed it: `statsd-bn status` or `python -m server status`.
        name = CONSOLE_SCRIPT if sys.argv and Path(sys.argv[0]).stem == CONSOLE_SCRIPT else "python -m server"
        super().__init__(prog=" ".join((name, *command)), allow_abbrev=False, **given)

    def parse_args(  # type: ignore[override]  # argparse has an overload for each sort of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """The values of the arguments; exits with 2 for an unknown one."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            if flag.startswith("-"):
                self.error(f"unknown option {flag}{suggestion(flag, self._option_string_actions)}")
            self.error(f"unexpected argument {unknown[0]!r}")
        return found

    def error(self, message: str) -> NoReturn:
        """Prints the error on one line and exits with 2."""
        self.exit(USAGE_ERROR, f"statsd_bn: {escape(message)} (see {self.prog} --help)\n")


def number_type(kind: type[int] | type[float], expected: str) -> Callable[[str], float]:
    """Returns a `type` for `add_argument` that parses a number."""

    def read(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise ArgumentTypeError(f"expected {expected}, got {text!r:.80}") from None

    return read


def host_and_port(text: str) -> tuple[str, int]:
    """Parses HOST:PORT, with an IPv6 address in brackets."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and is_port(port)):
        raise ArgumentTypeError(f"expected HOST:PORT with a port of 0 to {MAX_PORT}, got {text!r:.80}")
    return host, int(port)


def suggestion(given: str, known: Iterable[str]) -> str:
    """Suffix of an error about an unknown word: the closest known word, or ""."""
    nearest = difflib.get_close_matches(given, list(known), 1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


MAX_PARENT = 2**31 - 1  # the largest process id of any system

VERSION = f"statsd-bn {__version__} (protocol {PROTOCOL_VERSION})"


@dataclass(frozen=True, slots=True)
class Config:
    """Configuration of a server.

    Attributes:
        bind: ZeroMQ endpoints to listen on; default: a Unix socket of this user.
        log_level: one of `LOG_LEVELS`.
        insecure: allow TCP without keys, for a closed network.
        curve: folder with the server's keys and its clients' public keys, as written by `python -m server keygen`; "-":
            standard input, see `statsd_bn.keys.ServerKeys`; None: no keys.
        quota: limits on sizes, memory and times.
        parent: id of the parent process: the server ends when this process ends, or when all members have left; None:
            the server ends only by a signal.
        again: whether this server replaces a killed one of the same parent; then it also ends if no member reconnects.

    Raises:
        ConfigurationError: a value is invalid.
    """

    bind: tuple[str, ...] = field(default_factory=lambda: (default_endpoint(os.environ),))
    log_level: str = "info"
    insecure: bool = False
    curve: str | None = None
    quota: Quota = field(default_factory=Quota)
    parent: int | None = None
    again: bool = False

    def __post_init__(self) -> None:
        if self.log_level not in LOG_LEVELS:
            raise ConfigurationError(f"log level: expected one of {LOG_LEVELS}, got {self.log_level!r}")
        if not self.bind:
            raise ConfigurationError("bind: expected at least one endpoint, got none")
        if self.parent is not None and not 1 <= self.parent <= MAX_PARENT:
            text = f"parent: expected the id of a process, 1 to {MAX_PARENT}, got {short_repr(self.parent)}"
            raise ConfigurationError(text)
        if self.again and self.parent is None:
            raise ConfigurationError("again: expected a parent with it, got none")
        for endpoint in self.bind:
            check_endpoint(endpoint, "bind")
            if needs_keys(endpoint) and not (self.curve or self.insecure):
                raise ConfigurationError(
                    f"bind: {endpoint} has no keys: TCP needs --curve DIR, as `python -m server keygen DIR` makes it. "
                    "Leave out --bind for a Unix socket of this user, or say --insecure if strangers cannot reach the "
                    "network"
                )

    @property
    def logging_level(self) -> int:
        """The numeric log level of `logging`."""
        return logging.getLevelNamesMapping()[self.log_level.upper()]


def parser(environ: Mapping[str, str]) -> Parser:
    """Parser of `python -m server`. A flag that is not given has the value of its variable, if that is set."""
    result = Parser(
        description="The statsd_bn aggregation server: sums batch-norm statistics over the replicas of a job.",
        usage="%(prog)s [COMMAND] [OPTIONS]",
        epilog="Commands: `status` prints the status of a running server, `view` serves it as a page, `check` says "
        "whether it answers, `report` prints what a bug report needs, `keygen DIR` makes keys for --curve, "
        "`secret FILE` the secret of a job on several nodes; `serve` runs the server, as `python -m server` alone "
        "does. Each command has a --help. `statsd-bn COMMAND` and `python -m server COMMAND` are the same; "
        "`statsd-bn` alone prints this help.",
    )
    bind = "ZeroMQ endpoint to listen on, repeatable; * picks a free port and prints it (STATSD_BN_BIND, separated by "
    bind += "commas; default: ipc in a folder that only this user can enter)"
    result.add_argument("--bind", action="append", metavar="ENDPOINT", help=bind)
    version = "print the versions of the program and of its protocol"
    result.add_argument("--version", action="version", version=VERSION, help=version)
    level = "level of the log (STATSD_BN_LOG_LEVEL; default info)"
    result.add_argument("--log-level", type=str.lower, choices=LOG_LEVELS, help=level)
    insecure = "listen on TCP without keys: anybody who can connect may join, end, read and falsify any job "
    insecure += "(STATSD_BN_INSECURE=1, which clients need too)"
    result.add_argument("--insecure", action="store_true", help=insecure)
    curve = "accept only clients with a public key in DIR, and encrypt; SIGHUP reloads the keys; with - as DIR, "
    curve += "the server's keys and one client's come from standard input (STATSD_BN_CURVE)"
    result.add_argument("--curve", metavar="DIR", default=environ.get("STATSD_BN_CURVE") or None, help=curve)
    process_id = number_type(int, f"the id of a process, 1 to {MAX_PARENT}")
    parent = "process that starts the server: end when it has ended, or when all members have left"
    result.add_argument("--parent", type=process_id, metavar="PID", help=parent)
    again = "with --parent, for the successor of a killed server: also end if no member reconnects"
    result.add_argument("--again", action="store_true", help=again)
    limits = result.add_argument_group("limits", "Requests beyond a limit get an error, and the status counts them.")
    for option in fields(Quota):
        flag, reason = f"--{option.name.replace('_', '-')}", option.metadata["reason"]
        text = f"{reason} ({_variable(option)}; default {option.default})"
        limits.add_argument(flag, type=_number_type(option), metavar="N", help=text)
    return result


def _variable(option: "Field[Any]") -> str:
    return f"STATSD_BN_{option.name.upper()}"


def _number_type(option: "Field[Any]") -> Callable[[str], float]:
    kind: Any = type(option.default)
    return number_type(kind, option_range(option))


def _limit(found: Any, environ: Mapping[str, str], option: "Field[Any]") -> Any:
    """Value of a limit: from its flag, else from its variable, else the default."""
    value, given = getattr(found, option.name), environ.get(_variable(option))
    if value is not None or not given:
        return option.default if value is None else value
    try:
        return _number_type(option)(given)
    except ArgumentTypeError as error:
        raise ConfigurationError(f"{_variable(option)}: {error}") from None


def from_arguments(arguments: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Configuration from a command line and an environment."""
    found = parser(environ).parse_args(arguments)
    quota = Quota(**{option.name: _limit(found, environ, option) for option in fields(Quota)})
    bind = tuple(found.bind or bind_endpoints(environ) or [default_endpoint(environ)])
    level = found.log_level or log_level(environ, "STATSD_BN_LOG_LEVEL", "info")
    insecure = found.insecure or boolean(environ, "STATSD_BN_INSECURE")
    return Config(bind, level, insecure, found.curve, quota, found.parent, found.again)


def bind_endpoints(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Endpoints in STATSD_BN_BIND."""
    return tuple(filter(None, map(str.strip, environ.get("STATSD_BN_BIND", "").split(","))))
