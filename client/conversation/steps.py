"""Steps: which step a member is in, and which call of a layer comes next.

All members run the same program, so each counts for itself and all arrive at the same keys: a step begins with the
first forward round after a backward round, and `call` counts a layer's forward rounds within the step. A backward round
keeps the key of its forward round, whatever step has come.
"""

from collections import Counter

from statsd_bn.round_key import FORWARD_PHASES, GATHER

# The phases that may begin a step.
BEGINNINGS = (*FORWARD_PHASES, GATHER)


class Steps:
    """How a member counts its rounds.

    Attributes:
        step: the one that it is in.
    """

    def __init__(self) -> None:
        self.step = 0
        self._calls: Counter[str] = Counter()
        self._backward_seen = False

    def next(self, layer: str) -> tuple[int, int]:
        """Returns the step and the call of the next forward round, or gather, of a layer."""
        if self._backward_seen:
            self.begin_at(self.step + 1)
        call = self._calls[layer]
        self._calls[layer] += 1
        return self.step, call

    def begins(self, phase: str) -> None:
        """A round of this phase takes place now."""
        self._backward_seen = self._backward_seen or phase not in BEGINNINGS

    def begin_at(self, step: int) -> None:
        """Begins a step."""
        self.step = step
        self._calls.clear()
        self._backward_seen = False
