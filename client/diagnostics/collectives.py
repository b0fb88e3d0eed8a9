"""Collectives: whether the main thread is inside of a collective of torch, and how far this process is on its groups.

torch counts the operations that a process has begun on each process group, and all ranks of a group begin the same
ones in the same order. So the numbers of two ranks say which of them waits for the other. torch is never imported:
where nobody has loaded it, there is no collective.
"""

import json
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

from client.diagnostics import stack
from client.diagnostics.place import TorchGroup
from statsd_bn.messages import ALL_GATHER, ALL_REDUCE, BARRIER, BUFFERS

_C10D = "torch.distributed.distributed_c10d"
_C = "torch._C._distributed_c10d"
_DDP = "torch.nn.parallel.distributed"
_ENGINE = "torch.autograd.graph"

# What computes, or waits for other ranks in a collective that has no function of Python's. The forward pass of
# DistributedDataParallel finds out once in which order the ranks have their gradients, and so does a rank in torch's
# `Join` whose data has ended.
_MAY_WAIT = {_ENGINE: frozenset({"_engine_run_backward"}), _DDP: frozenset({"_pre_forward", "main_hook"})}

# What a thread is in while it waits for other ranks, by module: for all of a group. `recv` and the like wait for one
# rank, and which one nobody can see.
_COLLECTIVES = {
    _C10D: frozenset(
        {
            "all_gather",
            "all_gather_coalesced",
            "all_gather_into_tensor",
            "all_gather_object",
            "all_gather_single",
            "all_reduce",
            "all_reduce_coalesced",
            "all_to_all",
            "all_to_all_single",
            "barrier",
            "broadcast",
            "broadcast_object_list",
            "gather",
            "gather_into_tensor",
            "gather_object",
            "gather_single",
            "monitored_barrier",
            "reduce",
            "reduce_scatter",
            "reduce_scatter_single",
            "reduce_scatter_tensor",
            "scatter",
            "scatter_object_list",
        }
    ),
    # The last three are those of a rank in torch's `Join`, mostly of one whose data has ended.
    _DDP: frozenset(
        {"_sync_buffers", "_sync_module_states", "_match_all_reduce_for_bwd_pass", "_match_unused_params_allreduce"}
        | {"_check_global_requires_backward_grad_sync"}
    ),
    "torch.distributed.utils": frozenset({"_sync_module_states", "_verify_param_shape_across_processes"}),
}

# What kind those are that every rank is through with at about the same time, and the forward pass's broadcast of
# buffers, which its first rank is through with before the others.
_KINDS = {
    "barrier": BARRIER,
    "all_reduce": ALL_REDUCE,
    "all_reduce_coalesced": ALL_REDUCE,
    "all_gather": ALL_GATHER,
    "all_gather_coalesced": ALL_GATHER,
    "all_gather_into_tensor": ALL_GATHER,
    "all_gather_object": ALL_GATHER,
    "all_gather_single": ALL_GATHER,
    "_sync_buffers": BUFFERS,
}

# What these functions do themselves with objects, before and after the collective: pickling a large one takes long.
_WORK_OF_OBJECTS = frozenset({"_object_to_tensor", "_tensor_to_object"})

# The names under which these functions keep their process group.
_GROUP_NAMES = ("group", "process_group", "pg")

# How deep inside of a collective its own frames may be.
_DEEPEST = 12

# Ranks that can be told; a group with others is told as none.
_MOST_RANKS = 16_384

# Wrappers whose backward pass reduces gradients over their process group, as far as layers of ours are in them.
_wrappers: WeakSet[Any] = WeakSet()

# Set once a collective was given up that gloo still works on: its threads would hold up the end of the process.
abandoned = threading.Event()

# Where Linux says how long a thread has run: the first number, in nanoseconds.
_RUN_TIME = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that the main thread is inside of.

    Attributes:
        group: its process group; None if that cannot be seen.
        call: tells this call from any other; a new call of the same line is another one.
    """

    frame: FrameType
    group: TorchGroup | None
    call: tuple[object, ...]


def remember() -> None:
    """Notes the DistributedDataParallel whose forward pass is under way: its backward pass reduces over its group."""
    kind = getattr(sys.modules.get(_DDP), "DistributedDataParallel", None)
    wrapper = getattr(kind, "_active_ddp_module", None)
    if wrapper is not None:
        _wrappers.add(wrapper)


def current(innermost: FrameType | None) -> Collective | None:
    """Returns the collective that a thread is inside of, from the frame that it is in; None if it is in none.

    In the backward pass of DistributedDataParallel the thread waits in the engine of autograd, in no function of its
    own; see `may_compute` for this one and others like it.
    """
    if innermost is None:
        return None
    found = _collective_frame(innermost) or (innermost if may_compute(innermost) and _all() else None)
    if found is None:
        return None
    group = _group_of(found)
    return Collective(found, group, (id(found), found.f_lasti, *((one.name, one.launched) for one in groups())))


def is_collective(innermost: FrameType) -> bool:
    """Whether a frame is in a function that waits for all ranks of a group."""
    return _collective_frame(innermost) is not None


def is_of_training(collective: Collective) -> bool:
    """Whether it is one that a wrapped model begins by itself, in each training step."""
    return stack.module_of(collective.frame) in {_DDP, _ENGINE}


def kind_of(collective: Collective) -> str:
    """Returns the kind of a collective; empty if ranks may be through with it at very different times."""
    return _KINDS.get(collective.frame.f_code.co_name, "")


def may_compute(innermost: FrameType) -> bool:
    """Whether a thread may wait for other ranks where it is, or compute.

    It waits only while the process takes next to no processor time, see `client.diagnostics.look`.
    """
    return innermost.f_code.co_name in _MAY_WAIT.get(stack.module_of(innermost), ())


def groups() -> list[TorchGroup]:
    """Returns this process's process groups; empty where torch has none, or does not tell."""
    return [told for group in _all() if (told := _told(group))]


def group_named(name: str) -> TorchGroup | None:
    """Returns one of this process's process groups by torch's name for it; None if it has no such group."""
    return next((group for group in groups() if group.name == name), None)


def rank_in_torch() -> int | None:
    """Returns this process's rank in torch's default process group; None without such a group."""
    torchs = sys.modules.get(_C10D)
    # Asked in each round of a process without a connection, and mostly there is no such group.
    if torchs is None or getattr(getattr(torchs, "GroupMember", None), "WORLD", torchs) is None:
        return None
    try:
        rank = torchs.get_rank()
    except Exception:  # noqa: BLE001 - it is not loaded, or not initialised, or of an unknown version
        return None
    return rank if isinstance(rank, int) else None


def run_time() -> int | None:
    """Returns for how long the main thread has run, in nanoseconds of the processor; None where nobody says."""
    number = threading.main_thread().native_id
    try:
        return int((_RUN_TIME / str(number) / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def unfinished() -> tuple[tuple[str, int, int], ...]:
    """Returns the progress of this process's NCCL groups, if one of them has an unfinished operation.

    The host continues while such an operation runs, and waits for it in any call that reads a value from the device.
    torch's flight recorder counts the operations; in torch 2.11 it runs by default.

    Returns:
        For each group its number, and the numbers of its newest started and newest completed operation; empty if all
        have completed, or if there is no flight recorder.
    """
    with suppress(Exception):  # it is not loaded, has no NCCL or is of an unknown version
        dump = sys.modules[_C]._dump_nccl_trace_json  # noqa: SLF001 - torch says it nowhere else
        told = dump(includeCollectives=False, onlyActive=False)
        groups = tuple((name, *begun_and_ended(status)) for name, status in json.loads(told)["pg_status"].items())
        return groups if any(begun > ended for _, begun, ended in groups) else ()
    return ()


def begun_and_ended(status: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of the newest operations, from what torch's flight recorder tells of one group."""
    return int(status["last_enqueued_collective"]), int(status["last_completed_collective"])


def abort() -> None:
    """Has torch give up the collectives under way, so that they raise, where torch can do that: on NCCL.

    gloo's `abort` ends nothing that is under way, as of torch 2.13.
    """
    with suppress(Exception):
        module = sys.modules[_C10D]
        backends = [backend for backend, _ in module._world.pg_map.values()]  # noqa: SLF001 - torch says it nowhere else
        if any("nccl" in backend for backend in backends):
            module._abort_process_group()  # noqa: SLF001 - since torch 2.6


def _collective_frame(innermost: FrameType) -> FrameType | None:
    found = None
    for frame in islice(stack.frames(innermost), _DEEPEST):
        module = stack.module_of(frame)
        if not module.startswith("torch.") or frame.f_code.co_name in _WORK_OF_OBJECTS:
            break
        if frame.f_code.co_name in _COLLECTIVES.get(module, ()):
            found = frame  # the outermost says most
    return found


def _all() -> list[Any]:
    world = getattr(sys.modules.get(_C10D), "_world", None)
    # Another thread may make or end a group just now.
    with suppress(Exception):
        return list(world.pg_names) if world else []
    return []


def _group_of(frame: FrameType) -> TorchGroup | None:
    if stack.module_of(frame) == _ENGINE:
        # Nothing here says which: that of the wrappers, or the only one there is.
        found = _groups_of_wrappers() or groups()
        return found[0] if len(found) == 1 else None
    names = frame.f_locals
    group = next((names[name] for name in _GROUP_NAMES if names.get(name) is not None), None)
    if group is None and "self" in names:
        # A hook of torch's `Join` names its wrapper.
        group = getattr(names.get("ddp", names["self"]), "process_group", None)
    if group is None:
        group = _default()
    return _told(group)


def _groups_of_wrappers() -> list[TorchGroup]:
    with suppress(Exception):  # the main thread may make a wrapper just now
        found = (_told(wrapper.process_group) for wrapper in list(_wrappers))
        return list({group.name: group for group in found if group}.values())
    return []


def _default() -> Any:
    with suppress(Exception):
        return sys.modules[_C10D].GroupMember.WORLD
    return None


def _told(group: Any) -> TorchGroup | None:
    with suppress(Exception):
        world = sys.modules[_C10D]._world  # noqa: SLF001 - torch says it nowhere else
        ranks = tuple(sorted(world.pg_group_ranks[group]))
        if ranks[-1] < _MOST_RANKS:
            launched = int(group._get_sequence_number_for_group())  # noqa: SLF001 - as above
            return TorchGroup(str(world.pg_names[group]), ranks, launched, _has_one_backend(world, group))
    return None


def _has_one_backend(world: Any, group: Any) -> bool:
    """Whether a process group has the same backend for all devices, such as "cpu:gloo,cuda:gloo"."""
    with suppress(Exception):  # torch has told it so since 2.1
        return len({each.partition(":")[2] for each in str(world.pg_backend_config[group]).split(",")}) == 1
    return False
