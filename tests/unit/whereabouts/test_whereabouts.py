"""Where this process is: a thread's stack in a line, torch's collectives, and the end of a broken job."""

import inspect
import itertools
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d

from client.connection.member import Member
from client.connection.session import Session
from client.whereabouts import collectives, notes, stack
from client.whereabouts.broken_job import LEFT_SECONDS, BrokenJob
from client.whereabouts.look import Look, Looks
from client.whereabouts.place import Place
from statsd_bn import limits
from statsd_bn.error_text import in_log
from statsd_bn.errors import ReplicaLost, RoundMismatch
from statsd_bn.messages import Question
from statsd_bn.wire import decode

LOST = ReplicaLost("job 'j': rank 1 (b, pid 2) failed with ValueError: boom", job="j", cause="ValueError: boom")
LEFT = ReplicaLost("job 'j': rank 1 (b, pid 2) left while others went on", job="j", cause="")


# The stack.


def run_as(source, file, module, **names):
    """Runs code as if it stood in a file and module; returns its names."""
    names["__name__"] = module
    exec(compile(source, file, "exec"), names)  # noqa: S102 - it stands in this file
    return names


def frame_in(source, file, module):
    """The frame that calls `here` in code of a file and module."""
    found = []
    run_as(source, file, module, here=lambda: found.append(sys._getframe(1)))
    return found[0]


def test_a_file_is_told_from_its_package_on_and_a_script_by_its_name():
    assert stack.shortened("/home/me/env/lib/python3.11/site-packages/torch/nn/a.py") == "torch/nn/a.py"
    assert stack.shortened(threading.__file__) == "threading.py"
    assert stack.shortened("/home/me/secret project/train.py") == "train.py"


def test_a_thread_in_a_library_is_told_with_the_line_of_the_script_that_called_it():
    told: list[str] = []
    library = run_as(
        "def forward(x):\n    here()",
        "/x/site-packages/torch/nn/a.py",
        "torch.nn.a",
        here=lambda: told.append(stack.told(sys._getframe(1))),
    )
    script = "\n\ndef main(): forward(1)\nmain()"
    run_as(script, "/home/me/train.py", "__main__", forward=library["forward"])
    assert told == ["torch/nn/a.py:2 forward, called from train.py:3 main"]


def test_only_names_files_and_lines_are_told():
    def load(password):
        assert password
        return stack.told(sys._getframe())

    told = load("hunter2")
    assert "hunter2" not in told
    assert "password" not in told
    assert told.endswith(" load")


def test_a_stack_is_bounded_and_printable():
    name, found, odd = "漢" * 5000, [], "漢\n\x1b" * 2000
    here = {"here": lambda: found.append(stack.told(sys._getframe(1)))}
    library = run_as(f"def {name}(): here()", f"/x/site-packages/{odd}.py", "m", **here)
    run_as(f"def {name}2(): f()\n{name}2()", f"/x/{odd}.py", "__main__", f=library[name])
    (told,) = found
    assert told.isprintable()
    assert len(told.encode()) <= limits.MAX_STACK_BYTES


def test_the_main_threads_frame_is_found_from_another_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(stack.told(stack.main_frame())))
    thread.start()
    thread.join()
    assert "test_whereabouts.py" in found[0]


def test_a_thread_in_a_call_of_ours_is_known_though_it_waits_in_a_library():
    found = []
    file, module = "/x/site-packages/zmq/sugar/poll.py", "zmq.sugar.poll"
    library = run_as("def poll(): here()", file, module, here=lambda: found.append(sys._getframe(1)))
    run_as("poll()", "/x/client/connection/transport.py", "client.connection.transport", poll=library["poll"])
    assert stack.is_in_call(found[0])
    assert not stack.is_in_call(sys._getframe())


# Collectives.


@pytest.fixture
def one_rank(tmp_path):
    """A process group of one."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_the_groups_of_this_process_are_told_with_how_far_it_is():
    (before,) = collectives.groups()
    distributed.all_reduce(torch.zeros(1))
    distributed.barrier()
    (after,) = collectives.groups()
    assert (after.name, after.ranks) == (before.name, (0,))
    assert after.launched - before.launched == 2
    assert collectives.group_named(after.name) == after
    assert collectives.group_named("none of them") is None
    assert collectives.rank_in_torch() == 0


def test_without_a_process_group_there_is_nothing_to_tell():
    assert collectives.groups() == []
    assert collectives.rank_in_torch() is None
    assert Looks(tells_stacks=True, rank=0).look().place.group is None


@pytest.mark.usefixtures("one_rank")
def test_a_thread_in_a_collective_is_found_and_its_group(monkeypatch):
    found = []
    work = SimpleNamespace(wait=lambda: found.append(collectives.current(sys._getframe(1))))
    monkeypatch.setattr(distributed.ProcessGroup, "barrier", lambda *_, **__: work)
    distributed.barrier()
    (collective,) = found
    assert collective.group.ranks == (0,)
    assert collective.frame.f_code.co_name == "barrier"
    assert not collectives.is_of_training(collective)


@pytest.mark.usefixtures("one_rank")
def test_a_message_between_two_ranks_is_no_collective(monkeypatch):
    found = []
    work = SimpleNamespace(wait=lambda: found.append(collectives.current(sys._getframe(1))))
    monkeypatch.setattr(distributed.ProcessGroup, "recv", lambda *_, **__: work)
    distributed.recv(torch.zeros(1), 0)
    assert found == [None]


@pytest.mark.usefixtures("one_rank")
def test_a_call_of_the_same_line_again_is_another_call(monkeypatch):
    found = []
    work = SimpleNamespace(wait=lambda: found.append(collectives.current(sys._getframe(1)).call))
    real = distributed.ProcessGroup.barrier
    monkeypatch.setattr(distributed.ProcessGroup, "barrier", lambda *args, **__: real(*args) and work)
    for _ in range(2):
        distributed.barrier()
    assert found[0][2:] != found[1][2:], "whatever the frames' addresses are"


@pytest.mark.usefixtures("one_rank")
def test_a_rank_that_is_another_in_torch_tells_of_no_group():
    name = collectives.groups()[0].name
    assert Looks(tells_stacks=True, rank=0).look(name).place.group is not None
    assert Looks(tells_stacks=True, rank=1).look(name).place.group is None


@pytest.mark.parametrize(
    ("times", "busy", "held"),
    [
        ([5, 5, 5, 5], 0.0, [True, True]),
        ([5, 6, 7, 8], 0.0, [False, False]),
        ([5, 5, 5, 5], 1e6, [False, False]),  # other threads compute for it, as on CUDA
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_who_waits_in_autograds_engine_is_held_only_if_it_does_not_compute(monkeypatch, times, busy, held):
    left, spent = iter(times), itertools.count(0.0, busy)
    monkeypatch.setattr(time, "process_time", lambda: next(spent))
    monkeypatch.setattr(collectives, "run_time", lambda: next(left))
    frame = frame_in("here()", "/x/site-packages/torch/autograd/graph.py", "torch.autograd.graph")
    monkeypatch.setattr(collectives, "is_engine", lambda _: True)
    monkeypatch.setattr(stack, "main_frame", lambda: frame)
    looks = Looks(tells_stacks=True, rank=0, pause=lambda _: None)
    assert [looks.look().place.held for _ in held] == held


@pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")
def test_every_collective_of_this_torch_is_known():
    """Its names change: `all_gather_into_tensor` became `all_gather_single`."""
    found = {name for name, each in vars(distributed_c10d).items() if inspect.isfunction(each) and _waits(each)}
    assert {"all_reduce", "broadcast"} <= found
    assert {name for name in found if not name.startswith("_")} <= collectives._COLLECTIVES[distributed_c10d.__name__]


def _waits(function: Any) -> bool:
    return "async_op" in inspect.signature(function).parameters


def test_without_a_process_group_nobody_is_held_in_autograds_engine(monkeypatch):
    monkeypatch.setattr(collectives, "is_engine", lambda _: True)
    assert not Looks(tells_stacks=True, rank=0, pause=lambda _: None).look().place.held


@pytest.mark.usefixtures("one_rank")
def test_a_thousand_looks_keep_nothing():
    looks = Looks(tells_stacks=True, rank=0)
    session = Session(b"session0", Member("j", "world", 0, 0, 1, 30.0, "here"))
    for number in range(1000):
        frame = session.whereabouts(Question(b"digest00", number), looks.look().place)
    assert decode(frame).number == 999
    assert set(vars(looks)) == set(vars(Looks(tells_stacks=True, rank=0)))


def test_without_permission_no_stack_is_told():
    assert Looks(tells_stacks=True, rank=0).look().place.stack
    assert not Looks(tells_stacks=False, rank=0).look().place.stack


# The end of a broken job.


class FakeLooks:
    """The main thread is where the test says."""

    def __init__(self) -> None:
        self.now = Look(Place("train.py:1 f", held=False, group=None), None, is_in_call=False)

    def hold(self, call: str, module: str = "torch.nn.parallel.distributed") -> None:
        frame = SimpleNamespace(f_globals={"__name__": module})
        collective = collectives.Collective(frame, None, (call,))
        self.now = Look(Place("torch/d.py:1 _sync_buffers", held=True, group=None), collective, is_in_call=False)

    def call_ours(self) -> None:
        self.now = Look(Place("train.py:2 f", held=False, group=None), None, is_in_call=True)

    def look(self, _: str = "") -> Look:
        return self.now


@pytest.fixture
def play():
    looks, ended = FakeLooks(), []
    job = BrokenJob(looks, "rank 0 (a, pid 1)", 10.0, ended.append)
    return SimpleNamespace(looks=looks, ended=ended, job=job)


def test_nothing_happens_while_the_job_is_whole(play):
    play.looks.hold("one")
    for now in range(100):
        play.job.step(now)
    assert play.ended == []


def test_a_process_that_a_collective_holds_is_told_at_once_and_ended_after_a_while(play, caplog):
    play.looks.hold("one")
    play.job.take(LOST)
    play.job.step(0.0)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "ValueError: boom" in caplog.text
    play.job.step(9.9)
    assert play.ended == []
    play.job.step(10.0)
    (text,) = play.ended
    assert text.startswith("rank 0 (a, pid 1) has waited in torch/d.py:1 _sync_buffers for 10 s")
    assert text.endswith(in_log(LOST))


def test_a_process_that_gets_from_one_collective_to_the_next_is_never_ended(play):
    play.job.take(LOST)
    for now in range(100):
        play.looks.hold(f"call {now // 9}")
        play.job.step(float(now))
    assert play.ended == []


def test_a_process_that_computes_or_is_in_a_call_of_ours_is_never_ended(play):
    play.job.take(LOST)
    for where in (lambda: None, play.looks.call_ours):
        where()
        for now in range(100):
            play.job.step(float(now))
    assert play.ended == []


def test_a_process_in_a_call_of_ours_says_nothing_twice(play, caplog):
    play.looks.call_ours()
    play.job.take(LOST)
    play.job.step(0.0)
    assert caplog.records == []


def test_none_ends_nobody():
    looks, ended = FakeLooks(), []
    job = BrokenJob(looks, "rank 0", None, ended.append)
    looks.hold("one")
    job.take(LOST)
    for now in range(1000):
        job.step(float(now))
    assert ended == []


def test_one_that_waits_elsewhere_for_ranks_that_left_in_order_is_told_and_not_ended(play, caplog):
    play.looks.hold("barrier", "torch.distributed.distributed_c10d")
    play.job.take(LEFT)
    play.job.step(0.0)
    assert caplog.records == []
    for now in range(100):
        play.job.step(LEFT_SECONDS + now)
    assert "left while others went on" in caplog.text
    assert play.ended == []


def test_one_that_trains_on_though_others_left_in_order_is_ended(play):
    play.looks.hold("_sync_buffers")
    play.job.take(LEFT)
    play.job.step(0.0)
    play.job.step(10.0)
    assert len(play.ended) == 1


def test_a_failure_says_more_than_a_good_bye(play):
    play.job.take(LEFT)
    play.job.take(LOST)
    play.job.take(RoundMismatch("later"))
    assert play.job.wait(0.0) is LOST


END = """
import sys
from client.whereabouts.broken_job import end_process
sys.stderr.write("before\\n")
print("said")
end_process("rank 0 ends:\\nreason")
"""


def test_the_reason_is_the_last_line_of_a_process_that_is_ended():
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
    notes.explain(error, play.job)
    return getattr(error, "__notes__", [])


def test_an_exception_after_a_failure_gets_a_note_once(play):
    play.job.take(LOST)
    error = raised(RuntimeError("Connection closed by peer"))
    assert notes_of(error, play) == notes_of(error, play) == [f"statsd_bn: {LOST}"]


def test_an_exception_of_a_collective_waits_for_the_news(play):
    threading.Timer(0.1, play.job.take, [LOST]).start()
    assert notes_of(raised_in_torch(RuntimeError("Connection closed by peer")), play) == [f"statsd_bn: {LOST}"]


def test_an_exception_of_the_script_waits_for_nothing(play, monkeypatch):
    monkeypatch.setattr(play.job, "wait", lambda seconds: pytest.fail("waits") if seconds else None)
    assert notes_of(raised(ValueError("mine")), play) == []


def test_an_exception_of_the_script_has_nothing_to_do_with_ranks_that_left_in_order(play):
    play.job.take(LEFT)
    assert notes_of(raised(ValueError("mine")), play) == []
    assert notes_of(raised_in_torch(RuntimeError("closed")), play) == [f"statsd_bn: {LEFT}"]


@pytest.mark.parametrize("error", [LOST, KeyboardInterrupt(), SystemExit(3)])
def test_what_is_ours_and_what_ends_the_process_on_purpose_stays_as_it_is(play, error):
    play.job.take(LOST)
    assert notes_of(raised(error), play) == []


def test_a_signal_to_end_waits_for_the_news_and_then_ends_the_process():
    code = """
import os, signal, threading
from statsd_bn.errors import ReplicaLost
from client.whereabouts import notes
from client.whereabouts.broken_job import BrokenJob
job = BrokenJob(None, "rank 0", None)
def later():
    os.kill(os.getpid(), signal.SIGTERM)
    job.take(ReplicaLost("rank 1 failed", cause="boom"))
names = {"__name__": "torch.distributed.distributed_c10d"}
exec("def barrier(): raise RuntimeError('closed')", names)
threading.Timer(0.1, later).start()
try:
    names["barrier"]()
except RuntimeError as error:
    notes.explain(error, job)
print("lives")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGTERM
    assert "RuntimeError: closed\nstatsd_bn: rank 1 failed" in done.stderr
    assert "lives" not in done.stdout
