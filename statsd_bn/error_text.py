"""Error texts: what happened, who waits where, and what to do, each on lines of its own.

A short first line says what happened, so that it can be read in a log, a list or a narrow terminal. A table follows,
with a row for each rank. Then come the place, for looking it up, and what to do. Server and client make their texts
here, so that they look alike:

    RoundMismatch: deadlock: the ranks wait in different places
      rank 0 (host-a, pid 811)  waits 0.6 s  in forward of layer 'layer1.bn2', step 3
      rank 1 (host-b, pid 812)  waits 0.6 s  in backward of layer 'layer1.bn1', step 3
      in job 'digits', group 'world', epoch 0
    Run the same layers in the same order on every rank, equally often; ...
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from statsd_bn import limits
from statsd_bn.text import CONTINUED, on_one_line, unfolded

# Letters of a first line. Python writes the name of the class before it, which takes 40 with its module at most, and
# both together stay below 120.
FIRST_LINE = 80

# Rows of a table. A table of more ranks shows a few of each place, and says how many more are there.
MOST_ROWS = 16
FEW_ROWS = 3

# What a first line may end with, if possible; it is not cut there before this many letters.
_ENDS = ("; ", ". ", ": ", ", ")
_SHORTEST = 40


@dataclass(frozen=True, slots=True)
class Row:
    """One rank in a table.

    Attributes:
        columns: who it is, and what it does; each is as wide as the widest of all rows.
        below: further lines about it, which stand below its row.
    """

    columns: tuple[str, ...]
    below: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Ranks that are at the same place.

    Attributes:
        rows: of the first ranks, `MOST_ROWS` at most.
        name: the place, as it follows "3 more ranks".
    """

    rows: Sequence[Row]
    size: int
    name: str


def error_text(
    what: str, *, table: Sequence[Place] = (), more_places: int = 0, where: str = "", advice: str = ""
) -> str:
    """Returns the text of an error, which an error may carry over the wire.

    Args:
        what: what happened. It becomes the first line; what does not fit goes on in the next ones.
        table: who waits where, the most telling places first.
        more_places: how many places the table leaves out.
        where: the job, group and round that it is about.
        advice: what to do.
    """
    head, tail = _first_line(what), [line for line in (where and f"  in {where}", advice) if line]
    room = limits.MAX_TEXT_BYTES - _size([*head, *tail])
    return "\n".join([*head, *_fitting(table, more_places, room), *tail])


def broken(text: str, width: int = FIRST_LINE) -> str:
    """Returns an error's text with a first line of at most `width` letters, which goes on in the next one.

    A text with such a break in it is broken anew, so one may be put into another.
    """
    return text if _is_short(text, width) else "\n".join(_first_line(unfolded(text), width))


def first_line(error: BaseException | str) -> str:
    """Returns what happened: the first line of an error's text, whole."""
    return unfolded(str(error)).strip().partition("\n")[0]


def in_brief(error: BaseException) -> str:
    """Returns an error's class and what happened."""
    return f"{type(error).__name__}: {first_line(error)}"


def without_traceback(text: str) -> str:
    """Returns an exception's text without the traceback of another process in it, as a worker of a DataLoader adds."""
    lines = text.strip().split("\n")
    begins = [number for number, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    if not begins:
        return text
    inside = [number for number, line in enumerate(lines) if number >= begins[0] and line[:1] in {"", " "}]
    before, after = lines[: begins[0]], lines[max(inside, default=begins[0]) + 1 :]
    return " ".join("\n".join(part) for part in (before, after) if part)


def in_log(error: BaseException | str) -> str:
    """Returns an error's text on one line, for a log."""
    return on_one_line(str(error))


def _is_short(text: str, width: int) -> bool:
    end = text.find("\n")
    return (len(text) if end < 0 else end) <= width


def _first_line(what: str, width: int = FIRST_LINE) -> list[str]:
    first, *others = what.split("\n")
    if len(first) <= width:
        return [first, *others]
    # Only what is no words is cut in the middle: a path is to be copied.
    cut = (
        max(_cut(first, end, width) for end in _ENDS)
        or _cut(first, " ", width)
        or first.rfind(" ", 1, width) + 1
        or width
    )
    return [first[:cut].rstrip(), f"{CONTINUED}{first[cut:].lstrip()}", *others]


def _cut(line: str, end: str, width: int) -> int:
    found = line.rfind(end, _SHORTEST, width)
    return found + len(end) if found >= 0 else 0


def _fitting(table: Sequence[Place], more_places: int, room: int) -> list[str]:
    """As many rows as fit into `room` bytes; each place that is told has one."""
    total = sum(place.size for place in table)
    shortened = [rows for rows in (MOST_ROWS, FEW_ROWS, 1) if rows < MOST_ROWS or total <= MOST_ROWS]
    for rows in shortened:
        if _size(lines := _lines(table, more_places, rows)) <= room:
            return lines
    for told in range(len(table) - 1, -1, -1):
        lines = _lines(table[:told], more_places + len(table) - told, 1)
        if _size(lines) <= room:
            return lines
    return []


def _lines(table: Iterable[Place], more_places: int, rows: int) -> list[str]:
    told = [(place, place.rows[:rows]) for place in table]
    widths = _widths(row for _, some in told for row in some)
    lines = []
    for place, some in told:
        for row in some:
            lines += [f"  {_aligned(row, widths)}", *(f"      {line}" for line in row.below)]
        if more := place.size - len(some):
            lines.append(f"  ... and {more:,} more rank{'' if more == 1 else 's'} {place.name}")
    if more_places:
        lines.append(f"  ... and {more_places:,} more place{'' if more_places == 1 else 's'}")
    return lines


def _widths(rows: Iterable[Row]) -> list[int]:
    widths: list[int] = []
    for row in rows:
        widths += [0] * (len(row.columns) - len(widths))
        widths = [
            max(width, len(text)) for width, text in zip(widths, (*row.columns, *[""] * len(widths)), strict=False)
        ]
    return widths


def _aligned(row: Row, widths: Sequence[int]) -> str:
    return "  ".join(text.ljust(width) for text, width in zip(row.columns, widths, strict=False)).rstrip()


def _size(lines: Iterable[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)
