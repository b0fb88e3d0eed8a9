"""Parent: ends a server that one process started for its job, when the members have left or that process has ended."""

import math
import os
from collections.abc import Callable

# How long members may stay after the process that started the server has ended: they are told in milliseconds that it
# is lost, and leave as soon as they have raised.
PARTING_SECONDS = 5.0

# How long the members of a killed server may take to come back to its successor. Living ones are back in a moment; one
# that left in between told neither server, and never comes. `silence_seconds` counts if it is longer.
RETURN_SECONDS = 10.0


class Parent:
    """The process that started this server.

    Args:
        number: the process's id.
        of_this_process: returns the id of this process's present parent; another process adopts it when its own ends.
        expected_until: until when the first member may come, on the clock that `needs_no_server` is given.
    """

    def __init__(
        self, number: int, of_this_process: Callable[[], int] = os.getppid, *, expected_until: float = math.inf
    ) -> None:
        self._number = number
        self._of_this_process = of_this_process
        self._expected_until = expected_until
        self._ended = math.inf

    def needs_no_server(self, now: float, *, has_members: bool, has_had_members: bool) -> bool:
        """Whether nobody is left to serve.

        Args:
            now: seconds, on any clock.
            has_members: whether any member is registered.
            has_had_members: whether any member is registered, or was.
        """
        if (has_had_members or now >= self._expected_until) and not has_members:
            return True
        if self._ended == math.inf and self._of_this_process() != self._number:
            self._ended = now
        return now >= (self._ended + PARTING_SECONDS if has_members else self._ended)
