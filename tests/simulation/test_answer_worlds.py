"""The worlds of answers in shared memory: none of them fails, and each slip that is planted is found."""

from contextlib import AbstractContextManager
from unittest import mock

import pytest

from client.shared_memory.answers import Answers
from client.shared_memory.host_memory import HostMemory
from simulation.answer_worlds import AnswerWorld
from simulation.memory_worlds import SimulatedFutex
from simulation.planted_slips import is_found, no_fence_in

WORLDS = 60


def test_no_world_fails():
    for seed in range(WORLDS):
        AnswerWorld(seed).run()


def test_in_some_worlds_two_members_carry_at_the_same_time():
    carried = []
    leave = HostMemory.leave

    def note(self, frame, seconds):
        carried.append((id(self._futex._world), seconds // 1))
        leave(self, frame, seconds)

    worlds = [AnswerWorld(seed) for seed in range(WORLDS)]
    with mock.patch.object(HostMemory, "leave", note):
        for world in worlds:
            world.run()
    assert len(set(carried)) < len(carried)


def turn_before_the_answer() -> AbstractContextManager[object]:
    """A member says that its answer is there, and then leaves it."""
    leave = Answers.leave

    def early(self, turn, frame, seconds):
        self._words[self._turns[self._me]] = turn
        leave(self, turn, frame, seconds)

    return mock.patch.object(Answers, "leave", early)


def answer_of_another_turn() -> AbstractContextManager[object]:
    """Whatever was left is taken for the answer."""

    def find(self, _turn):
        left = [turn for place in self._turns if (turn := self._words[place])]
        return find_of(self, left[0]) if left else None

    find_of = Answers.find
    return mock.patch.object(Answers, "find", find)


def nobody_is_woken() -> AbstractContextManager[object]:
    return mock.patch.object(SimulatedFutex, "wake", return_value=0)


@pytest.mark.parametrize(
    "plant",
    [
        turn_before_the_answer,
        answer_of_another_turn,
        nobody_is_woken,
        pytest.param(no_fence_in(Answers.leave), id="no fence before the turn"),
        pytest.param(no_fence_in(Answers.find), id="no fence in find"),
    ],
)
def test_a_planted_slip_is_found(plant):
    assert is_found(plant, AnswerWorld)
