"""Walks: a graph that is kept may be walked back through more than once, and each walk takes rounds of its own."""

import threading
from collections import OrderedDict

# What was walked is seldom walked again, and only while its graph lives: up to a hundred layers of a few dozen
# micro-batches, and of some mini-batches before.
KEPT_CALLS = 2**14


def phase_of(phase: str, walk: int) -> str:
    """Returns what a phase is called in a walk, of which the first is 1: "backward", "backward 2", ..."""
    return phase if walk == 1 else f"{phase} {walk}"


class Walks:
    """How often the latest calls were walked, for calls that leave nothing behind that could know."""

    def __init__(self) -> None:
        self._walks: OrderedDict[int, int] = OrderedDict()  # the call that was walked last is last
        self._lock = threading.Lock()

    def count(self, call: int) -> int:
        """Returns which walk of this call begins, from 1; `call` is the `Exchange`'s number."""
        with self._lock:
            walk = self._walks[call] = self._walks.pop(call, 0) + 1
            if len(self._walks) > KEPT_CALLS:
                self._walks.popitem(last=False)
        return walk
