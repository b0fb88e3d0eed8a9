"""Terminal: a snapshot as text of a given width, with rich. Names are never markup, and never control a terminal."""

import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from server.view.skewed import Skewed, most_skewed
from server.view.snapshot import Snapshot
from statsd_bn.text import plain

# Lines that a terminal of 24 rows has room for: ranks of each group, findings and events.
TOLD_RANKS, TOLD_FINDINGS, TOLD_EVENTS = 10, 2, 3

# Layers of each group, the most skewed ones.
TOLD_LAYERS = 5

BAD = {"lost", "left", "mismatch", "non-finite", "restart", "silent"}


def drawn(snapshot: Snapshot, ranks: int = TOLD_RANKS) -> RenderableType:
    """What rich shows of a snapshot.

    Args:
        snapshot: what is known.
        ranks: of how many ranks of each group; the others are counted.
    """
    head = f"{snapshot['endpoint']}  server {snapshot['server']}, up {snapshot['seconds']:.0f} s"
    parts: list[RenderableType] = [_line(head, "bold")]
    if snapshot["error"]:
        parts.append(_line(f"! {snapshot['error']}", "bold red"))
    for group in snapshot["groups"]:
        parts += _group(group, ranks)
    if not snapshot["groups"]:
        parts.append(_line("no jobs now"))
    parts += [
        _line(f"job {job['job']!r} ended {job['seconds']:.0f} s ago" + (f": {job['lost']}" if job["lost"] else ""))
        for job in snapshot["ended"][:2]
    ]
    parts += [_event(event) for event in snapshot["events"][-TOLD_EVENTS:]]
    return Group(*parts)


def as_text(snapshot: Snapshot, width: int = 80) -> str:
    """A snapshot as plain text.

    Args:
        snapshot: what is known.
        width: columns.
    """
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(drawn(snapshot))
    return capture.get()


def _group(group: dict[str, Any], ranks: int) -> list[RenderableType]:
    present = len(group["members"]) + group.get("members_left_out", 0)
    failed = f", {group['rounds_failed']} failed" if group["rounds_failed"] else ""
    head = (
        f"job {group['job']!r}, group {group['group']!r}, epoch {group['epoch']}: {present} of {group['world_size']} "
        f"ranks, {group['rounds_done']} rounds{failed}, {group['rounds_per_second']:.1f}/s"
    )
    parts: list[RenderableType] = [Text(plain(head), "bold cyan", overflow="fold")]
    if group["lost"]:
        parts.append(_line(f"! broken: {group['lost']}", "bold red"))
    parts += [_line(f"! {text}", "bold red") for text in group.get("non_finite", ())[:TOLD_FINDINGS]]
    parts += [_line(f"! {finding['text']}", "yellow") for finding in group.get("findings", ())[:TOLD_FINDINGS]]
    parts.append(_ranks(group, ranks))
    if (left_out := present - min(ranks, len(group["members"]))) > 0:
        parts.append(_line(f"  and {left_out} ranks more"))
    parts += [_skewed(layer) for layer in most_skewed(group, TOLD_LAYERS)]
    return parts


def _skewed(layer: Skewed) -> Text:
    who = "" if layer.rank is None else f", rank {layer.rank} brings {layer.part:.3f}"
    return _line(f"  skew {layer.eta2:.3f}{who}: {layer.name}")


def _ranks(group: dict[str, Any], ranks: int) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("where", no_wrap=True, ratio=3, overflow="ellipsis")
    for name in ("step", "steps/s", "waits", "score"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("doing", no_wrap=True, ratio=4, overflow="ellipsis")
    # Who is awaited comes first: those are the ranks that the reader looks for.
    shown = sorted(group["members"], key=lambda member: (not member["doing"].startswith("awaited"), member["member"]))
    for member in sorted(shown[:ranks], key=lambda member: member["member"]):
        waiting, score = member.get("waiting"), member.get("score")
        table.add_row(
            str(member["member"]),
            _line(member["place"]),
            str(member["step"]),
            f"{member['steps_per_second']:.1f}",
            f"{waiting:.0%}" if waiting is not None else "-",
            f"{score:.2f}" if score is not None else "-",
            _line(member["doing"]),
        )
    return table


def _event(event: dict[str, Any]) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    of = f"{event['job']!r}: " if event["job"] else ""
    return _line(f"{at} {event['kind']}: {of}{event['text']}", "red" if event["kind"] in BAD else "")


def _line(text: str, style: str = "") -> Text:
    return Text(plain(text), style=style, no_wrap=True, overflow="ellipsis")
