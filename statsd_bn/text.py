"""Escaping of text from other processes, and the layout of errors.

Text from others is escaped, so that it can neither control a terminal nor forge a log line. Names and log lines are
printable throughout; messages of errors and causes keep line feeds and tabs.

The first line of an error says what happened, in at most `FIRST_LINE` characters. A table follows, with a row per rank,
then the job, group and round, then what to do; docs/errors.md shows examples.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from statsd_bn import limits

CONTINUED = "    "  # indentation of a line that continues the sentence of the line before

FIRST_LINE = 80  # width of an error's first line, after its module and class, which take up to 40 of 120 columns
MAX_ROWS, FEW_ROWS = 16, 3  # of a table; if more ranks wait, it shows a few of each section and counts the others

# A first line is preferably broken after one of these that begins at column `_SHORTEST` or later.
_ENDS, _SHORTEST = ("; ", ". ", ": ", ", "), 40

_LAYOUT = "\n\t"
_CONTINUATION = re.compile(f"\n{CONTINUED}(?! )")
_SPACES = re.compile(" {2,}")
_WITHOUT_LAYOUT = str.maketrans("", "", _LAYOUT)


def is_printable_text(text: str) -> bool:
    """Returns whether a text is printable except for line feeds and tabs."""
    return text.isprintable() or text.translate(_WITHOUT_LAYOUT).isprintable()


def escape(text: str, allowed: str = "") -> str:
    """Returns a text with all unprintable characters escaped, except those in `allowed`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in allowed else c.encode("unicode_escape").decode() for c in text)


def escape_lines(text: str) -> str:
    """Returns a text with unprintable characters escaped, except line feeds and tabs."""
    return escape(text, _LAYOUT)


def escape_nested(value: Any, depth: int = 0) -> Any:
    """Returns plain values with all their texts escaped; values nested too deep become "..."."""
    if isinstance(value, str):
        return escape_lines(value)
    if not isinstance(value, dict | list | tuple):
        return value
    if depth == limits.MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {escape_nested(name, depth + 1): escape_nested(part, depth + 1) for name, part in value.items()}
    return [escape_nested(part, depth + 1) for part in value]


def wire_text(text: str, most: int = limits.MAX_TEXT_BYTES) -> str:
    """Returns a text that a message can carry: escaped, and cut to `most` bytes."""
    return escape_lines(text).encode()[:most].decode(errors="ignore")


def two_digits(value: float) -> str:
    """Returns a number with two significant digits, or with all digits before the point: "8.5", "0.031", "1200"."""
    return f"{value:.0f}" if abs(value) >= 9.95 else f"{value:.2g}"  # noqa: PLR2004


def percent(part: float) -> str:
    """Returns a share as whole percent: "31%", "under 1%"."""
    return "under 1%" if 0 < part < 0.01 else f"{part:.0%}"  # noqa: PLR2004


def duration(seconds: float) -> str:
    """Returns a duration in a unit that suits its length: "2.7 ms", "12 s", "3 min"."""
    if seconds < 1:
        return f"{two_digits(1e3 * seconds)} ms"
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"  # noqa: PLR2004


def log_line(error: BaseException | str) -> str:
    """Returns an error or a text on one line: its lines become parts of one sentence."""
    text = str(error)
    if "\n" not in text:
        return escape(text)
    lines = [_SPACES.sub(" ", line.strip()) for line in unwrap(text).split("\n") if line.strip()]
    ended = [line if line.endswith((",", ";", ":", ".")) else f"{line};" for line in lines[:-1]]
    return escape(" ".join([*ended, *lines[-1:]]))


def error_summary(error: BaseException) -> str:
    """Returns an error's class and the first line of its text."""
    line, *_ = unwrap(str(error)).strip().split("\n")
    return f"{type(error).__name__}: {line}"


def strip_traceback(text: str) -> str:
    """Returns an exception's text without another process's traceback, such as a DataLoader worker's."""
    lines = text.strip().split("\n")
    starts = [number for number, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    if not starts:
        return text
    inside = [number for number, line in enumerate(lines) if number >= starts[0] and line[:1] in {"", " "}]
    before, after = lines[: starts[0]], lines[max(inside, default=starts[0]) + 1 :]
    return " ".join("\n".join(part) for part in (before, after) if part)


def wrap(text: str, width: int = FIRST_LINE) -> str:
    """Returns an error's text with a first line of at most `width` characters, which continues on the next line."""
    if len(text.partition("\n")[0]) <= width:
        return text
    first, *others = unwrap(text).split("\n")  # the text may contain another error's wrapped text
    # A word is cut only if no space precedes it in the line, so that most paths can be copied.
    end = max(_cut(first, end, width) for end in _ENDS) or _cut(first, " ", width)
    cut = end or first.rfind(" ", 1, width) + 1 or width
    return "\n".join((first[:cut].rstrip(), f"{CONTINUED}{first[cut:].lstrip()}", *others))


def unwrap(text: str) -> str:
    """Returns a text with its continuation lines joined."""
    return _CONTINUATION.sub(" ", text)


def _cut(line: str, end: str, width: int) -> int:
    at = line.rfind(end, _SHORTEST, width)
    return at + len(end) if at >= 0 else 0


class Row(NamedTuple):
    """One rank in a table."""

    columns: tuple[str, ...]  # the rank's name, and its state; columns are aligned over all rows
    below: tuple[str, ...] = ()  # further lines about the rank


class TableSection(NamedTuple):
    """Ranks with something in common, such as the point at which they wait."""

    rows: Sequence[Row]  # rows of the first ranks, at most `MAX_ROWS`
    size: int  # number of all ranks
    name: str  # what they have in common, to follow "3 more ranks"


def error_text(
    what: str, *, table: Sequence[TableSection] = (), more_sections: int = 0, where: str = "", advice: str = ""
) -> str:
    """Returns the text of an error, short enough for a message."""
    # `table` has the most important sections first; `more_sections` is the number of omitted sections. `where` is the
    # job, group and round.
    head, tail = wrap(what).split("\n"), [line for line in (where and f"  in {where}", advice) if line]
    room = limits.MAX_TEXT_BYTES - _size([*head, *tail])
    return "\n".join([*head, *_fitting(table, more_sections, room), *tail])


def _fitting(table: Sequence[TableSection], more_sections: int, room: int) -> list[str]:
    """Returns as many rows as fit into `room` bytes: fewer of each section if necessary, then fewer sections."""
    total = sum(section.size for section in table)
    rows = (MAX_ROWS, FEW_ROWS, 1)[total > MAX_ROWS :]
    fewer_sections = range(len(table) - 1, -1, -1)
    for sections, number in [*((len(table), number) for number in rows), *((few, 1) for few in fewer_sections)]:
        lines = _lines(table[:sections], more_sections + len(table) - sections, number)
        if _size(lines) <= room:
            return lines
    return []


def _lines(table: Iterable[TableSection], more_sections: int, rows: int) -> list[str]:
    shown = [(section, section.rows[:rows]) for section in table]
    columns = zip_longest(*(row.columns for _, some in shown for row in some), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for section, some in shown:
        for row in some:
            texts = (text.ljust(width) for text, width in zip(row.columns, widths, strict=False))
            lines += [f"  {'  '.join(texts)}".rstrip(), *(f"      {line}" for line in row.below)]
        if more := section.size - len(some):
            lines.append(f"  ... and {more:,} more rank{'' if more == 1 else 's'} {section.name}")
    if more_sections:
        lines.append(f"  ... and {more_sections:,} more place{'' if more_sections == 1 else 's'}")
    return lines


def _size(lines: Iterable[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)
