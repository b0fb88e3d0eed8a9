"""Machine: a wait for the server as a pure function of the time and the frames that come.

A machine has no clock and no socket. `client.connection.driver` runs machines on a channel; the tests' simulator runs
them in virtual time.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeVar

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)

# What a machine wants now: the frames to send, in order; when to call `step` without a frame if none comes before; and
# the result, which is None while the wait goes on. A plain tuple, because every round makes two.
Turn: TypeAlias = tuple[Sequence[bytes], float, ResultT | None]


class Machine(Protocol[ResultT_co]):
    """A wait that ends with a result of one type, or with an error that `begin` or `step` raises."""

    def begin(self, now: float) -> Turn[ResultT_co]:
        """Begins the wait; called once, before any `step`."""

    def step(self, now: float, frame: bytes | None) -> Turn[ResultT_co]:
        """Goes on with a frame, or with None when the time is over or the connection is a new one."""
