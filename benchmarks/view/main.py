"""View: what an hour of a great job's figures costs the viewer, in memory and in processor time.

Snapshots of a pretended server come at the times of an hour, one a second, without the wait between them. A reader of
the page takes each snapshot, and the heat map each two seconds.
"""

import argparse
import json
import random
import resource
import time
from typing import Any

from server.view.feed import Feed
from server.view.heat import heat, without_figures
from server.view.history import History

HEAT_SECONDS = 2


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
    answer = told(ranks, layers)
    history = History()
    feed = Feed("tcp://127.0.0.1:4555", lambda: answer)
    kept = read = 0.0
    for second in range(seconds):
        begin = time.process_time()
        snapshot = {**feed.ask(), "time": float(second)}
        history.add(snapshot)
        middle = time.process_time()
        json.dumps(without_figures(snapshot))
        if second % HEAT_SECONDS == 0:
            json.dumps(heat(snapshot, "digits", "world"))
        kept += middle - begin
        read += time.process_time() - middle
    return {
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "history_mb": history.size / 1e6,
        "core": kept / seconds,
        "core_per_reader": read / seconds,
    }


def told(ranks: int, layers: int) -> dict[str, Any]:
    """The report of a server with one group, and its figures."""
    members = [
        {"member": rank, "place": f"host-{rank}, pid {rank}", "stand": "takes_part", "step": 5, "replicas": 1}
        for rank in range(ranks)
    ]
    figures = {"layers": [{"name": f"layer{at}", "eta2": 0.1, **_random(ranks)} for at in range(layers)]}
    group = {"job": "digits", "group": "world", "epoch": 0, "world_size": ranks, "members": members, "lost": ""}
    counts = {"rounds_done": 100, "rounds_failed": 0, "waiting": [], "non_finite": [], "figures": figures}
    return {"server": "abcd", "seconds": 60.0, "groups": [{**group, **counts}]}


def _random(ranks: int) -> dict[str, list[float]]:
    return {name: [random.random() for _ in range(ranks)] for name in ("parts", "means", "variances")}  # noqa: S311


if __name__ == "__main__":
    main()
