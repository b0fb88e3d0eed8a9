"""torchrun and DistributedDataParallel, with and without its broadcast: if a rank fails, the others say why."""

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import running_server
from support import newer_torch
from support.launched import PROC, WAIT_SECONDS, Launched, free_port
from support.paths import TESTS

PROGRAM = TESTS / "programs" / "fault_programs.py"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not (PROC / "self/environ").exists(), reason="finds processes by /proc"),
]

# The first collective in a wrapper's forward pass: a broadcast of buffers, none, or a gather of sharded parameters.
BROADCAST, NOTHING, SHARDS = 1, 0, 3
MODELS = {BROADCAST: "broadcast", NOTHING: "no broadcast", SHARDS: "fully_shard"}


def cases(names: str, now: list[tuple[int, ...]], later: list[tuple[int, ...]]) -> pytest.MarkDecorator:
    """Cases of models and victims: `now` for `scripts/test`, `later` only for `scripts/test --long`."""
    return pytest.mark.parametrize(names, [*map(_case, now), *(_case(values, pytest.mark.long) for values in later)])


def _case(values: tuple[int, ...], *marks: pytest.MarkDecorator) -> Any:
    wrapper, *others = values
    needs = [newer_torch.needs("fully_shard")] if wrapper == SHARDS else []
    return pytest.param(*values, id="-".join([MODELS[wrapper], *map(str, others)]), marks=[*marks, *needs])


class Faulty(Launched):
    """Ranks under torchrun, one of which fails; the output of each rank is stored separately."""

    def __init__(
        self, folder: Path, what: str, victim: int, wrapper: int, *options: str, size: int = 2, **environ: str
    ) -> None:
        logs = ("--log-dir", folder / "logs", "--redirects", "2", "--tee", "1")
        command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), *options, *logs)
        # torchrun flushes the lines of its ranks only when it ends.
        environ = {"PYTHONUNBUFFERED": "1", **environ}
        super().__init__((*command, PROGRAM, what, str(victim), str(wrapper)), environ, folder / "errors")
        self._folder, self._size = folder / "logs", size

    def stderr(self, rank: int) -> str:
        (file,) = self._folder.glob(f"*/attempt_0/{rank}/stderr.log")
        return file.read_text()

    def survivor_ends(self, rank: int) -> str:
        """The error output of the surviving rank after its end; gloo alone would wait for 30 minutes."""
        pids, has_come = {}, False
        # torchrun forwards each rank's output separately, so one rank's fault may precede another rank's first line.
        while len(pids) < self._size or not has_come:
            what, *numbers = self.line_with(("rank", "fault")).split()
            if what == "rank":
                number, pid = map(int, numbers)
                pids[number] = pid
            else:
                has_come = True
        expiry = time.monotonic() + WAIT_SECONDS
        while _runs(pids[rank]):
            assert time.monotonic() < expiry, self.stderr(rank)
            time.sleep(0.02)
        return self.stderr(rank)

    def line_with(self, beginning: str | tuple[str, ...]) -> str:
        # torchrun begins each line with the rank that printed it.
        while True:
            line = self._lines.get(timeout=WAIT_SECONDS)
            assert line is not None, f"expected a line {beginning!r}; errors: {self.errors}"
            text = line.partition("]:")[2] or line
            if text.startswith(beginning):
                return text


@pytest.fixture
def server_that_waits():
    """A server that accepts a silence of 60 s."""
    with running_server("--silence-seconds", "60") as server:
        yield server.endpoint


# Wrappers in `asked_program.py`.
WAYS = (
    *("defaults", "static_graph", "find_unused_parameters", "gradient_as_bucket_view", "no_sync", "nested"),
    *("fully_shard", "FSDP"),
)


def _runs(number: int) -> bool:
    try:
        return (PROC / str(number) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@cases("wrapper", now=[(BROADCAST,)], later=[(NOTHING,)])
def test_an_extra_forward_on_one_rank_is_a_mismatch_with_the_positions_of_all(tmp_path, wrapper):
    with Faulty(tmp_path, "extra", 1, wrapper, "--master-addr", "127.0.0.1", "--master-port", str(free_port())) as run:
        errors = run.survivor_ends(0)
        assert "layer '1'" in errors
        assert "rank 1 (" in errors
        for output in (errors, run.stderr(1)):
            assert output.count("deadlock: the ranks wait in different places") == 1
            assert "RoundMismatch" in output
        assert "job 'default'" in errors
        if wrapper == BROADCAST:
            assert "_sync_buffers, called from fault_programs.py" in run.stderr(1)


@pytest.mark.long
@pytest.mark.parametrize(("victim", "groups"), [(1, 0), (0, 1)])
def test_a_rank_that_reduces_no_gradients_is_a_mismatch_with_the_backward_pass_of_the_other(tmp_path, victim, groups):
    """One rank waits in a round, the other in DDP's backward pass, with or without further process groups."""
    with Faulty(tmp_path, "reduces nothing", victim, NOTHING, FAULT_GROUPS=str(groups)) as run:
        for rank in (victim, 1 - victim):
            errors = run.survivor_ends(rank) if rank == victim else run.stderr(rank)
            assert "deadlock: the ranks wait in different places" in errors
            assert re.search(rf"rank {1 - victim} \(.*\) +waits .*in a collective of torch", errors)
            assert f"rank {victim} (" in errors
            assert "in forward of layer '1', step 7" in errors


@cases(
    "wrapper, victim, what",
    now=[],
    later=[(BROADCAST, 0, "fewer"), (NOTHING, 1, "fewer"), (BROADCAST, 1, "fewer, then a barrier")],
)
def test_one_batch_fewer_on_one_rank_is_reported_to_the_other(tmp_path, wrapper, victim, what):
    with Faulty(tmp_path, what, victim, wrapper) as run:
        errors = run.survivor_ends(1 - victim)
        assert f"rank {victim} (" in errors
        assert "left before the others finished" in errors


@pytest.mark.long
@pytest.mark.parametrize(("at_the_end", "victim"), [("barrier", 0), ("reduction", 1)])
def test_one_batch_fewer_is_reported_if_all_ranks_are_in_collectives_of_torch(tmp_path, at_the_end, victim):
    with Faulty(tmp_path, f"fewer, then a {at_the_end} inside", victim, BROADCAST) as run:
        # 18 s on a quiet machine: 8 s until the server finds the deadlock, 10 s until a rank in a collective exits.
        text = run.survivor_ends(1 - victim)
        assert "deadlock: the ranks wait in different places" in text
        function = {"barrier": "barrier", "reduction": "all_reduce"}[at_the_end]
        for rank, place in ((victim, function), (1 - victim, "_sync_buffers")):
            assert re.search(rf"rank {rank} \(.*\) is in torch/\S* {place}, called from fault_programs.py:\d+", text), (
                text
            )


@pytest.mark.long
def test_one_batch_fewer_is_reported_if_one_rank_waits_in_a_round_and_the_others_in_different_collectives(tmp_path):
    with Faulty(tmp_path, "fewer, then a barrier inside", 1, BROADCAST, size=3) as run:
        errors = run.survivor_ends(2)
        assert "RoundMismatch" in errors
        assert re.search(r"rank 0 \(.*\) is in torch/\S* _sync_buffers", errors), errors
        assert re.search(r"rank 1 \(.*\) is in torch/\S* barrier", errors), errors


LOST = "was lost: no sign of life"


@cases(
    "wrapper, what, cause",
    now=[],
    later=[
        (SHARDS, "raises", "RuntimeError: augmentation ran out of memory"),
        *((wrapper, "frozen", LOST) for wrapper in MODELS),
        # A server with the default of 3.5 s declares a rank lost when the rank's interpreter is blocked for longer.
        (NOTHING, "holds the lock", LOST),
    ],
)
def test_the_other_rank_reports_the_fault_and_ends(tmp_path, wrapper, what, cause):
    with Faulty(tmp_path, what, 1, wrapper) as run:
        errors = run.survivor_ends(0)
        assert "rank 1 (" in errors
        assert cause in errors


@cases("wrapper, victim", now=[(BROADCAST, 0)], later=[(BROADCAST, 1), (NOTHING, 0), (SHARDS, 1)])
def test_a_killed_rank_is_named_by_the_other(tmp_path, wrapper, victim):
    """In a round torchrun ends the survivor; elsewhere, with a long monitor interval, the survivor raises."""
    is_in_a_round = wrapper == NOTHING
    options = () if is_in_a_round else ("--monitor-interval", "1000")
    with Faulty(tmp_path, "killed", victim, wrapper, *options) as run:
        errors = run.survivor_ends(1 - victim)
        if not is_in_a_round:
            own = rf"ReplicaLost: rank {victim} \(.*\) was lost: the connection was lost"
            assert re.search(own, errors), errors
            return
        run.process.wait(WAIT_SECONDS)
        assert run.leaves_nothing()
        # Rank 0 started the server, which logs to rank 0's error output.
        assert re.search(rf"rank {victim} \(.*\) is lost: the connection was lost", run.stderr(0)), run.stderr(0)


@pytest.mark.long
@pytest.mark.parametrize("reports_stacks", [True, False])
def test_a_late_ranks_stack_is_logged_if_enabled_and_training_continues(tmp_path, reports_stacks):
    with Faulty(tmp_path, "late", 0, NOTHING, STATSD_BN_STACKS=str(int(reports_stacks))) as run:
        assert run.end() == 0, run.stderr(1)
        place = r"rank 0 is in fault_programs.py:\d+ load_a_batch, for \d+ s"
        assert bool(re.search(place, run.stderr(1))) == reports_stacks
        assert ("load_a_batch" in run.stderr(1)) == reports_stacks


@pytest.mark.long
def test_a_rank_whose_interpreter_is_blocked_is_logged_as_not_answering(tmp_path, server_that_waits):
    with Faulty(tmp_path, "holds the lock", 0, NOTHING, FAULT_ENDPOINT=server_that_waits) as run:
        assert run.end() == 0, run.stderr(1)
        assert re.search(r"rank 0 has not answered a stack request for \d+ s", run.stderr(1))


@pytest.mark.long
@newer_torch.needs("fully_shard")
def test_a_stack_request_changes_no_result_under_any_wrapper(tmp_path):
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    with Launched((*command, TESTS / "programs" / "asked_program.py"), {}, tmp_path / "errors") as run:
        lines = [run.line("") for _ in range(2 * len(WAYS))]
        assert run.end() == 0, run.errors
        assert sorted(lines) == sorted([f"{way} same" for way in WAYS] * 2)
        # Rank 1 received rank 0's position, so rank 0 got a stack request.
        assert len(re.findall(r"rank 0 is in asked_program.py:\d+ forward", run.errors)) >= len(WAYS), run.errors


RANKS = 3

# Pauses between two epochs, ten seconds each.
PAUSES = (
    "save_a_checkpoint",
    "validate_with_broadcasts",
    "come_late_to_a_broadcast_of_buffers",
    "wait_in_a_smaller_group_first",
)


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.long
def test_long_waits_in_collectives_of_a_healthy_job_are_no_deadlock(tmp_path):
    command = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(RANKS),
        TESTS / "programs" / "quiet_program.py",
        *PAUSES,
    )
    with Launched(command, {}, tmp_path / "errors") as run:
        lines = [run.line("").split() for _ in range(RANKS * len(PAUSES))]
        assert run.end() == 0, run.errors
        assert sorted((way, int(rank)) for way, rank, _ in lines) == sorted(
            (way, rank) for way in PAUSES for rank in range(RANKS)
        )
        # In each pause at least one rank got a stack request.
        assert {way for way, _, what in lines if what == "asked"} == set(PAUSES)
        assert "deadlock: " not in run.errors
