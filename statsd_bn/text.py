"""Text from others, on its way to people: nothing in it can speak to a terminal or forge a line.

Whatever is not printable is written as a string literal of Python would have it. A name, and a line of a log, is
printable throughout. An error's message or a cause may have several lines, so line feeds and tabs stay.
"""

import re
from typing import Any

from statsd_bn import limits

# What a line begins with that goes on with the sentence of the line before.
CONTINUED = "    "

_LAYOUT = "\n\t"
_GOES_ON = re.compile(f"\n{CONTINUED}(?! )")
_SPACES = re.compile(" {2,}")
_WITHOUT_LAYOUT = str.maketrans("", "", _LAYOUT)


def is_readable(text: str) -> bool:
    """Returns whether all of a text is printable but for line feeds and tabs."""
    return text.isprintable() or text.translate(_WITHOUT_LAYOUT).isprintable()


def plain(text: str) -> str:
    """Returns a text on one line, with all that is not printable escaped, line feeds too."""
    return text if text.isprintable() else _escaped(text, "")


def on_one_line(text: str) -> str:
    """Returns a text of several lines on one, for a log: its lines follow one another as parts of a sentence."""
    if "\n" not in text:
        return plain(text)
    lines = [_SPACES.sub(" ", line.strip()) for line in unfolded(text).split("\n") if line.strip()]
    ended = [line if line.endswith((",", ";", ":", ".")) else f"{line};" for line in lines[:-1]]
    return plain(" ".join([*ended, *lines[-1:]]))


def unfolded(text: str) -> str:
    """Returns a text whose lines are whole: one that goes on with the sentence of the line before is joined to it."""
    return _GOES_ON.sub(" ", text)


def readable(text: str) -> str:
    """Returns a text with all that is not printable escaped, line feeds and tabs excepted."""
    return text if text.isprintable() else _escaped(text, _LAYOUT)


def told(text: str, most: int = limits.MAX_TEXT_BYTES) -> str:
    """Returns a text as a message may carry it: readable, and cut where it has more than `most` bytes."""
    return readable(text).encode()[:most].decode(errors="ignore")


def readable_within(value: Any, depth: int = 0) -> Any:
    """Returns plain values with each text in them readable; what is nested too deep is left out."""
    if isinstance(value, str):
        return readable(value)
    if not isinstance(value, dict | list | tuple):
        return value
    if depth == limits.MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {readable_within(name, depth + 1): readable_within(part, depth + 1) for name, part in value.items()}
    return [readable_within(part, depth + 1) for part in value]


def _escaped(text: str, kept: str) -> str:
    return "".join(
        letter if letter.isprintable() or letter in kept else letter.encode("unicode_escape").decode()
        for letter in text
    )
