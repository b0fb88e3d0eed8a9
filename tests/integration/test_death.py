"""Processes that are killed, frozen or busy, seen by the surviving ones through a real server."""

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


class Company:
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

    def tell(self, command: Callable[..., object], *members: int) -> None:
        for member in members:
            self.pipes[member].send(command.__name__)

    def answer(self, member: int) -> object:
        assert self.pipes[member].poll(WAIT_SECONDS), f"no answer from member {member} in time"
        return self.pipes[member].recv()

    def ask(self, command: Callable[..., object], *members: int) -> list[object]:
        self.tell(command, *members)
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
def company(impatient_server, job, request, tmp_path) -> Iterator[Company]:
    found = Company(impatient_server.endpoint, job, request.param, str(tmp_path / "store"))
    try:
        assert found.ask(death_programs.exchange, 0, 1, 2) == [3, 3, 3]
        assert found.ask(death_programs.transport, 0, 1, 2) == [request.param] * 3
        yield found
    finally:
        found.end()


# For tests that use a processor for seconds: only `scripts/test --long` runs them over both transports.
IN_ONE_TRANSPORT = pytest.mark.parametrize(
    "company", [OVER_SERVER, pytest.param(SHARED_MEMORY, marks=pytest.mark.long)], indirect=True
)

DEATHS = pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGKILL, "the connection was lost"), (signal.SIGSTOP, "no sign of life for ")],
    ids=["killed", "frozen"],
)


def assert_lost(told: list[object], member: int, cause: str) -> None:
    for error in told:
        assert isinstance(error, ReplicaLost), error
        assert f"rank {member} (" in str(error)
        assert f" was lost: {cause}" in str(error)
        assert (error.fields["member"], error.fields["step"]) == (member, 0)
        assert error.fields["cause"].startswith(cause)


@DEATHS
@pytest.mark.parametrize("company", [OVER_PROCESS_GROUP], indirect=True)
def test_ranks_in_a_process_group_learn_of_a_death(company, number, cause):
    company.tell(death_programs.exchange, 0, 1)
    company.send_signal(2, number)
    assert_lost([company.answer(0), company.answer(1)], 2, cause)
    assert_lost(company.ask(death_programs.exchange, 0), 2, cause)


@DEATHS
def test_ranks_in_a_round_learn_of_a_death(company, number, cause):
    company.tell(death_programs.exchange, 0, 1)
    company.send_signal(2, number)
    assert_lost([company.answer(0), company.answer(1)], 2, cause)


@DEATHS
def test_ranks_between_rounds_learn_of_a_death_in_the_next_one(company, number, cause):
    company.send_signal(2, number)
    company.tell(death_programs.exchange, 0)
    first = company.answer(0)
    # Member 1 has received nothing yet; its next round raises at once.
    assert_lost([first, *company.ask(death_programs.exchange, 1)], 2, cause)


def test_a_frozen_rank_gets_the_error_when_it_continues(company):
    company.send_signal(2, signal.SIGSTOP)
    company.tell(death_programs.exchange, 0, 1)
    cause = "no sign of life for "
    assert_lost([company.answer(0), company.answer(1)], 2, cause)
    company.send_signal(2, signal.SIGCONT)
    assert_lost(company.ask(death_programs.exchange, 2), 2, cause)


def test_a_rank_frozen_in_a_round_gets_the_error_too(company):
    company.tell(death_programs.exchange, 2)
    company.tell(death_programs.exchange, 0)
    company.send_signal(2, signal.SIGSTOP)
    assert_lost([company.answer(0)], 2, "no sign of life for ")
    company.send_signal(2, signal.SIGCONT)
    assert_lost([company.answer(2)], 2, "no sign of life for ")


@IN_ONE_TRANSPORT
def test_a_rank_that_computes_in_python_between_rounds_is_not_lost(company):
    company.tell(death_programs.exchange, 0, 1)
    assert company.ask(death_programs.compute, 2) == [None]
    assert company.ask(death_programs.exchange, 2) == [3]
    assert [company.answer(member) for member in (0, 1)] == [3, 3]


@IN_ONE_TRANSPORT
def test_a_rank_that_holds_pythons_global_lock_for_too_long_is_lost(company):
    company.tell(death_programs.hold_the_lock, 2)
    company.tell(death_programs.exchange, 0, 1)
    assert_lost([company.answer(0), company.answer(1)], 2, "no sign of life for ")
    assert company.answer(2) is None
    assert_lost(company.ask(death_programs.exchange, 2), 2, "no sign of life for ")


@IN_ONE_TRANSPORT
def test_a_rank_that_closes_a_channel_after_an_error_is_not_lost(company):
    company.tell(death_programs.exchange, 0, 1)
    company.ask(death_programs.exchange_and_fail, 2)
    failed = [company.answer(member) for member in (0, 1)]
    assert all(isinstance(error, StatsdBNError) and not isinstance(error, ReplicaLost) for error in failed)
    company.tell(death_programs.exchange, 0, 1)
    assert company.ask(death_programs.compute, 2) == [None]
    assert company.ask(death_programs.exchange, 2) == [3]
    assert [company.answer(member) for member in (0, 1)] == [3, 3]
