"""Table of each benchmark's page, made from its result."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Cells = Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Arguments of a benchmark, and the table of its result.

    Attributes:
        arguments: of the command line, without `--json`.
        heads: of the columns.
        rows: the cells, made from the result.
        below: a second table of the same result, left out if it has no rows.
    """

    arguments: str
    heads: Cells
    rows: Callable[[Any], Iterable[Cells]]
    below: "Table | None" = None

    def in_markdown(self, found: Any) -> str:
        """Returns the table, and the one below it."""
        lines = [self.heads, ["---", *["---:"] * (len(self.heads) - 1)], *self.rows(found)]
        table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        if self.below and any(self.below.rows(found)):
            table += f"\n{self.below.in_markdown(found)}"
        return table


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
        "server": "ours, over the server",
        "server, broadcast": "ours, over the server, with DDP's broadcast of buffers",
        "memory": "ours, in shared memory",
        "process group": "ours, over gloo's process group, without a server",
        "gloo": "gloo's textbook",
    }
    for way, words in ways.items():
        in_rounds, alone = (found.get(f"{way}_{part}") for part in ("in_rounds", "exchanging"))
        rounds = [f"{in_rounds:.1f}", f"{alone:.1f}"] if in_rounds else ["-", "-"]
        yield words, f"{found[way]:.0f}", f"{found[way] / found['unsynchronised']:.3f}", *rounds


def _layers(found: Mapping[str, list[Row]]) -> Iterable[Cells]:
    by_case = {
        (row["members"], row["threads"], row["shape"], row["dtype"], row["layout"]): row for row in found["layers"]
    }
    for members, threads, shape in dict.fromkeys(case[:3] for case in by_case):
        cells = [f"({shape.replace(',', ', ')})", str(members), str(threads)]
        for dtype in ("float32", "bfloat16"):
            for layout in ("contiguous", "channels_last"):
                row = by_case.get((members, threads, shape, dtype, layout))
                cells.append(f"{row['ratio']:.2f}" if row else "")
        yield cells


def _subclasses(found: Mapping[str, list[Row]]) -> Iterable[Cells]:
    for row in found.get("subclasses", []):
        times = (f"{row[column]:.0f}" for column in ("plain", "converted", "more"))
        yield f"({row['shape'].replace(',', ', ')})", row["class"], *times


def _faults(found: Mapping[str, Sequence[float]]) -> Iterable[Cells]:
    for fault, seconds in found.items():
        yield fault, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", str(len(seconds))


def _views(found: Iterable[Row]) -> Iterable[Cells]:
    for row in found:
        processes = (row[name] for name in ("server", "view"))
        costs = ((f"{one['share']:.1%}", f"{one['memory'] * 1024 / 1e6:.0f}") for one in processes)
        yield str(row["ranks"]), str(row["compared_layers"]), *(cell for cost in costs for cell in cost)


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
        below=Table("", ("shape", "class", "as it is, µs", "converted, µs", "more than our layer, µs"), _subclasses),
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
    "view": Table("", ("ranks", "layers", "server, of a processor", "MB", "view, of a processor", "MB"), _views),
    "faults": Table("", ("fault", "median, s", "worst, s", "of"), _faults),
}
