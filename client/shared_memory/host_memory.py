"""HostMemory: those members of a group that are on one host bring their rows, and one of them gets the answer for all.

    if memory.come(digest, rows):
        ...  # all have come, and this is the last: it asks the server
        memory.leave(frame, seconds)
    else:
        memory.wait_for_answer(seconds)
        found = memory.answer

They come in turns, as in `GroupMemory`. Whoever comes last does what is left to be done: it is awake, and nobody waits
for a member that is asleep. Two that come at the same time may both take themselves for the last one; somebody does.
"""

from mmap import mmap

from client.shared_memory import answers, region
from client.shared_memory.answers import Answers
from client.shared_memory.group_memory import GroupMemory
from statsd_bn.rows import Rows

_ANSWERED = 2**30


def size_of(members: int) -> int:
    """Returns how many bytes the memory of so many members of one host has; less is enough for `GroupMemory`."""
    return region.size_of(members) + answers.size_of(members)


class HostMemory(GroupMemory):
    """The memory of those members of a group that are on one host, as one of them sees it.

    Args:
        memory: shared by them; `size_of(members)` bytes, all zero at first.
        members: how many there are.
        me: which of them this is, from 0.
        session: by which this member lets the others speak for it.
    """

    def __init__(self, memory: mmap, members: int, me: int, session: bytes) -> None:
        super().__init__(memory, members, me)
        self._answers = Answers(memory, region.size_of(members), members, me, session)

    def come(self, digest: int, rows: Rows) -> bool:
        """Comes to the next turn; returns whether all have come. It wakes nobody: that is for the answer to do."""
        return self._bring(digest, rows)

    @property
    def sessions(self) -> bytes:
        """The sessions of all members, in order, one behind the other; once all have come."""
        return self._answers.sessions

    def wait_for_answer(self, seconds: float) -> bool:
        """Waits until somebody has left an answer, for so many seconds at most; returns whether one has.

        It ends at once, with False, when a member comes no more.
        """
        return self._wait(self._answers.is_there, seconds)

    def leave(self, frame: bytes, seconds: float) -> None:
        """Leaves the answer that took so many seconds, and wakes the others; an empty one: each has to ask."""
        self._answers.leave(self._number, frame, seconds)
        self._wake(_ANSWERED)

    @property
    def answer(self) -> tuple[bytes, float] | None:
        """The answer that somebody has left in this turn, and how many seconds it took; None if nobody has."""
        return self._answers.find(self._number)
