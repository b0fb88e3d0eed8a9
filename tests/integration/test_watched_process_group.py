"""Rows of a job over torch's default process group, while the server watches."""

import subprocess
import sys

import pytest

from client.session.protocol.member import OVER_PROCESS_GROUP, OVER_SERVER
from client.transports import process_group_monitor
from programs import watched_programs
from statsd_bn.text import unwrap
from support.transports import CHOSEN, WATCHED

NEEDS = "ConfigurationError: transport 'process_group' needs torch's default process group on all ranks: rank "


@pytest.mark.parametrize("transport", [WATCHED, CHOSEN])
def test_the_server_knows_of_steps_rounds_and_infinity(over, transport):
    found = over(transport, 2, watched_programs.train_and_ask)
    steps, rounds = watched_programs.STEPS, 3 * watched_programs.STEPS + 2  # the first layer has no backward round
    assert [of_rank[:3] for of_rank in found] == [(OVER_PROCESS_GROUP, rounds, steps)] * 2
    report = found[0][3]
    assert [(member["transport"], member["step"]) for member in report["members"]] == [(OVER_PROCESS_GROUP, steps)] * 2
    assert report["rounds_done"] >= rounds
    assert f", forward, step {steps}, rank 1 (" in report["non_finite"][0]


def test_a_checkpoint_of_the_first_step_runs_no_second_round(over):
    for found, expected in zip(
        over(WATCHED, 2, watched_programs.checkpointed),
        over(OVER_SERVER, 2, watched_programs.checkpointed),
        strict=True,
    ):
        assert all(found[name].tobytes() == values.tobytes() for name, values in expected.items())


@pytest.mark.parametrize(
    ("transports", "text"),
    [
        ((OVER_PROCESS_GROUP,) * 2, "0: expected rank 0 of 2 in torch's default process group, got none (and 1 more)"),
        (("auto", OVER_PROCESS_GROUP), "0: its transport is 'auto' (and 1 more)"),
    ],
)
def test_ranks_without_the_transport_all_get_the_reason(pool, server, job, transports, text):
    program = watched_programs.first_error_over
    futures = [pool.submit(program, server.endpoint, job, rank, each) for rank, each in enumerate(transports)]
    assert all(unwrap(one.result(timeout=60)).startswith(f"{NEEDS}{text}") for one in futures)


def test_ranks_of_the_process_group_that_differ_from_the_jobs_are_an_error(ranks, server, job):
    for text in ranks(2, watched_programs.in_another_order, server.endpoint, job):
        assert "rank 0: expected rank 0 of 2 in torch's default process group, got rank 1 of 2 (and 1 more)" in unwrap(
            text
        )


def test_a_late_rank_is_logged_with_its_stack(over):
    warned, _ = over(WATCHED, 2, watched_programs.be_late)
    assert any("rank 1" in text and "watched_programs.py" in text for text in warned), warned


def test_ranks_in_different_layers_get_a_mismatch(over):
    for text in over(WATCHED, 2, watched_programs.come_to_different_layers):
        assert text.startswith("RoundMismatch: deadlock: the ranks wait in different rounds")


@pytest.mark.parametrize(
    ("transport", "after", "outcome"),
    [(CHOSEN, OVER_SERVER, True), (WATCHED, OVER_PROCESS_GROUP, "client.join() cannot use a process group")],
)
def test_join_switches_to_the_server_unless_the_process_group_was_requested(over, transport, after, outcome):
    for before, found, text in over(transport, 2, watched_programs.join):
        assert (before, found) == (OVER_PROCESS_GROUP, after)
        assert text is outcome or str(text).startswith(str(outcome))


def test_a_script_ends_at_once_although_gloo_waits_for_a_frozen_rank(impatient_server, job, tmp_path):
    command = [sys.executable, watched_programs.__file__, impatient_server.endpoint, job, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        _, stderr = ranks[0].communicate(timeout=40)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[0].returncode == 1
    assert "ReplicaLost" in stderr
    assert " was lost: no sign of life for " in unwrap(stderr)
    assert stderr.splitlines()[-1] == "exiting at once: torch's threads still wait for a lost rank"


def test_a_collective_that_finishes_just_after_its_timeout_has_not_failed():
    class Work:
        waits = 0

        def wait(self, *_):
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return True

    assert process_group_monitor._is_done(Work(), 0.01)
