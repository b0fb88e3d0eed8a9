"""Chaos with real processes: members and the server are killed, stopped, stuck and cut off while real layers train."""

import functools
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch import nn

from chaos import chaos, chaos_scenarios
from chaos.chaos_scenarios import Result
from chaos.chaos_world import WORLD, Finding, Members, Server, descendants
from programs import chaos_programs
from support import starter
from support.memory_members import in_threads

# Far above the promised 5 s.
SOON = 20.0

# Scenarios that need little CPU time; they run concurrently.
WAITING = [
    chaos_scenarios.frozen_member,
    chaos_scenarios.looping_member,
    chaos_scenarios.member_that_is_cut_off,
    chaos_scenarios.killed_member_and_master,
]

# Fewer faults than in `scripts/chaos`: each start of a server takes half a second of a processor.
TIMES = {
    chaos_scenarios.killed_member: 2,
    chaos_scenarios.briefly_frozen_member: 1,
    chaos_scenarios.killed_master: 4,
    chaos_scenarios.cut_connections: 6,
    chaos_scenarios.halved_streams: 5,
    chaos_scenarios.everything: 5,
}


@pytest.fixture(scope="module", autouse=True)
def _ready():
    """Starts what the module's tests share: the process that forks members, and the undisturbed run."""
    starter.warm_up()
    chaos_scenarios.undisturbed()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(_ready):
    before = descendants()
    yield
    left = descendants() - before
    assert left == set(), [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


def go_wrong(scenario):
    """The finding, or an empty text."""
    # The folder's name has to be short enough for an ipc socket.
    with tempfile.TemporaryDirectory() as folder:
        times = {"times": TIMES[scenario]} if scenario in TIMES else {}
        try:
            result = scenario(random.Random(0), Path(folder), **times)
        except Finding as finding:
            return f"{scenario.__name__}: {finding}"
    late = not result.seconds or max(result.seconds) > SOON
    return f"{scenario.__name__}: seconds are {result.seconds}" if late else ""


@pytest.mark.parametrize(
    "scenario",
    [scenario for scenario in chaos_scenarios.SCENARIOS if scenario not in WAITING],
    ids=lambda scenario: scenario.__name__,
)
def test_all_promises_are_kept(scenario):
    assert go_wrong(scenario) == ""


@pytest.mark.long
def test_all_promises_are_kept_for_waiting_members():
    assert in_threads([functools.partial(go_wrong, scenario) for scenario in WAITING], 100.0) == [""] * len(WAITING)


# The checks themselves find faults.


def test_a_run_that_ends_with_other_weights_is_a_finding(folder, monkeypatch):
    monkeypatch.setattr(chaos_scenarios, "undisturbed", lambda: ["other"] * WORLD)
    with pytest.raises(Finding, match="the weights differ from an undisturbed run"):
        chaos_scenarios.cut_connections(random.Random(0), folder, times=1)


def test_weights_that_are_nan_are_an_error():
    model = nn.BatchNorm1d(2)
    assert chaos_programs.digest_of(model) == chaos_programs.digest_of(nn.BatchNorm1d(2))
    model.running_mean[1] = float("nan")
    with pytest.raises(ValueError, match="running_mean: expected finite values"):
        chaos_programs.digest_of(model)


def test_an_error_about_another_member_is_a_finding(folder):
    with Server(folder) as server, Members([server.endpoint] * WORLD, "job", 1) as members:
        members.allow(1)
        with pytest.raises(Finding, match="expected ReplicaLost, got '"):
            chaos_scenarios._known(members, 0, lambda: None)
    with Server(folder) as server, Members([server.endpoint] * WORLD, "job", 9, trouble=(1, "fail", 1)) as members:
        members.allow(9)
        members.let_go(1)
        with pytest.raises(Finding, match="is not about member 0"):
            chaos_scenarios._require_lost(members.report(2), 0)


def test_a_member_with_another_exit_code_is_a_finding(folder):
    with Server(folder) as server, Members([server.endpoint] * WORLD, "job", 9) as members:
        members.send_signal(1, signal.SIGKILL)
        with pytest.raises(Finding, match="member 1 was let go and ended with -9"):
            members.let_go(1)
        with pytest.raises(Finding, match="member 1 ended without a word"):
            members.report(1)


def test_a_missing_server_is_a_finding(folder):
    server = Server(folder)
    server._process.kill()
    server._process.wait(SOON)
    with pytest.raises(Finding, match="ended after SIGTERM with -9"), server:
        pass


def test_a_warning_of_the_server_is_a_finding(folder):
    (folder / "server.log").write_text("Traceback")
    with pytest.raises(Finding, match="the server complained: Traceback"), Server(folder):
        pass


# The script.


def good(chance, _):
    return Result([chance.uniform(1, 2), 3.0], identical=True)


def bad(*_):
    raise Finding("something is wrong")


def leaves_a_process(*_):
    leaves_a_process.left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    return Result([1.0])


def test_the_script_shows_what_it_measured(capsys, monkeypatch):
    monkeypatch.setattr(chaos_scenarios, "SCENARIOS", [good])
    assert chaos.main(["--rounds", "2", "--seed", "7"]) == 0
    first = capsys.readouterr().out
    assert "--seed 7" in first
    name, runs, troubles, median, *rest = first.splitlines()[-1].split()
    assert (name, runs, troubles, *rest) == ("good", "2", "4", "3.00", "2", "of", "2", "0")
    assert 2.0 < float(median) < 2.5
    assert chaos.main(["--rounds", "2", "--seed", "7"]) == 0
    assert capsys.readouterr().out == first, "the same seed, the same chaos"


def test_the_script_continues_after_a_finding_and_fails_at_the_end(capsys, monkeypatch):
    monkeypatch.setattr(chaos_scenarios, "SCENARIOS", [bad, good])
    assert chaos.main(["--rounds", "1"]) == 1
    output = capsys.readouterr()
    assert "something is wrong" in output.err
    assert output.out.splitlines()[-2].split() == ["bad", "1", "0", "-", "-", "-", "1"]
    assert output.out.splitlines()[-1].split()[-5:] == ["3.00", "1", "of", "1", "0"]


def test_the_script_finds_a_process_that_is_left_behind(capsys, monkeypatch):
    monkeypatch.setattr(chaos_scenarios, "SCENARIOS", [leaves_a_process])
    assert chaos.main(["--rounds", "1"]) == 1
    left = leaves_a_process.left
    assert f"processes were left behind: [{left.pid}]" in capsys.readouterr().err
    left.kill()
    left.wait(SOON)
