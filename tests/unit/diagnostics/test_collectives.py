"""Which collective of torch a thread is in, and how far its process is in each group."""

import inspect
import itertools
import json
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.nn.parallel.distributed import DistributedDataParallel, _DDPJoinHook

from client.diagnostics import collectives
from client.diagnostics.sampler import ThreadSample, ThreadSampler
from statsd_bn.messages import ALL_GATHER, ALL_REDUCE, BARRIER, BUFFERS
from statsd_bn.wire import decode, encode
from support.foreign_code import frame_in, run_as
from support.memory_members import wait_until


@pytest.fixture
def one_rank(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_the_groups_of_this_process_are_reported_with_its_progress():
    (before,) = collectives.groups()
    distributed.all_reduce(torch.zeros(1))
    distributed.barrier()
    (after,) = collectives.groups()
    assert (after.name, after.ranks) == (before.name, (0,))
    assert after.launched - before.launched == 2
    sampler = ThreadSampler(reports_stacks=True, rank=0)
    assert [sampler.sample(name).torch_group for name in (after.name, "none of them")] == [after, None]
    assert collectives.rank_in_torch() == 0


def test_without_a_process_group_there_is_no_report():
    assert collectives.groups() == []
    assert collectives.rank_in_torch() is None
    assert ThreadSampler(reports_stacks=True, rank=0).sample().torch_group is None


@pytest.mark.usefixtures("one_rank")
def test_a_collective_in_which_a_thread_waits_is_found_with_its_group(monkeypatch):
    found = []
    work = SimpleNamespace(wait=lambda: found.append(collectives.current(sys._getframe(1))))
    monkeypatch.setattr(distributed.ProcessGroup, "barrier", lambda *_, **__: work)
    distributed.barrier()
    (collective,) = found
    assert collective.group.ranks == (0,)
    assert collective.frame.f_code.co_name == "barrier"
    assert not collective.is_of_training


@pytest.fixture
def sample_in(monkeypatch):
    def sample_in(method: str, call) -> ThreadSample:
        found = []

        def wait() -> None:
            monkeypatch.setattr("client.diagnostics.sampler.main_frame", lambda: frame)
            found.append(ThreadSampler(reports_stacks=True, rank=0).sample())

        def begin(*_, **__):
            nonlocal frame
            frame = sys._getframe(1)
            return SimpleNamespace(wait=wait)

        frame = None
        for name in method.split():
            monkeypatch.setattr(distributed.ProcessGroup, name, begin, raising=False)
        with suppress(EOFError):  # object collectives receive no data to unpickle
            call()
        return found[0]

    return sample_in


ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("method", "call", "kind"),
    [
        ("barrier", distributed.barrier, BARRIER),
        ("allreduce", lambda: distributed.all_reduce(ONE.clone()), ALL_REDUCE),
        ("allgather", lambda: distributed.all_gather([ONE.clone()], ONE), ALL_GATHER),
        # From torch 2.15 on, all_gather_object calls all_gather_single.
        ("allgather all_gather_single", lambda: distributed.all_gather_object([None], "one"), ALL_GATHER),
        ("broadcast", lambda: distributed.broadcast(ONE.clone(), 0), ""),
        ("gather", lambda: distributed.gather(ONE, [ONE.clone()]), ""),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_the_kind_of_a_collective_is_reported_if_all_ranks_leave_it_together(sample_in, method, call, kind):
    sample = sample_in(method, call)
    assert (sample.collective is not None, sample.kind) == (True, kind)


def test_the_broadcast_of_buffers_is_reported_as_such():
    file, module = "/x/site-packages/torch/nn/parallel/distributed.py", "torch.nn.parallel.distributed"
    found = []
    names = {"here": lambda: found.append(collectives.collective_frame(sys._getframe(1)))}
    run_as("def _sync_buffers(): here()\n_sync_buffers()", file, module, **names)
    assert collectives.Collective(found[0], None, ()).kind == BUFFERS


@pytest.mark.parametrize("name", ["_match_all_reduce_for_bwd_pass", "_match_unused_params_allreduce"])
def test_a_rank_in_torchs_join_whose_data_has_ended_is_in_a_collective(name):
    file, module = "/x/site-packages/torch/nn/parallel/distributed.py", "torch.nn.parallel.distributed"
    found = []
    run_as(f"def {name}(): here()\n{name}()", file, module, here=lambda: found.append(sys._getframe(1)))
    assert collectives.collective_frame(found[0]) is not None
    assert hasattr(DistributedDataParallel, name), "torch has a method of this name"


@pytest.mark.parametrize(("owner", "name"), [(DistributedDataParallel, "_pre_forward"), (_DDPJoinHook, "main_hook")])
def test_a_rank_in_ddps_agreement_on_the_order_of_gradients_may_compute(owner, name):
    file, module = "/x/site-packages/torch/nn/parallel/distributed.py", owner.__module__
    found = []
    run_as(f"def {name}(): here(_getframe())\n{name}()", file, module, here=found.append, _getframe=sys._getframe)
    assert collectives.may_compute(found[0])
    assert not collectives.may_compute(sys._getframe())
    assert hasattr(owner, name), "torch has a method of this name"


@pytest.mark.parametrize(
    ("backends", "kind"),
    [
        *(("cpu:gloo,cuda:gloo", BARRIER), ("gloo", BARRIER)),
        *(("cpu:gloo,cuda:nccl", ""), ("cpu:gloo,cuda:nccl,mps:gloo", "")),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_a_group_with_different_backends_reports_no_kind(monkeypatch, sample_in, backends, kind):
    """Torch counts the operations of only one backend."""
    world = distributed_c10d._world
    monkeypatch.setitem(world.pg_backend_config, distributed_c10d.GroupMember.WORLD, backends)
    assert sample_in("barrier", distributed.barrier).kind == kind


@pytest.mark.usefixtures("one_rank")
def test_a_thread_that_pickles_for_a_collective_is_in_none(monkeypatch):
    found = []

    class Pickler:
        def __init__(self, _) -> None:
            pass

        def dump(self, _) -> None:
            found.append(collectives.current(sys._getframe(1)))

    monkeypatch.setattr(distributed_c10d, "_pickler", Pickler)
    with suppress(Exception):  # the pickler produced nothing to send
        distributed.all_gather_object([None], "one")
    assert found == [None]


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
    assert found[0][2:] != found[1][2:], "the frames may have equal addresses"


@pytest.mark.usefixtures("one_rank")
def test_a_rank_with_another_number_in_torch_reports_no_group():
    name = collectives.groups()[0].name
    assert ThreadSampler(reports_stacks=True, rank=0).sample(name).torch_group is not None
    assert ThreadSampler(reports_stacks=True, rank=1).sample(name).torch_group is None


@pytest.mark.parametrize(
    ("times", "busy", "held"),
    [
        ([5, 5, 5, 5], 0.0, [True, True]),
        ([5, 6, 7, 8], 0.0, [False, False]),
        ([5, 5, 5, 5], 1e6, [False, False]),  # other threads of the process compute, as on CUDA
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_a_thread_in_autograds_engine_is_held_only_if_it_computes_nothing(monkeypatch, times, busy, held):
    left, spent = iter(times), itertools.count(0.0, busy)
    monkeypatch.setattr(time, "process_time", lambda: next(spent))
    monkeypatch.setattr(collectives, "main_thread_time", lambda: next(left))
    frame = frame_in("here()", "/x/site-packages/torch/autograd/graph.py", "torch.autograd.graph")
    monkeypatch.setattr(collectives, "may_compute", lambda _: True)
    monkeypatch.setattr("client.diagnostics.sampler.main_frame", lambda: frame)
    sampler = ThreadSampler(reports_stacks=True, rank=0, pause=lambda _: None)
    assert [sampler.sample().collective is not None for _ in held] == held


@pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")
def test_every_collective_of_this_torch_is_known():
    """Torch renames collectives: `all_gather_into_tensor` became `all_gather_single`."""
    found = {name for name, each in vars(distributed_c10d).items() if inspect.isfunction(each) and _waits(each)}
    assert {"all_reduce", "broadcast"} <= found
    assert {name for name in found if not name.startswith("_")} <= collectives._COLLECTIVES[distributed_c10d.__name__]


def _waits(function: Any) -> bool:
    return "async_op" in inspect.signature(function).parameters


def test_without_a_process_group_no_thread_is_held_in_autograds_engine(monkeypatch):
    monkeypatch.setattr(collectives, "may_compute", lambda _: True)
    assert ThreadSampler(reports_stacks=True, rank=0, pause=lambda _: None).sample().collective is None


@pytest.mark.usefixtures("one_rank")
def test_a_thousand_samples_keep_nothing():
    sampler = ThreadSampler(reports_stacks=True, rank=0)
    for number in range(1000):
        frame = encode(sampler.sample().report(b"session0", number))
    assert decode(frame).number == 999
    assert set(vars(sampler)) == set(vars(ThreadSampler(reports_stacks=True, rank=0)))


# Collectives on a device, such as NCCL's: the host waits for them in a later call, such as `loss.item()`.


@pytest.fixture
def nccl(monkeypatch):
    """Two NCCL groups as torch reports them: the numbers of the latest started and the latest finished operation."""
    status = {"0": [5, 5], "1": [7, 6]}
    names = ("last_enqueued_collective", "last_completed_collective")

    def dump(includeCollectives, onlyActive):  # noqa: N803 - torch's names
        assert (includeCollectives, onlyActive) == (False, False)
        groups = {group: dict(zip(names, map(str, numbers), strict=True)) for group, numbers in status.items()}
        return json.dumps({"pg_status": groups, "version": "2.10"}).encode()

    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    return status


@pytest.fixture
def waiter(monkeypatch, nccl):  # noqa: ARG001 - for its effect
    """A user's thread in a call of C, like `loss.item()`; `move` lets it reach a similar call in the next line."""
    first, second = threading.Lock(), threading.Lock()
    with first, second:
        program = "def train():\n    first.acquire()\n    second.acquire()\ntrain()"
        run = partial(run_as, program, "/home/me/train.py", "__main__", first=first, second=second)
        thread = threading.Thread(target=run)
        thread.start()
        monkeypatch.setattr("client.diagnostics.sampler.main_frame", lambda: sys._current_frames().get(thread.ident))
        wait_until(lambda: line_of(thread) == 2)
        yield SimpleNamespace(move=lambda: (first.release(), wait_until(lambda: line_of(thread) == 3)))
    thread.join(60)


def line_of(thread):
    frame = sys._current_frames()[thread.ident]
    return frame.f_lineno if frame.f_code.co_name == "train" else 0


@pytest.fixture
def sampler():
    return ThreadSampler(reports_stacks=True, rank=0)


@pytest.mark.usefixtures("waiter")
def test_an_unmoved_process_during_an_nccl_operation_stalls(sampler):
    first = sampler.nccl_progress()
    assert first is not None
    assert sampler.nccl_progress() == first


def test_a_process_at_another_line_has_moved(sampler, waiter):
    before = sampler.nccl_progress()
    waiter.move()
    assert sampler.nccl_progress() != before


@pytest.mark.parametrize("now", [[8, 6], [8, 7]], ids=["has begun another", "has ended one"])
@pytest.mark.usefixtures("waiter")
def test_a_process_whose_operations_advance_has_moved(sampler, nccl, now):
    before = sampler.nccl_progress()
    nccl["1"] = now
    assert sampler.nccl_progress() != before


@pytest.mark.usefixtures("waiter")
def test_a_process_without_pending_operations_does_not_stall(sampler, nccl):
    """The process may compute for minutes in one call of C."""
    nccl["1"] = [7, 7]
    assert sampler.nccl_progress() is None


@pytest.mark.usefixtures("waiter")
def test_without_torchs_operation_log_no_process_stalls(sampler, monkeypatch):
    """Torch keeps no log if its settings say so, or if it is built without NCCL."""
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", lambda **_: b'{"version": "2.10"}')
    assert sampler.nccl_progress() is None
    monkeypatch.delattr(_distributed_c10d, "_dump_nccl_trace_json")
    assert sampler.nccl_progress() is None


@pytest.mark.usefixtures("one_rank")
def test_torchs_operation_log_has_the_expected_form():
    """Checked with operations of gloo, which torch logs in the same form."""
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        pytest.skip("this torch logs only NCCL's operations")
    distributed.all_reduce(torch.zeros(1))

    def has_ended():
        """Whether the log has the operation's end, which gloo's thread records after the caller continues."""
        status = json.loads(dump(includeCollectives=False))["pg_status"]
        # Groups of earlier tests are reported too, some with unfinished operations.
        begun, ended = (int(status[max(status, key=int)][newest]) for newest in collectives.NEWEST)
        return begun >= 1 and begun == ended

    wait_until(has_ended)
