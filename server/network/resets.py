"""Resets: which TCP connections their peers have reset.

A process that is killed before it has read everything resets its connections. ZeroMQ does not see that (`descriptors`
keeps it away), so the server would notice only the silence. But the system counts the segments that it drops.

A count that rises proves nothing. Whoever knows the two addresses and guesses a port can forge a reset; TCP would
detect it by its sequence number (RFC 5961), which the filter cannot. Other segments are dropped too. So the server
sends a frame. The system of a living peer acknowledges it, even if the process is frozen; if the connection is gone,
all that comes back is another reset.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from server.network.descriptors import Answers, answers, dropped

# How long a system may take to acknowledge, beside the way there and back: at most a fifth of a second.
ANSWER_SECONDS = 0.25

# The system counts time in steps of up to ten milliseconds, and an answer may come in the same step as the frame.
_STEPS_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """A connection that may have been reset.

    Attributes:
        since: when that was noticed, and a frame was sent.
        dropped: what the system had dropped by then.
    """

    since: float
    dropped: int


class Resets:
    """Connections by file descriptor.

    Args:
        dropped: returns how many segments of a connection the system has dropped.
        answers: returns how the other end answers.
    """

    def __init__(
        self, dropped: Callable[[int], int] = dropped, answers: Callable[[int], Answers | None] = answers
    ) -> None:
        self._dropped = dropped
        self._answers = answers
        self._known: dict[int, int] = {}
        self._suspicions: dict[int, _Suspicion] = {}

    def ended(self, descriptor: int) -> None:
        """Note the end of a connection."""
        self._known.pop(descriptor, None)
        self._suspicions.pop(descriptor, None)

    def suspects(self, now: float, descriptors: Iterable[int]) -> list[int]:
        """Those of some connections that may have been reset since; send a frame to each now."""
        found = []
        for descriptor in descriptors:
            count = self._dropped(descriptor)
            if count > self._known.get(descriptor, 0) and descriptor not in self._suspicions:
                self._suspicions[descriptor] = _Suspicion(now, count)
                found.append(descriptor)
        return found

    def gone(self, now: float) -> list[int]:
        """Suspects that were really reset: they answer that frame with nothing but resets."""
        found = []
        for descriptor, suspicion in list(self._suspicions.items()):
            answers = self._answers(descriptor)
            if answers is None or answers.silence < now - suspicion.since + _STEPS_SECONDS:
                # What is dropped from now on is a new suspicion.
                self._known[descriptor] = suspicion.dropped
                del self._suspicions[descriptor]
            elif self._is_reset(now, descriptor, suspicion, answers):
                self.ended(descriptor)
                found.append(descriptor)
        return found

    def _is_reset(self, now: float, descriptor: int, suspicion: _Suspicion, answers: Answers) -> bool:
        # A peer that has not read for long is sent nothing more: then nothing is under way, and it need not answer.
        is_late = answers.is_awaited and now - suspicion.since >= ANSWER_SECONDS + answers.round_trip
        return is_late and self._dropped(descriptor) > suspicion.dropped
