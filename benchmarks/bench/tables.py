"""Tables: what the page of each benchmark shows of what it found."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Cells = Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """How a benchmark is run, and shown.

    Attributes:
        arguments: beside `--json`.
        heads: of the columns.
        rows: the cells, from what was found.
    """

    arguments: str
    heads: Cells
    rows: Callable[[Any], Iterable[Cells]]

    def in_markdown(self, found: Any) -> str:
        """Returns the table."""
        lines = [self.heads, ["---", *["---:"] * (len(self.heads) - 1)], *self.rows(found)]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _round_trips(found: list[Row]) -> Iterable[Cells]:
    for row in found:
        situations = ("", " paused", " thread", " process")
        in_memory = [f"{row[f'memory{each}'] / row[f'ours{each}']:.2f}" for each in situations]
        yield (
            f"{row['transport']}, {row['replicas']} x {row['channels']}",
            *(f"{row[way]:.0f}" for way in ("ours", "ours_p99", "memory", "gloo", "echo")),
            *(in_memory if row["replicas"] > 1 else ["-"] * len(situations)),
        )


def _train_steps(found: Row) -> Iterable[Cells]:
    ways = {
        "unsynchronised": "unsynchronised",
        "zeromq": "ours, over the server",
        "zeromq, broadcast": "ours, over the server, with DDP's broadcast of buffers",
        "memory": "ours, in shared memory",
        "process group": "ours, over gloo's process group, without a server",
        "gloo": "gloo's textbook",
    }
    for way, words in ways.items():
        in_rounds, alone = (found.get(f"{way}_{part}") for part in ("in_rounds", "exchanging"))
        rounds = [f"{in_rounds:.1f}", f"{alone:.1f}"] if in_rounds else ["-", "-"]
        yield words, f"{found[way]:.0f}", f"{found[way] / found['unsynchronised']:.3f}", *rounds


def _layers(found: list[Row]) -> Iterable[Cells]:
    by_case = {(row["members"], row["threads"], row["shape"], row["dtype"], row["layout"]): row for row in found}
    for members, threads, shape in dict.fromkeys(case[:3] for case in by_case):
        cells = [f"({shape.replace(',', ', ')})", str(members), str(threads)]
        for dtype in ("float32", "bfloat16"):
            for layout in ("contiguous", "channels_last"):
                row = by_case.get((members, threads, shape, dtype, layout))
                cells.append(f"{row['ratio']:.2f}" if row else "")
        yield cells


def _deaths(found: Mapping[str, Sequence[float]]) -> Iterable[Cells]:
    for death, seconds in found.items():
        yield f"`{death}`", f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", str(len(seconds))


TABLES = {
    "round_trip": Table(
        "--rounds 600",
        (
            "members x channels",
            "server, µs",
            "p99",
            "memory, µs",
            "gloo, µs",
            "echo, µs",
            "memory / server",
            "paused",
            "busy thread",
            "busy process",
        ),
        _round_trips,
    ),
    "train_step": Table(
        "--steps 40", ("way", "step, ms", "/ unsynchronised", "in 40 rounds, ms", "of them exchange"), _train_steps
    ),
    "layer": Table(
        "--members 1 2 --threads 1 2 --shapes 32,64,56,56 32,256,14,14 8,2048,7,7 4,64,112,112 256,1024 2,64,7,7",
        ("shape", "members", "threads", "float32", "channels_last", "bfloat16", "channels_last"),
        _layers,
    ),
    "fan_in": Table(
        "",
        ("members", "all registered after, s", "round, ms", "p99, ms", "µs a member", "server's µs a member", "MiB"),
        lambda found: (
            (
                str(row["members"]),
                f"{row['opening']:.2f}",
                f"{row['round'] * 1e3:.2f}",
                f"{row['p99'] * 1e3:.2f}",
                f"{row['per_member'] * 1e6:.0f}",
                f"{row['server_per_member'] * 1e6:.0f}",
                f"{row['memory'] / 1024:.1f}",
            )
            for row in found
        ),
    ),
    "subclass": Table(
        "",
        ("shape", "subclass", "our layer, µs", "more, µs", "its own, without us", "its own, around our layer"),
        lambda found: (
            (
                f"({row['shape'].replace(',', ', ')})",
                row["subclass"],
                f"{row['ours']:.0f}",
                f"{row['more']:.0f}",
                f"{row['more_without_us']:.0f}",
                f"{row['more_around_ours']:.0f}" if row["more_around_ours"] else "",
            )
            for row in found["rows"]
        ),
    ),
    "replicas": Table(
        "--calls 60",
        ("whole batch", "replicas", "threads", "ours, ms", "wrapper, ms", "torch, ms", "ours / torch"),
        lambda found: (
            (
                f"({row['shape'].replace(',', ', ')})",
                str(row["replicas"]),
                str(row["threads"]),
                *(f"{row[way]:.2f}" for way in ("ours", "wrapper", "torch")),
                f"{row['ours'] / row['torch']:.2f}",
            )
            for row in found
        ),
    ),
    "liveness": Table("", ("death", "median, s", "worst, s", "of"), _deaths),
    "mismatch": Table(
        "",
        ("members", "median, s", "worst, s", "of"),
        lambda found: (
            (members, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", str(len(seconds)))
            for members, seconds in found.items()
        ),
    ),
    "restart": Table(
        "",
        ("first round after a restart", "seconds"),
        lambda found: (("median", f"{statistics.median(found):.2f}"), (f"worst of {len(found)}", f"{max(found):.2f}")),
    ),
}
