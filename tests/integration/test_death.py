"""What the other ranks learn from a real server when a rank is killed, frozen or busy."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from client.session.protocol.member import OVER_PROCESS_GROUP, OVER_SERVER, SHARED_MEMORY, TRANSPORTS
from programs import death_programs
from statsd_bn.errors import ReplicaLost, StatsdBNError
from support.starter import STARTER

# Far above the promised times, far below the rounds' deadline of 100 s.
WAIT_SECONDS = 40.0


class Workers:
    def __init__(self, endpoint: str, job: str, transport: str, store: str) -> None:
        pairs = [STARTER.Pipe() for _ in range(3)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            STARTER.Process(
                target=death_programs.take_commands, args=(theirs, endpoint, job, member, 3, transport, store)
            )
            for member, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()
        assert [self.answer(member) for member in range(3)] == ["ready"] * 3

    def send(self, command: Callable[..., object], *members: int) -> None:
        for member in members:
            self.pipes[member].send(command.__name__)

    def answer(self, member: int) -> object:
        assert self.pipes[member].poll(WAIT_SECONDS), f"no answer from member {member} in time"
        return self.pipes[member].recv()

    def ask(self, command: Callable[..., object], *members: int) -> list[object]:
        self.send(command, *members)
        return [self.answer(member) for member in members]

    def send_signal(self, member: int, number: signal.Signals) -> None:
        os.kill(self.processes[member].pid, number)

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join(WAIT_SECONDS)


@pytest.fixture(params=TRANSPORTS)
def workers(impatient_server, job, request, tmp_path) -> Iterator[Workers]:
    found = Workers(impatient_server.endpoint, job, request.param, str(tmp_path / "store"))
    try:
        assert found.ask(death_programs.exchange, 0, 1, 2) == [3, 3, 3]
        assert found.ask(death_programs.transport, 0, 1, 2) == [request.param] * 3
        yield found
    finally:
        found.end()


# For tests that use a processor for seconds: only `scripts/test --long` runs them over both transports.
IN_ONE_TRANSPORT = pytest.mark.parametrize(
    "workers", [OVER_SERVER, pytest.param(SHARED_MEMORY, marks=pytest.mark.long)], indirect=True
)

DEATHS = pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGKILL, "the connection was lost"), (signal.SIGSTOP, "no sign of life for ")],
    ids=["killed", "frozen"],
)


def assert_lost(errors: list[object], member: int, cause: str) -> None:
    for error in errors:
        assert isinstance(error, ReplicaLost), error
        assert f"rank {member} (" in str(error)
        assert f" was lost: {cause}" in str(error)
        assert (error.fields["member"], error.fields["step"]) == (member, 0)
        assert error.fields["cause"].startswith(cause)


@DEATHS
@pytest.mark.parametrize("workers", [OVER_PROCESS_GROUP], indirect=True)
def test_ranks_in_a_process_group_learn_of_a_death(workers, number, cause):
    workers.send(death_programs.exchange, 0, 1)
    workers.send_signal(2, number)
    assert_lost([workers.answer(0), workers.answer(1)], 2, cause)
    assert_lost(workers.ask(death_programs.exchange, 0), 2, cause)


@DEATHS
def test_ranks_in_a_round_learn_of_a_death(workers, number, cause):
    workers.send(death_programs.exchange, 0, 1)
    workers.send_signal(2, number)
    assert_lost([workers.answer(0), workers.answer(1)], 2, cause)


@DEATHS
def test_ranks_between_rounds_learn_of_a_death_in_the_next_one(workers, number, cause):
    workers.send_signal(2, number)
    workers.send(death_programs.exchange, 0)
    first = workers.answer(0)
    # Member 1 has received nothing yet; its next round raises at once.
    assert_lost([first, *workers.ask(death_programs.exchange, 1)], 2, cause)


def test_a_frozen_rank_gets_the_error_when_it_continues(workers):
    workers.send_signal(2, signal.SIGSTOP)
    workers.send(death_programs.exchange, 0, 1)
    cause = "no sign of life for "
    assert_lost([workers.answer(0), workers.answer(1)], 2, cause)
    workers.send_signal(2, signal.SIGCONT)
    assert_lost(workers.ask(death_programs.exchange, 2), 2, cause)


def test_a_rank_frozen_in_a_round_gets_the_error_too(workers):
    workers.send(death_programs.exchange, 2)
    workers.send(death_programs.exchange, 0)
    workers.send_signal(2, signal.SIGSTOP)
    assert_lost([workers.answer(0)], 2, "no sign of life for ")
    workers.send_signal(2, signal.SIGCONT)
    assert_lost([workers.answer(2)], 2, "no sign of life for ")


@IN_ONE_TRANSPORT
def test_a_rank_that_computes_in_python_between_rounds_is_not_lost(workers):
    workers.send(death_programs.exchange, 0, 1)
    assert workers.ask(death_programs.compute, 2) == [None]
    assert workers.ask(death_programs.exchange, 2) == [3]
    assert [workers.answer(member) for member in (0, 1)] == [3, 3]


@IN_ONE_TRANSPORT
def test_a_rank_that_holds_pythons_global_lock_for_too_long_is_lost(workers):
    workers.send(death_programs.hold_the_lock, 2)
    workers.send(death_programs.exchange, 0, 1)
    assert_lost([workers.answer(0), workers.answer(1)], 2, "no sign of life for ")
    assert workers.answer(2) is None
    assert_lost(workers.ask(death_programs.exchange, 2), 2, "no sign of life for ")


@IN_ONE_TRANSPORT
def test_a_rank_that_closes_a_channel_after_an_error_is_not_lost(workers):
    workers.send(death_programs.exchange, 0, 1)
    workers.ask(death_programs.exchange_and_fail, 2)
    failed = [workers.answer(member) for member in (0, 1)]
    assert all(isinstance(error, StatsdBNError) and not isinstance(error, ReplicaLost) for error in failed)
    workers.send(death_programs.exchange, 0, 1)
    assert workers.ask(death_programs.compute, 2) == [None]
    assert workers.ask(death_programs.exchange, 2) == [3]
    assert [workers.answer(member) for member in (0, 1)] == [3, 3]
