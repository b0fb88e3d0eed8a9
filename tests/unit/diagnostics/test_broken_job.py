"""A process of a broken job ends itself rather than wait for ever, and exception notes give the reason."""

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from client.diagnostics import collectives
from client.diagnostics.broken_job import EXIT_SECONDS, STALL_SECONDS, BrokenJob
from client.diagnostics.sampler import ThreadSample
from statsd_bn.errors import ReplicaLost, RoundMismatch
from statsd_bn.text import log_line
from support.foreign_code import run_as

LOST = ReplicaLost("job 'j': rank 1 (b, pid 2) failed with ValueError: boom", job="j", cause="ValueError: boom")
LEFT = ReplicaLost("job 'j': rank 1 (b, pid 2) left before the others finished", job="j", cause="")


class FakeSampler:
    def __init__(self) -> None:
        self.now = ThreadSample("train.py:1 f")
        self.behind = None

    def hold(self, call: str, module: str = "torch.nn.parallel.distributed") -> None:
        frame = SimpleNamespace(f_globals={"__name__": module})
        collective = collectives.Collective(frame, None, (call,))
        self.now = ThreadSample("torch/d.py:1 _sync_buffers", collective)

    def call_ours(self) -> None:
        self.now = ThreadSample("train.py:2 f", is_in_call=True)

    def sample(self, _: str = "") -> ThreadSample:
        return self.now

    def nccl_progress(self) -> tuple[object, ...] | None:
        return self.behind


@pytest.fixture
def play():
    sampler, ended = FakeSampler(), []
    job = BrokenJob(sampler, "rank 0 (a, pid 1)", 10.0, ended.append)

    def check_each_second(times=100, first=0.0, before=lambda _: None):
        for number in range(times):
            before(number)
            job.check(first + number)

    return SimpleNamespace(sampler=sampler, ended=ended, job=job, check_each_second=check_each_second)


def test_nothing_happens_while_the_job_is_intact(play):
    play.sampler.hold("one")
    play.check_each_second()
    assert play.ended == []


def test_a_process_held_by_a_collective_is_warned_at_once_and_ended_later(play, caplog):
    play.sampler.hold("one")
    play.job.report(LOST)
    play.job.check(0.0)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "ValueError: boom" in caplog.text
    play.job.check(9.9)
    assert play.ended == []
    play.job.check(10.0)
    (text,) = play.ended
    assert text.startswith("aborting rank 0 (a, pid 1): blocked in torch/d.py:1 _sync_buffers for 10 s")
    assert text.endswith(log_line(LOST))


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        (RoundMismatch("got 8 from rank 1\n  in job 'j'"), "RoundMismatch: got 8 from rank 1"),
        (LOST, "ValueError: boom"),
    ],
    ids=["the error that ended the other rank", "the reported error"],
)
def test_an_error_that_this_rank_has_raised_is_not_logged_as_well(play, caplog, raised, cause):
    play.job.record_raised(raised)
    play.job.report(ReplicaLost(LOST.message, job="j", cause=cause))
    play.job.check(0.0)
    assert caplog.records == []


def move_in_collectives(sampler, number):
    sampler.hold(f"call {number // 9}")


def move_behind_nccl(sampler, number):
    sampler.behind = (f"train.py:{number // 9}", 7) if number % 20 else None


def stay_in_a_call_of_ours(sampler, number):
    if number == 0:
        sampler.call_ours()


@pytest.mark.parametrize("moves", [move_in_collectives, move_behind_nccl, stay_in_a_call_of_ours, lambda *_: None])
def test_a_process_that_advances_computes_or_is_in_a_call_of_ours_is_never_ended(play, moves):
    play.job.report(LOST)
    play.check_each_second(before=lambda number: moves(play.sampler, number))
    assert play.ended == []


def test_a_process_that_stalls_in_nccl_is_ended_later(play, monkeypatch):
    """For example a process that waits in `loss.item()`, which is no collective."""
    aborts = []
    monkeypatch.setattr(play.job, "_abort_collectives", lambda: aborts.append(now))
    play.sampler.behind = ("train.py:1", 7)
    play.job.report(LOST)
    for now in range(10):
        play.job.check(float(now))
    assert play.ended == []
    assert aborts[0] == STALL_SECONDS, "until then the collective may still end"
    play.job.check(10.0)
    (text,) = play.ended
    assert text.startswith("aborting rank 0 (a, pid 1): blocked in train.py:1 f, behind a collective of NCCL, for 10 s")


def test_a_process_that_stalls_in_nccl_within_a_call_of_ours_is_ended_later(play):
    play.sampler.call_ours()
    play.sampler.behind = ("client/transports/process_group.py:1", 7)
    play.job.report(LOST)
    play.job.check(0.0)
    play.job.check(10.0)
    assert len(play.ended) == 1


def test_a_process_stalled_by_ranks_that_exited_cleanly_is_warned_and_not_ended(play, caplog):
    play.sampler.behind = ("train.py:1", 7)
    play.job.report(LEFT)
    play.check_each_second()
    assert "left before the others finished" in caplog.text
    assert play.ended == []


def test_a_process_in_a_call_of_ours_is_not_warned(play, caplog):
    play.sampler.call_ours()
    play.job.report(LOST)
    play.job.check(0.0)
    assert caplog.records == []


def test_a_limit_of_none_ends_no_process():
    sampler, ended = FakeSampler(), []
    job = BrokenJob(sampler, "rank 0", None, ended.append)
    sampler.hold("one")
    job.report(LOST)
    for now in range(1000):
        job.check(float(now))
    assert ended == []


def test_a_process_in_a_barrier_after_others_exited_cleanly_is_warned_and_not_ended(play, caplog):
    play.sampler.hold("barrier", "torch.distributed.distributed_c10d")
    play.job.report(LEFT)
    play.job.check(0.0)
    assert caplog.records == []
    play.check_each_second(first=EXIT_SECONDS)
    assert "left before the others finished" in caplog.text
    assert play.ended == []


def test_a_process_that_trains_on_after_others_exited_cleanly_is_ended(play):
    play.sampler.hold("_sync_buffers")
    play.job.report(LEFT)
    play.job.check(0.0)
    play.job.check(10.0)
    assert len(play.ended) == 1


def test_a_failure_takes_precedence_over_a_clean_exit(play):
    play.job.report(LEFT)
    play.job.report(LOST)
    play.job.report(RoundMismatch("later"))
    assert play.job.wait_for_cause(0.0) is LOST


END = """
import support.without_torch
import sys
from client.diagnostics.broken_job import end_process
sys.stderr.write("before\\n")
print("said")
end_process("rank 0 ends:\\nreason")
"""


def test_an_ended_process_prints_the_reason_last():
    done = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stdout == "said\n"
    assert done.stderr.splitlines()[-1] == r"rank 0 ends:\nreason"


# Notes.


def raised(error: BaseException) -> BaseException:
    try:
        raise error  # noqa: TRY301 - it needs a traceback
    except BaseException as caught:  # noqa: BLE001 - as it was raised
        return caught


def raised_in_torch(error: Exception) -> Exception:
    file, module = "/x/site-packages/torch/distributed/distributed_c10d.py", "torch.distributed.distributed_c10d"
    names = run_as("def all_reduce(): raise error", file, module, error=error)
    try:
        names["all_reduce"]()
    except Exception as caught:  # noqa: BLE001 - as it was raised
        return caught


def notes_of(error: BaseException, play) -> list[str]:
    play.job.annotate(error)
    return getattr(error, "__notes__", [])


def test_an_exception_after_a_failure_gets_a_note_once(play):
    play.job.report(LOST)
    error = raised(RuntimeError("Connection closed by peer"))
    assert notes_of(error, play) == notes_of(error, play) == [f"statsd_bn: ReplicaLost: {LOST}"]


def test_an_exception_of_a_collective_waits_for_the_report_of_a_broken_job(play):
    threading.Timer(0.1, play.job.report, [LOST]).start()
    assert notes_of(raised_in_torch(RuntimeError("Connection closed by peer")), play) == [
        f"statsd_bn: ReplicaLost: {LOST}"
    ]


def test_an_exception_of_the_script_waits_for_nothing(play, monkeypatch):
    monkeypatch.setattr(play.job, "wait_for_cause", lambda seconds: pytest.fail("waits") if seconds else None)
    assert notes_of(raised(ValueError("mine")), play) == []


def test_an_exception_of_the_script_gets_no_note_about_ranks_that_exited_cleanly(play):
    play.job.report(LEFT)
    assert notes_of(raised(ValueError("mine")), play) == []
    assert notes_of(raised_in_torch(RuntimeError("closed")), play) == [f"statsd_bn: ReplicaLost: {LEFT}"]


@pytest.mark.parametrize("error", [LOST, KeyboardInterrupt(), SystemExit(3)])
def test_errors_of_ours_and_intended_exits_stay_unchanged(play, error):
    play.job.report(LOST)
    assert notes_of(raised(error), play) == []


def test_a_signal_to_end_waits_for_the_report_of_a_broken_job_and_then_ends_the_process():
    code = """
import support.without_torch
import os, signal, threading
from statsd_bn.errors import ReplicaLost
from client.diagnostics.broken_job import BrokenJob
job = BrokenJob(None, "rank 0", None)
def later():
    os.kill(os.getpid(), signal.SIGTERM)
    job.report(ReplicaLost("rank 1 failed", cause="boom"))
names = {"__name__": "torch.distributed.distributed_c10d"}
exec("def barrier(): raise RuntimeError('closed')", names)
threading.Timer(0.1, later).start()
try:
    names["barrier"]()
except RuntimeError as error:
    job.annotate(error)
print("lives")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGTERM
    assert "RuntimeError: closed\nstatsd_bn: ReplicaLost: rank 1 failed" in done.stderr
    assert "lives" not in done.stdout
