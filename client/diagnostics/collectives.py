"""The collective of torch that the main thread is in, and this process's progress in each process group.

All ranks of a group launch the same operations in the same order, so torch's counts of two ranks show which one waits
for the other. This module never imports torch: in a process that has not imported it there are no collectives.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

from statsd_bn.messages import ALL_GATHER, ALL_REDUCE, BARRIER, BUFFERS

_C10D = "torch.distributed.distributed_c10d"
_C = "torch._C._distributed_c10d"
_DDP = "torch.nn.parallel.distributed"
_ENGINE = "torch.autograd.graph"

# Functions that compute, or wait in a collective that has no Python function: the backward pass, and two functions in
# which DistributedDataParallel agrees once on the order of the gradients (`main_hook` serves torch's `Join`).
_MAY_COMPUTE = {_ENGINE: frozenset({"_engine_run_backward"}), _DDP: frozenset({"_pre_forward", "main_hook"})}

# Functions that wait for all ranks of a group, by module. `recv` and the like wait for one rank, which is unknown. The
# last three of DistributedDataParallel belong to torch's `Join`, usually after the end of a rank's data.
_C10D_NAMES = """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier broadcast broadcast_object_list gather gather_into_tensor
    gather_object gather_single monitored_barrier reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor
    scatter scatter_object_list
"""
_DDP_NAMES = """
    _sync_buffers _sync_module_states _match_all_reduce_for_bwd_pass _match_unused_params_allreduce
    _check_global_requires_backward_grad_sync
"""
_COLLECTIVES = {
    _C10D: frozenset(_C10D_NAMES.split()),
    _DDP: frozenset(_DDP_NAMES.split()),
    "torch.distributed.utils": frozenset({"_sync_module_states", "_verify_param_shape_across_processes"}),
}

# The kinds of collectives, by the beginning of the function's name. All ranks leave the first three at about the same
# time. BUFFERS is the broadcast in DistributedDataParallel's forward pass; its source may leave it before the others.
_KINDS = {"barrier": BARRIER, "all_reduce": ALL_REDUCE, "all_gather": ALL_GATHER, "_sync_buffers": BUFFERS}

_PICKLING = frozenset({"_object_to_tensor", "_tensor_to_object"})  # around a collective; slow for large objects
_GROUP_NAMES = ("group", "process_group", "pg")  # the variables in which these functions keep their process group
NEWEST = ("last_enqueued_collective", "last_completed_collective")  # of a group in torch's flight recorder
_MAX_DEPTH = 12  # the largest number of frames inside of a collective
_MAX_FRAMES = 200  # the number of frames that are searched for the user's code
_MAX_RANKS = 16_384  # reports leave out process groups with this or a higher rank

# DistributedDataParallel modules with layers of this package: they reduce gradients over their own process group.
_wrappers: WeakSet[Any] = WeakSet()

# Set after a timeout in a collective of gloo: its threads still wait, and would block the end of the process.
abandoned = threading.Event()
_THREADS = Path("/proc/self/task")  # with each thread's processor time: the first number of `schedstat`, nanoseconds


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """This process's progress in a process group."""

    name: str  # torch's, the same on all ranks
    ranks: tuple[int, ...]
    launched: int  # number of operations started on it: all of them if `counts_all`, else only those of one backend
    counts_all: bool = True


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that the main thread is in; `call` differs between two calls from the same line."""

    frame: FrameType
    group: TorchGroup | None
    call: tuple[object, ...]

    @property
    def is_of_training(self) -> bool:
        """Whether it is part of each training step of a wrapped model."""
        return module_of(self.frame) in {_DDP, _ENGINE}

    @property
    def kind(self) -> str:
        """Its kind in `_KINDS`; empty for other collectives, which ranks may leave at very different times."""
        name = self.frame.f_code.co_name
        return next((kind for start, kind in _KINDS.items() if name.startswith(start)), "")


def frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and its callers, innermost first."""
    for _ in range(_MAX_FRAMES):
        if innermost is None:
            return
        yield innermost
        innermost = innermost.f_back


def module_of(frame: FrameType) -> str:
    """Returns the name of the module that defines a frame's function."""
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def record_ddp_wrapper() -> None:
    """Records the DistributedDataParallel that runs forward: its backward pass will reduce over its process group."""
    kind = getattr(sys.modules.get(_DDP), "DistributedDataParallel", None)
    wrapper = getattr(kind, "_active_ddp_module", None)
    if wrapper is not None:
        _wrappers.add(wrapper)


def current(innermost: FrameType | None) -> Collective | None:
    """Returns the collective that a thread is in, given its innermost frame; None if it is in none."""
    frame = innermost and collective_frame(innermost)
    # DistributedDataParallel reduces gradients without a Python function, inside autograd's `_engine_run_backward`.
    if innermost and frame is None and may_compute(innermost) and _process_groups():
        frame = innermost
    if frame is None:
        return None
    call = id(frame), frame.f_lasti, *((each.name, each.launched) for each in groups())
    return Collective(frame, _group_of(frame), call)


def collective_frame(innermost: FrameType) -> FrameType | None:
    """Returns the outermost frame of a function that waits for all ranks of a group; None if a thread is in none."""
    outermost = None
    for frame in islice(frames(innermost), _MAX_DEPTH):
        module = module_of(frame)
        if not module.startswith("torch.") or frame.f_code.co_name in _PICKLING:
            break
        if frame.f_code.co_name in _COLLECTIVES.get(module, ()):
            outermost = frame
    return outermost


def may_compute(innermost: FrameType) -> bool:
    """Whether a thread at this frame may compute as well as wait: only its processor time shows which."""
    return innermost.f_code.co_name in _MAY_COMPUTE.get(module_of(innermost), ())


def groups() -> list[TorchGroup]:
    """Returns this process's process groups; empty if torch has none or does not list them."""
    return [found for group in _process_groups() if (found := _torch_group(group))]


def rank_in_torch() -> int | None:
    """Returns this process's rank in torch's default process group; None without such a group."""
    c10d = sys.modules.get(_C10D)
    # The fast path: a process without a connection calls this in each round, usually without such a group.
    if c10d is None or getattr(getattr(c10d, "GroupMember", None), "WORLD", c10d) is None:
        return None
    try:
        rank = c10d.get_rank()
    except Exception:  # noqa: BLE001 - it is not loaded, or not initialised, or of an unknown version
        return None
    return rank if isinstance(rank, int) else None


def main_thread_time() -> int | None:
    """Returns the main thread's processor time in nanoseconds; None if the system does not report it."""
    number = threading.main_thread().native_id
    try:
        return int((_THREADS / str(number) / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def unfinished_operations() -> tuple[tuple[str, int, int], ...]:
    """Returns for each NCCL group its number, newest started and newest completed operation; empty if none is running.

    torch's flight recorder counts them, since torch 2.11 by default; without one the result is empty.
    """
    with suppress(Exception):  # it is not loaded, has no NCCL or is of an unknown version
        dump = sys.modules[_C]._dump_nccl_trace_json  # noqa: SLF001 - torch has no public name for it
        status = json.loads(dump(includeCollectives=False, onlyActive=False))["pg_status"]
        found = tuple((name, *(int(entry[newest]) for newest in NEWEST)) for name, entry in status.items())
        return found if any(started > completed for _, started, completed in found) else ()
    return ()


def abort() -> None:
    """Aborts the running collectives of NCCL, so that they raise; gloo's `abort` ends none, as of torch 2.13."""
    with suppress(Exception):
        module = sys.modules[_C10D]
        backends = [backend for backend, _ in module._world.pg_map.values()]  # noqa: SLF001 - no public name
        if any("nccl" in backend for backend in backends):
            module._abort_process_group()  # noqa: SLF001 - since torch 2.6


def _process_groups() -> list[Any]:
    world = getattr(sys.modules.get(_C10D), "_world", None)
    # Another thread may add or remove a group at the same time.
    with suppress(Exception):
        return list(world.pg_names) if world else []
    return []


def _group_of(frame: FrameType) -> TorchGroup | None:
    if module_of(frame) == _ENGINE:
        # The frame does not name the group: it is the wrappers' group, or the only one.
        found: list[TorchGroup | None] = []
        with suppress(Exception):  # the main thread may add a wrapper at the same time
            found = [_torch_group(wrapper.process_group) for wrapper in list(_wrappers)]
        candidates = list({group.name: group for group in found if group}.values()) or groups()
        return candidates[0] if len(candidates) == 1 else None
    names = frame.f_locals
    group = next((names[name] for name in _GROUP_NAMES if names.get(name) is not None), None)
    if group is None and "self" in names:
        # A hook of torch's `Join` refers to its wrapper.
        group = getattr(names.get("ddp", names["self"]), "process_group", None)
    if group is None:
        with suppress(Exception):
            group = sys.modules[_C10D].GroupMember.WORLD
    return _torch_group(group)


def _torch_group(group: Any) -> TorchGroup | None:
    with suppress(Exception):
        world = sys.modules[_C10D]._world  # noqa: SLF001 - torch has no public name for it
        ranks = tuple(sorted(world.pg_group_ranks[group]))
        if ranks[-1] < _MAX_RANKS:
            launched, backends = int(group._get_sequence_number_for_group()), []  # noqa: SLF001 - as above
            with suppress(Exception):  # another version; a group may have several backends: "cpu:gloo,cuda:nccl"
                backends = [each.partition(":")[2] for each in str(world.pg_backend_config[group]).split(",")]
            return TorchGroup(str(world.pg_names[group]), ranks, launched, len(set(backends)) == 1)
    return None
