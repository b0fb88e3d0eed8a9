"""Backward passes: a graph that is kept allows more than one, and each takes rounds of its own."""

import threading
from collections import OrderedDict

# Few calls have a second backward pass, and only while their graph lives: up to a hundred layers of a few dozen
# micro-batches, and of some mini-batches before.
KEPT_CALLS = 2**14


def phase_of(phase: str, number: int) -> str:
    """Returns the phase of backward pass `number`, counted from 1: "backward", "backward 2", ..."""
    return phase if number == 1 else f"{phase} {number}"


class BackwardPasses:
    """Counts the backward passes of the latest calls, for calls that leave no object behind that could count them."""

    def __init__(self) -> None:
        self._passes: OrderedDict[int, int] = OrderedDict()  # the call with the latest pass is last
        self._lock = threading.Lock()

    def count(self, call: int) -> int:
        """Counts a backward pass that begins, and returns its number, from 1; `call` is the `Exchange`'s number."""
        with self._lock:
            number = self._passes[call] = self._passes.pop(call, 0) + 1
            if len(self._passes) > KEPT_CALLS:
                self._passes.popitem(last=False)
        return number
