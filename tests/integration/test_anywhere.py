"""Trainings as users start them: torchrun with DistributedDataParallel's defaults, mp.spawn, a plain script."""

import os
import sys

import pytest

from support.launched import PATIENT, run_to_its_end
from support.newer_torch import needs
from support.paths import ROOT, TESTS

PROGRAMS = TESTS / "programs" / "anywhere_programs.py"
STEPS = 5  # as in PROGRAMS; an import would take a second
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", PROGRAMS)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]  # a test may start torchrun twice, on a busy machine


@pytest.fixture
def start(tmp_path):
    def run(*command, **environ):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STATSD_BN_")}
        path = os.pathsep.join([str(ROOT), str(TESTS)])
        found = run_to_its_end(command, {**inherited, "XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": path, **environ})
        return found.splitlines()

    tmp_path.chmod(0o700)
    return run


def found_by(lines, program, ranks=2):
    texts = [
        [line.partition(": ")[2] for line in lines if line.startswith(f"rank {rank}, {program}: ")]
        for rank in range(ranks)
    ]
    assert all(texts), lines
    return texts


def warnings_in(lines):
    """Warnings, except those about slow rounds: on a busy machine a rank compiles for seconds."""
    return [line for line in lines if line.startswith("WARNING") and ": has waited " not in line]


OPTIONS = ("ddp", "static_graph", "find_unused_parameters", "gradient_as_bucket_view")


@pytest.mark.long
def test_under_torchrun_ddps_broadcast_of_buffers_changes_no_bit(start):
    others = "no_broadcast,smart,no_sync,nested,rank_0_evaluates"
    lines = start(*TORCHRUN, f"{','.join(OPTIONS)},{others}", **PATIENT)
    (first,), (second,) = found_by(lines, "no_broadcast")
    assert first == second
    assert first.startswith("broadcasts 0 digest ")
    assert found_by(lines, "smart") == [[first]] * 2
    with_broadcasts = first.replace("broadcasts 0 ", f"broadcasts {STEPS} ")
    assert {name: found_by(lines, name) for name in OPTIONS} == dict.fromkeys(OPTIONS, [[with_broadcasts]] * 2)
    for name, beginning in (
        ("no_sync", f"broadcasts {STEPS} "),
        ("nested", f"broadcasts {STEPS} {STEPS} "),
        ("rank_0_evaluates", "digest "),
    ):
        (first,), (second,) = found_by(lines, name)
        assert first == second, name
        assert first.startswith(beginning), name
    assert not warnings_in(lines)


@pytest.mark.long
@needs("fully_shard")
def test_under_torchrun_stack_requests_change_no_bit_of_sharded_training(start):
    lines = start(*TORCHRUN, "sharded,flat")
    without_stacks = start(*TORCHRUN, "sharded,flat", STATSD_BN_STACKS="0")
    for program in ("sharded", "flat"):
        first, second = found_by(lines, program)
        assert first == second == found_by(without_stacks, program)[0]
    assert not warnings_in(lines)


@pytest.mark.long
def test_under_spawn_connect_needs_no_argument(start, tmp_path):
    lines = start(sys.executable, PROGRAMS, "ddp", "2", str(tmp_path / "store"))
    (first,), (second,) = found_by(lines, "ddp")
    assert first == second
    assert first.startswith(f"broadcasts {STEPS} ")
    assert not warnings_in(lines)


@pytest.mark.long
def test_under_spawn_the_ranks_of_a_host_find_one_another(start, tmp_path):
    for machine in "ab":
        (tmp_path / machine).write_text(machine)
    machines = ",".join(str(tmp_path / machine) for machine in "aba")
    lines = start(sys.executable, PROGRAMS, "local", "3", str(tmp_path / "store"), MACHINES=machines, **PATIENT)
    first, second, third = found_by(lines, "local", 3)
    assert first == third == ["Group(name='local host of rank 0', size=2) 2"]
    assert second == ["Group(name='local host of rank 1', size=1) 1"], "alone, its second layer sends nothing"


@pytest.mark.long
@pytest.mark.parametrize("program", ["unconnected", "too_early"])
def test_under_spawn_unconnected_ranks_synchronise_over_the_process_group(start, tmp_path, program):
    lines = start(sys.executable, PROGRAMS, program, "2", str(tmp_path / "store"))
    text = "INFO this process synchronises over torch's process group '0' of 2 ranks (gloo), without a server: "
    assert sum(line.startswith(text + "a rank that hangs or is lost is not reported, ") for line in lines) == 2
    means = {line.partition("running mean ")[2] for line in lines if "running mean " in line}
    assert len(means) == 1


def test_a_plain_script_connects_alone(start):
    lines = start(sys.executable, PROGRAMS, "alone")
    assert "rank 0, alone: in process (0, 1) {0: b'y'}" in lines
    assert any(line.endswith("connected: job 'default', rank 0 of 1, in process") for line in lines)
    assert not warnings_in(lines)
