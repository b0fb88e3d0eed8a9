"""Arguments: a parser with one-line errors and suggestions for misspelt options."""

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from statsd_bn.endpoints import MAX_DIGITS, MAX_PORT
from statsd_bn.text import escape

CONSOLE_SCRIPT = "statsd-bn"

USAGE_ERROR = 2


def program(*command: str) -> str:
    """The command as the user typed it: `statsd-bn status` or `python -m server status`."""
    name = CONSOLE_SCRIPT if sys.argv and Path(sys.argv[0]).stem == CONSOLE_SCRIPT else "python -m server"
    return " ".join((name, *command))


class Parser(argparse.ArgumentParser):
    """An argument parser with short errors; flags cannot be abbreviated, so that a new one breaks no script."""

    def __init__(self, *command: str, **given: Any) -> None:
        super().__init__(prog=program(*command), allow_abbrev=False, **given)

    def parse_args(  # type: ignore[override]  # argparse has an overload for each sort of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """The values of the arguments; exits with 2 for an unknown one."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return found

    def error(self, message: str) -> NoReturn:
        """Prints the error on one line and exits with 2."""
        self.exit(USAGE_ERROR, f"statsd_bn: {escape(message)} (see {self.prog} --help)\n")

    def _unknown(self, argument: str) -> str:
        flag = argument.partition("=")[0]
        if flag.startswith("-"):
            return f"unknown option {flag}{suggestion(flag, self._option_string_actions)}"
        return f"unexpected argument {argument!r}"


def number_type(kind: type[int] | type[float], expected: str) -> Callable[[str], float]:
    """Returns a `type` for `add_argument` that parses a number."""

    def read(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r:.80}") from None

    return read


def host_and_port(text: str) -> tuple[str, int]:
    """Parses HOST:PORT, with an IPv6 address in brackets."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isascii() and port.isdecimal() and len(port) <= MAX_DIGITS and int(port) <= MAX_PORT):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT with a port of 0 to {MAX_PORT}, got {text!r:.80}")
    return host, int(port)


def suggestion(given: str, known: Iterable[str]) -> str:
    """Suffix of an error about an unknown word: the closest known word, or ""."""
    nearest = difflib.get_close_matches(given, list(known), 1)
    return f"; did you mean {nearest[0]}?" if nearest else ""
