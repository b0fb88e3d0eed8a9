"""Worlds of the memory of one host's members, of which the last to come leaves an answer for the others.

As in `memory_worlds`, each store and look is a step of its own, and may pass others as on x86-64 or aarch64.
"""

from typing import Any

from client.shared_memory.answers import Answers
from client.shared_memory.host_memory import HostMemory
from client.shared_memory.region import LINE_BYTES, WORD_BYTES
from simulation.memory_worlds import MemoryWorld, View, with_simulated_parts
from statsd_bn import limits

# Behind all regions, whose rows are few here.
ANSWERS_AT = 2**24

Answer = tuple[bytes, float]


class Bytes:
    """What `Answers` wants of a memory of bytes: parts that begin with a word are written and read word by word."""

    def __init__(self, view: View) -> None:
        self._view = view

    def __setitem__(self, part: slice, data: bytes) -> None:
        for place in range(0, len(data), WORD_BYTES):
            word = int.from_bytes(data[place : place + WORD_BYTES], "little")
            self._view[(part.start + place) // WORD_BYTES] = word

    def __getitem__(self, part: slice) -> bytes:
        words = self._view[part.start // WORD_BYTES : -(-part.stop // WORD_BYTES)]
        return b"".join(word.to_bytes(WORD_BYTES, "little") for word in words)[: part.stop - part.start]


class SimulatedAnswers(Answers):
    """Answers whose words and bytes go through a view."""

    def __init__(self, view: View, members: int, me: int, session: bytes) -> None:
        super().__init__(bytearray(LINE_BYTES), 0, members, 0, session)  # type: ignore[arg-type]  # laid out below
        self._starts = [start + ANSWERS_AT for start in self._starts]
        self._turns = [start // WORD_BYTES for start in self._starts]
        self._me, self._words, self._memory = me, view, Bytes(view)  # type: ignore[assignment]
        first = self._starts[me] + 3 * WORD_BYTES
        self._memory[first : first + len(session)] = session


class AnswerWorld(MemoryWorld):
    """Everything of one seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        # How often a member looks without sleeping, in each turn, and how many of its sleeps are naps. Who is awake may
        # find an answer that is only half there.
        self._looks = self._rng.choice((0, 3, 30))
        self._naps = self._rng.choice((0.0, 0.9, 0.97))

    def sleep(self) -> None:
        """The running member sleeps until it is woken, or takes a nap."""
        if self._rng.random() < self._naps:
            self.step()
        else:
            super().sleep()

    def memory_of(self, view: View, me: int) -> Any:
        """Returns the memory as a member has it."""
        made = with_simulated_parts(HostMemory, self, view, me)
        made._answers = SimulatedAnswers(view, self.members, me, session_of(me))
        return made

    def take_turn(self, memory: Any, me: int, number: int) -> Answer:
        """Carries, if it is the last; else waits for the answer."""
        if not memory.come(number, self.rows_of(me, number)):
            looks = iter(range(self._looks))
            while not memory.wait_for_answer(0.0 if next(looks, None) is not None else float("inf")):
                pass
            return memory.answer
        sessions, brought = memory.sessions, memory.brought()
        if sessions != b"".join(map(session_of, range(self.members))):
            self.find(f"member {me} carries for {sessions} in round {number}")
        if (brought.counts, brought.values.tolist()) != self.brought_to(number):
            self.find(f"member {me} carries {brought} in round {number}")
        answer = answer_of(me, number)
        memory.leave(*answer)
        return answer

    def expected(self, number: int) -> list[Answer]:
        """Two that come at the same time may both carry, and any of the two answers will do."""
        return [answer_of(member, number) for member in range(self.members)]


def session_of(member: int) -> bytes:
    """Returns the session of a member, no part of which is another one's."""
    return bytes([member + 1]) * limits.TOKEN_BYTES


def answer_of(member: int, number: int) -> Answer:
    """Returns what a member has for an answer; no two have a word in common, and their lengths differ."""
    return bytes([16 * member + number + 1]) * (9 + 4 * (number % 3)), number + member / 8
