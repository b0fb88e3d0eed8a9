"""Worlds of shared memory alone: the real `Region` and `GroupMemory`, where each store and look is a step of its own.

Members are threads of which one runs at a time; chance says which. A store is not seen by others at once: it waits in a
buffer, and they leave that in order, as on x86-64, or in any order, as on aarch64. There a look may also find what was
there some time ago. Only a fence ends both. Whoever sleeps is woken or sleeps on for ever: nobody looks by itself, so a
wake-up that is lost is found.
"""

import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from client.shared_memory import group_memory, region
from client.shared_memory.group_memory import GroupMemory
from client.shared_memory.region import Region
from statsd_bn.rows import Rows

# How many of a word's latest values may still be found on aarch64.
OLD_VALUES = 3

# More steps than this take a world that never ends.
MOST_STEPS = 20_000

SECONDS = 30.0


# Where the code has fences.
FENCED = (region, group_memory)


class MemoryFinding(AssertionError):
    """A rule was broken."""


class Ended(BaseException):
    """Ends the thread of a member: it is killed, or the world is over."""


@dataclass
class Memory:
    """What the members share.

    Attributes:
        history: of each word its values, the newest last; a word that nobody has written is 0.
        is_weak: whether stores and looks may pass one another as on aarch64.
    """

    rng: random.Random
    is_weak: bool
    history: dict[int, list[int]] = field(default_factory=dict)

    def newest(self, word: int) -> int:
        """Returns how many values a word has had."""
        return len(self.history.setdefault(word, [0]))


class View:
    """The memory as one member sees it; has what `Region` and `Futex` want of a memory of words.

    Args:
        memory: all share.
        step: called before each store and look; other members may run meanwhile.
    """

    def __init__(self, memory: Memory, step: Callable[[], None]) -> None:
        self._memory = memory
        self._step = step
        self._buffer: list[tuple[int, int]] = []
        # The oldest value of each word that it may still find, and the one for words that are not there.
        self._seen: dict[int, int] = {}

    def __getitem__(self, word: int | slice) -> Any:
        if isinstance(word, slice):
            return [self[one] for one in range(word.start, word.stop)]
        self._step()
        self._let_some_leave()
        own = [value for written, value in self._buffer if written == word]
        if own:
            return own[-1]
        memory = self._memory
        newest = memory.newest(word) - 1
        oldest = max(self._seen.get(word, 0), newest - OLD_VALUES) if memory.is_weak else newest
        found = memory.rng.randint(oldest, newest) if memory.rng.random() < 0.5 else newest
        self._seen[word] = found
        return memory.history[word][found]

    def __setitem__(self, word: int, value: int) -> None:
        self._step()
        self._buffer.append((word, value))
        self._let_some_leave()

    def fence(self) -> None:
        """What was stored is seen by all, and what all see is found."""
        self._step()
        while self._buffer:
            self._leave(0)
        self._seen = {word: len(values) - 1 for word, values in self._memory.history.items()}

    def _let_some_leave(self) -> None:
        rng = self._memory.rng
        while self._buffer and rng.random() < 0.3:
            self._leave(rng.randrange(len(self._buffer)) if self._memory.is_weak else 0)

    def _leave(self, place: int) -> None:
        word = self._buffer[place][0]
        # Two stores to one word never pass each other.
        first = next(n for n, (written, _) in enumerate(self._buffer) if written == word)
        _, value = self._buffer.pop(first)
        self._memory.newest(word)
        self._memory.history[word].append(value)
        self._seen[word] = len(self._memory.history[word]) - 1


class SimulatedValues:
    """What `Region` wants of an array in the memory: that it is written as a whole, and read as one."""

    def __init__(self, words: Any, places: list[int], shape: tuple[int, ...]) -> None:
        self._words, self._places, self._shape = words, places, shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.reshape(self._shape)

    def __setitem__(self, _all: Any, values: Any) -> None:
        for place, value in zip(self._places, values.view(np.int64).ravel().tolist(), strict=True):
            self._words[place] = value

    def reshape(self, shape: tuple[int, ...]) -> Any:
        return np.array([self._words[place] for place in self._places], np.int64).view(np.float64).reshape(shape)


class SimulatedRegion(Region):
    """A region whose words and values go through a view."""

    def __init__(self, view: View, members: int, me: int) -> None:
        super().__init__(bytearray(0), members, me)  # type: ignore[arg-type]  # nothing is read from it
        self._words = view  # type: ignore[assignment]

    def _values(self, at: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
        steps = strides or [8 * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        places = [(at + int(np.dot(place, steps))) // 8 for place in np.ndindex(shape)]
        return SimulatedValues(self._words, places, shape)

    def _head(self, start: int) -> bytes:
        return np.array(self._words[start // 8 : start // 8 + 4], np.uint64).tobytes()


class SimulatedFutex:
    """A futex in a world: whoever sleeps is woken by somebody."""

    def __init__(self, world: "MemoryWorld", view: View) -> None:
        self._world, self._view = world, view

    @property
    def value(self) -> int:
        return int(self._view[-1])

    def sleep(self, value: int, _seconds: float) -> None:
        # The system compares and goes to sleep in one step, and sees all that has left the buffers.
        self._view.fence()
        if self._world.memory.history.get(-1, [0])[-1] == value:
            self._world.sleep()
        self._view.fence()  # both ways through the system take its locks

    def wake(self, value: int) -> int:
        self._view[-1] = value
        self._view.fence()
        return self._world.wake()


class MemoryWorld:
    """Everything of one seed."""

    def __init__(self, seed: int) -> None:
        rng = self._rng = random.Random(seed)
        self.seed = seed
        self.memory = Memory(rng, is_weak=rng.random() < 0.6)
        self.members = rng.choice((2, 2, 3, 3, 4))
        self.rounds = rng.choice((2, 3, 5))
        self._odd = {number for number in range(self.rounds) if rng.random() < 0.1}
        # Of each round: how many rows of how many channels a member brings, what they count, and who brings one more.
        self._sizes = [
            (rng.choice((1, 1, 2)), rng.choice((1, 2)), rng.choice((0, 0, 50)), rng.choice((None, None, 0, 1)))
            for _ in range(self.rounds)
        ]
        self._order = [rng.sample(range(self.members), self.members) for _ in range(self.rounds)]
        self._killed = rng.randrange(self.members) if rng.random() < 0.2 else None
        self._patience = rng.choice((0.2, 0.5, 0.9))
        self._turn = threading.Condition()
        self._running = 0
        self._asleep: set[int] = set()
        self._ended: set[int] = set()
        self._steps = 0
        self._is_over = False
        self.finding: MemoryFinding | None = None
        self.got: list[list[Any]] = [[] for _ in range(self.members)]
        self._here = threading.local()

    def run(self) -> None:
        """Runs it to its end.

        Raises:
            MemoryFinding: a rule is broken.
        """
        with ExitStack() as patches:
            for module in FENCED:
                patches.enter_context(mock.patch.object(module, "fence", self._fence))
                patches.enter_context(mock.patch.object(module, "IS_WEAKLY_ORDERED", self.memory.is_weak))
            threads = [threading.Thread(target=self._live, args=[me], daemon=True) for me in range(self.members)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SECONDS)
        if self.finding:
            raise self.finding
        if any(thread.is_alive() for thread in threads):
            raise MemoryFinding(f"seed {self.seed}: it does not end")
        self._check()

    def step(self) -> None:
        """Another member may run now."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            self.find("it does not end")
        me = self._here.me
        if me == self._killed and self._rng.random() < 0.01:
            raise Ended
        if self._rng.random() >= self._patience:
            self._hand_over(me)

    def _fence(self) -> None:
        self._here.view.fence()

    def sleep(self) -> None:
        """The running member sleeps until it is woken."""
        me = self._here.me
        self._asleep.add(me)
        self._hand_over(me)

    def wake(self) -> int:
        """Wakes all that sleep."""
        woken = len(self._asleep)
        self._asleep.clear()
        return woken

    def find(self, complaint: str) -> None:
        """A rule is broken; whoever notices it, all end."""
        self.finding = self.finding or MemoryFinding(f"seed {self.seed}: {complaint}")
        raise Ended

    def rows_of(self, member: int, number: int) -> Rows:
        """What a member brings to a round; no two are alike."""
        replicas, channels, more, has_another = self._sizes[number]
        replicas += member == has_another
        values = np.arange(2.0 * replicas * channels).reshape(replicas, 2, channels) / 64 + member + number * 10
        return Rows(tuple(more + member + row for row in range(replicas)), values)

    def memory_of(self, view: View, me: int) -> Any:
        """Returns the memory as a member has it, whose region and futex are those of this world."""
        made = GroupMemory.__new__(GroupMemory)
        made.lock = threading.Lock()
        made._region = SimulatedRegion(view, self.members, me)
        made._futex = SimulatedFutex(self, view)  # type: ignore[assignment]
        made._number = made._came = made._came_before = 0
        made._spin_seconds = 0.0
        return made

    def take_turn(self, memory: Any, me: int, number: int) -> Any:
        """Takes part in a round; returns what it has brought this member."""
        # In an odd round one member has come for another one.
        digest = 1000 + number + (number in self._odd and me == 0)
        memory.arrive(digest, self.rows_of(me, number), self._came(me, number))
        while not memory.wait(float("inf")):
            pass
        self._check_time(memory, me, number)
        return _told(memory.brought())

    def _came(self, member: int, number: int) -> float:
        """When a member comes to a round, by its clock; chance may let others write before it after all."""
        return 8.0 * number + self._order[number].index(member) + 1

    def _check_time(self, memory: Any, me: int, number: int) -> None:
        """Whoever has found that all have come finds when they did."""
        behind = self._came(me, number) - max(self._came(one, number) for one in range(self.members) if one != me)
        expected = behind if behind >= 0 and number else None
        if (found := memory.seconds_behind) != expected:
            self.find(f"member {me} came {found} s behind all others to round {number}, not {expected}")

    def expected(self, number: int) -> tuple[list[int], list[Any]] | None:
        """Returns what a round brings a member: the counts and values that all bring, if they come for the same one."""
        if number in self._odd:
            return None
        rows = [self.rows_of(member, number) for member in range(self.members)]
        return [count for one in rows for count in one.counts], np.concatenate([one.values for one in rows]).tolist()

    def _live(self, me: int) -> None:
        view = View(self.memory, self.step)
        self._here.me, self._here.view = me, view
        try:
            with self._turn:
                self._turn.wait_for(lambda: self._running == me)
            memory = self.memory_of(view, me)
            for number in range(self.rounds):
                self.got[me].append(self.take_turn(memory, me, number))
                view.fence()  # whoever goes on takes locks, of the connection and of logging
        except Ended:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, no member should have it
            self.finding = self.finding or MemoryFinding(f"seed {self.seed}: member {me}: {error!r}")
        finally:
            self._ended.add(me)
            self._hand_over(me, for_good=True)

    def _hand_over(self, me: int, *, for_good: bool = False) -> None:
        ready = [one for one in range(self.members) if one not in self._asleep and one not in self._ended]
        if not ready:
            self._nobody_runs()
            ready = [one for one in range(self.members) if one not in self._ended]
        with self._turn:
            self._running = self._rng.choice(ready) if ready else -1
            self._turn.notify_all()
            if for_good:
                return
            self._turn.wait_for(lambda: self._running == me)
        if self._is_over or self.finding:
            raise Ended

    def _nobody_runs(self) -> None:
        """All sleep or have ended: well, if one was killed; else somebody was not woken."""
        if self._asleep and self._killed not in self._ended and not self.finding:
            self.finding = MemoryFinding(f"seed {self.seed}: members {sorted(self._asleep)} are never woken")
        self._is_over = True
        self._asleep.clear()

    def _check(self) -> None:
        for me, got in enumerate(self.got):
            for number, found in enumerate(got):
                if found != (expected := self.expected(number)):
                    raise MemoryFinding(f"seed {self.seed}: member {me} has {found} in round {number}, not {expected}")


def _told(brought: region.Brought | None) -> tuple[list[int], list[Any]] | None:
    return brought and (brought.counts, brought.values.tolist())
