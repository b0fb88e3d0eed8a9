"""The page of a fake server with a skewed rank in the late layers: `HOST:PORT JOB [LAYERS RANKS [FILE]]`.

The rank is 5 of 8, or the number in a file.
"""

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from server.config import host_and_port
from server.view.web import serve
from support.view_reports import group, member, report

ODD_RANK = 5
LAYERS, RANKS = 20, 8

TOKEN = "of-the-test-0123"  # noqa: S105 - it opens nothing


def main(address: str, job: str, layers: int, ranks: int, odd: Callable[[], int]) -> None:
    host, port = host_and_port(address)
    serve("tcp://127.0.0.1:4555", lambda: told(job, time.time(), layers, ranks, odd()), host, port, TOKEN)


def told(job: str, now: float, layers: int, ranks: int, odd: int = ODD_RANK) -> dict[str, Any]:
    chance = random.Random(now)
    members = [member(rank, int(now) % 1000) for rank in range(ranks)]
    figures = {"layers": [layer(chance, at, layers, ranks, odd) for at in range(layers)]}
    return report(group(*members, job=job, figures=figures))


def layer(chance: random.Random, at: int, layers: int, ranks: int, odd: int) -> dict[str, Any]:
    """One layer's figures; the skew begins behind the first third, and grows."""
    skew = max(0.0, at / layers - 0.3)
    parts = [0.004 * chance.uniform(0.5, 1.5) / ranks * 8 for _ in range(ranks)]
    parts[odd] += 0.5 * skew
    name = f"layer{at // 4}.{at % 4 // 2}.bn{at % 2 + 1}"
    return {"name": name, "eta2": sum(parts), "parts": parts}


def written(file: Path) -> int:
    return int(file.read_text())


if __name__ == "__main__":
    sizes = [int(text) for text in (sys.argv[3:5] or [str(LAYERS), str(RANKS)])]
    main(*sys.argv[1:3], *sizes, partial(written, Path(sys.argv[5])) if sys.argv[5:] else lambda: ODD_RANK)
