"""Terminal: a snapshot as text of a given width, with rich. Names are never markup, and never control a terminal."""

import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from server.view.skewed import Skewed, most_skewed
from server.view.snapshot import Snapshot
from statsd_bn.text import plain

BAD = {"lost", "left", "mismatch", "non-finite", "restart", "silent"}


@dataclass(frozen=True, slots=True)
class Room:
    """How much is shown; of what is left out, the number is.

    Attributes:
        groups: how many groups; those with something to tell come first.
        ranks: of each group; 0: not even their table.
        findings: of each group, and as many texts about non-finite rows.
        layers: of each group, the most skewed ones.
        events: the latest ones.
    """

    groups: int = 10**6
    ranks: int = 10
    findings: int = 2
    layers: int = 5
    events: int = 3


# From the most that is shown to the least: the first that fits into a terminal is taken.
ROOMS = (
    Room(),
    Room(layers=3, findings=1),
    Room(layers=1, findings=1, ranks=6),
    Room(layers=1, findings=1, ranks=4),
    Room(layers=0, findings=1, ranks=2),
    Room(layers=0, findings=1, ranks=0),
    Room(layers=0, findings=0, ranks=0, events=2),
    *(Room(groups=groups, layers=0, findings=0, ranks=0, events=1) for groups in (16, 12, 8, 4, 2, 1)),
)


def drawn(snapshot: Snapshot, room: Room = ROOMS[0]) -> RenderableType:
    """What rich shows of a snapshot.

    Args:
        snapshot: what is known.
        room: how much of it.
    """
    head = f"{snapshot['endpoint']}  server {snapshot['server']}, up {snapshot['seconds']:.0f} s"
    parts: list[RenderableType] = [_line(head, "bold")]
    if snapshot["error"]:
        parts.append(_line(f"! {snapshot['error']}", "bold red"))
    groups = snapshot["groups"]
    if len(groups) > room.groups:
        groups = sorted(groups, key=_says_nothing)[: room.groups]
    for group in groups:
        parts += _group(group, room)
    if not groups:
        parts.append(_line("no jobs now"))
    if (left_out := len(snapshot["groups"]) - len(groups)) > 0:
        parts.append(_line(f"and {left_out} groups more"))
    parts += [
        _line(f"job {job['job']!r} ended {job['seconds']:.0f} s ago" + (f": {job['lost']}" if job["lost"] else ""))
        for job in snapshot["ended"][:2]
    ]
    parts += [_event(event) for event in snapshot["events"][-room.events :]]
    return Group(*parts)


def fitting(snapshot: Snapshot, console: Console) -> RenderableType:
    """What rich shows of a snapshot so that it fits into the console's height, if a line for a group does."""
    for room in ROOMS:
        shown = drawn(snapshot, room)
        if len(console.render_lines(shown, pad=False)) <= console.height:
            break
    return shown


def as_text(snapshot: Snapshot, width: int = 80, height: int | None = None) -> str:
    """A snapshot as plain text.

    Args:
        snapshot: what is known.
        width: columns.
        height: lines that there are room for; None for all that is ever shown.
    """
    console = Console(width=width, height=height, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(drawn(snapshot) if height is None else fitting(snapshot, console))
    return capture.get()


def _says_nothing(group: dict[str, Any]) -> bool:
    """Whether nothing is wrong with a group, as far as is known."""
    return not (group["lost"] or group.get("non_finite") or group.get("findings") or group["waiting"])


def _group(group: dict[str, Any], room: Room) -> list[RenderableType]:
    present = len(group["members"]) + group.get("members_left_out", 0)
    failed = f", {group['rounds_failed']} failed" if group["rounds_failed"] else ""
    head = (
        f"job {group['job']!r}, group {group['group']!r}, epoch {group['epoch']}: {present} of {group['world_size']} "
        f"ranks, {group['rounds_done']} rounds{failed}, {_rate(group['rounds_per_second'])}/s"
    )
    parts: list[RenderableType] = [_text(head, "bold cyan")]
    if group["lost"]:
        parts.append(_text(f"! broken: {group['lost']}", "bold red"))
    parts += _found(group, room.findings)
    if room.ranks:
        parts.append(_ranks(group, room.ranks))
        if (left_out := present - min(room.ranks, len(group["members"]))) > 0:
            parts.append(_line(f"  and {left_out} ranks more"))
    parts += [_skewed(layer) for layer in most_skewed(group, room.layers)]
    return parts


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}"


def _found(group: dict[str, Any], most: int) -> list[RenderableType]:
    """Texts about the rows that are not finite, and the latest findings; whole, since the rank stands at their end."""
    texts, findings = group.get("non_finite", ()), group.get("findings", ())
    lines = [_text(f"! {text}", "bold red") for text in texts[:most]]
    lines += [_text(f"! {finding['text']}", "yellow") for finding in findings[max(0, len(findings) - most) :]]
    if (left_out := len(texts) + len(findings) - len(lines)) > 0:
        lines.append(_line(f"! {left_out} finding{'s' * (left_out > 1)} more", "yellow"))
    return [*lines]


def _skewed(layer: Skewed) -> Text:
    who = "" if layer.rank is None else f", rank {layer.rank} brings {layer.part:.3f}"
    return _line(f"  skew {layer.eta2:.3f}{who}: {layer.name}")


def _ranks(group: dict[str, Any], ranks: int) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("where", no_wrap=True, ratio=3, overflow="ellipsis")
    for name in ("step", "steps/s", "late, ms", "waits", "score"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("doing", no_wrap=True, ratio=4, overflow="ellipsis")
    # Who is awaited comes first: those are the ranks that the reader looks for.
    shown = sorted(group["members"], key=lambda member: (not member["doing"].startswith("awaited"), member["member"]))
    for member in sorted(shown[:ranks], key=lambda member: member["member"]):
        late, waiting, score = member.get("late"), member.get("waiting"), member.get("score")
        table.add_row(
            str(member["member"]),
            _line(member["place"]),
            str(member["step"]),
            _rate(member["steps_per_second"]),
            f"{1e3 * late['median']:.1f}" if late else "-",
            f"{waiting:.0%}" if waiting is not None else "-",
            f"{score:.2f}" if score is not None else "-",
            _line(member["doing"]),
        )
    return table


def _event(event: dict[str, Any]) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    of = f"{event['job']!r}: " if event["job"] else ""
    return _line(f"{at} {event['kind']}: {of}{event['text']}", "red" if event["kind"] in BAD else "")


def _text(text: str, style: str) -> Text:
    """As many lines as it takes."""
    return Text(plain(text), style=style, overflow="fold")


def _line(text: str, style: str = "") -> Text:
    return Text(plain(text), style=style, no_wrap=True, overflow="ellipsis")
