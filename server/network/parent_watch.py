"""Parent: a server that is there for the members of one process's job ends with them, and with that process.

It takes part in no protocol; the service asks it at each look.
"""

import math
import os
from collections.abc import Callable

# How long members may stay whose job has lost the process that started the server: they are told in milliseconds that
# it is lost, and say goodbye as soon as they have raised.
PARTING_SECONDS = 5.0

# How long the members of a server that was killed may take to come back to the one in its place. Those that live are
# back in a moment; who left in between said goodbye to neither, and never comes. A longer `silence_seconds` counts.
RETURN_SECONDS = 10.0


class Parent:
    """The process that started this server, and why it is still there.

    Args:
        number: the process's id.
        of_this_process: gives the id of the parent that this process has now; another one adopts it when its own ends.
        expected_until: until when members may come for the first time, on the clock that `needs_no_server` is given.
    """

    def __init__(
        self, number: int, of_this_process: Callable[[], int] = os.getppid, *, expected_until: float = math.inf
    ) -> None:
        self._number = number
        self._of_this_process = of_this_process
        self._expected_until = expected_until
        self._ended = math.inf

    def needs_no_server(self, now: float, *, has_members: bool, has_had_members: bool) -> bool:
        """Returns whether nobody is left to serve.

        Args:
            now: seconds, on any clock.
            has_members: whether somebody is registered.
            has_had_members: whether somebody is or was.
        """
        if (has_had_members or now >= self._expected_until) and not has_members:
            return True
        if self._ended == math.inf and self._of_this_process() != self._number:
            self._ended = now
        return now >= (self._ended + PARTING_SECONDS if has_members else self._ended)
