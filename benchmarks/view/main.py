"""View: what an hour of a great job's figures costs the viewer, in memory and in processor time.

Snapshots of a pretended server come at the times of an hour, one a second, without the wait between them. A reader of
the page takes each snapshot, and the heat map with it.
"""

import argparse
import json
import resource
import time
from array import array
from typing import Any

import numpy as np

from server.view import web  # noqa: F401 - whoever shows the page has it loaded
from server.view.feed import Feed
from server.view.heat import heat, without_figures
from server.view.history import History


def main() -> None:
    """Measures and prints one line, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.ranks, options.layers, options.seconds)
    print(json.dumps(result) if options.json else ", ".join(f"{name} {value:.4g}" for name, value in result.items()))


def measure(ranks: int, layers: int, seconds: int) -> dict[str, float]:
    """Peak memory in MB, the history's part of it, and processor seconds per second, without and with a reader."""
    history, answers = History(), Answers(ranks, layers)
    feed = Feed("tcp://127.0.0.1:4555", answers)
    kept = read = 0.0
    for second in range(seconds):
        answers.make()
        begin = time.process_time()
        snapshot = {**feed.ask(), "time": float(second)}
        history.add(snapshot)
        middle = time.process_time()
        json.dumps(without_figures(snapshot))
        json.dumps(heat(snapshot, "digits", "world"))
        kept += middle - begin
        read += time.process_time() - middle
    return {
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "history_mb": history.size / 1e6,
        "core": kept / seconds,
        "core_per_reader": read / seconds,
    }


class Answers:
    """The reports of a server with one group, with new figures in each.

    Args:
        ranks: of the group.
        layers: of its model.
    """

    def __init__(self, ranks: int, layers: int) -> None:
        self._ranks, self._layers = ranks, layers
        self._chance = np.random.default_rng(0)
        self._next: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Hands over what was made."""
        answer, self._next = self._next, {}
        return answer

    def make(self) -> None:
        """Make the next one, in the form in which `server.view.figures` adds figures."""
        members = [
            {"member": rank, "place": f"host-{rank}, pid {rank}", "stand": "takes_part", "step": 5, "replicas": 1}
            for rank in range(self._ranks)
        ]
        figures = {"layers": [{"name": f"layer{at}", "eta2": 0.1, **self._columns()} for at in range(self._layers)]}
        group = {"job": "digits", "group": "world", "epoch": 0, "world_size": self._ranks, "members": members}
        counts = {"rounds_done": 100, "rounds_failed": 0, "waiting": [], "non_finite": [], "lost": ""}
        self._next = {"server": "abcd", "seconds": 60.0, "groups": [{**group, **counts, "figures": figures}]}

    def _columns(self) -> dict[str, "array[float]"]:
        columns = self._chance.random((3, self._ranks))
        return {
            name: array("d", column.tobytes())
            for name, column in zip(("parts", "means", "variances"), columns, strict=True)
        }


if __name__ == "__main__":
    main()
