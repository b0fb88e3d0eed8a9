"""Watch: what `status` shows, once or every second until it is interrupted."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from statsd_bn.error_text import in_log
from statsd_bn.errors import ServerUnreachable

PERIOD_SECONDS = 1.0

# To a terminal: to the top left; clear the rest of a line; clear all below. Each line is written over the last one, so
# that nothing flickers.
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_CLEAR = "\x1b[2J"


def as_json(report: dict[str, Any]) -> str:
    """A report on one line, for a program."""
    return json.dumps(report, ensure_ascii=False, sort_keys=True)


def watch(text: Callable[[], str], out: TextIO | None = None, pause: Callable[[float], None] = time.sleep) -> None:
    """Shows a text every second, until Ctrl-C.

    Args:
        text: returns what to show now. A server that does not answer later on is told in its place.
        out: where to; default: the standard output.
        pause: waits for so many seconds.

    Raises:
        ServerUnreachable: there was no server from the beginning.
    """
    out = out or sys.stdout
    is_terminal = out.isatty()
    try:
        shown = text()
        if is_terminal:
            out.write(_CLEAR)
        while True:
            out.write(_over(shown) if is_terminal else f"{shown}\n")
            out.flush()
            pause(PERIOD_SECONDS)
            shown = _or_error(text)
    except KeyboardInterrupt:
        out.write("\n" if is_terminal else "")


def _over(text: str) -> str:
    lines = "".join(f"{line}{_END_OF_LINE}\n" for line in text.split("\n"))
    return f"{_HOME}{lines}{_BELOW}"


def _or_error(text: Callable[[], str]) -> str:
    try:
        return text()
    except ServerUnreachable as error:
        return in_log(error)
