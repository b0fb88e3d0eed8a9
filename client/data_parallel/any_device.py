"""scatter, replicate, parallel_apply and gather for any devices.

torch's DataParallel needs distinct accelerators. These functions accept any list of devices: `["cpu"] * 4` makes four
replicas on a laptop. They follow torch's rules: replicas get chunks of the batch, replica 0 shares its buffers with the
module, and gradients flow back into the module's parameters.

Replicas run in pooled threads. Starting and joining a thread takes 80 µs, and recreating the threads that torch starts
for its operators in each thread takes milliseconds.
"""

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Device = torch.device
Task = Callable[[], None]

# pytree treats their unregistered subclasses as leaves.
CONTAINERS = (dict, list, tuple)

_thread = threading.local()


def scatter(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[Device], dim: int
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Split every tensor in `inputs` and `kwargs` along `dim`, and pass other values to all replicas.

    Returns:
        Positional and keyword arguments per replica; fewer than devices if the batch is smaller.
    """
    if inputs and not kwargs and all(isinstance(value, Tensor) for value in inputs):  # faster than pytree
        parts = list(zip(*(_split_leaf(value, devices, dim) for value in inputs), strict=False))
        return tuple(parts), tuple({} for _ in parts)
    if not pytree.tree_leaves((inputs, kwargs)):
        return (), ()
    arguments = _split((inputs, kwargs), devices, dim)
    return tuple(args for args, _ in arguments), tuple(keywords for _, keywords in arguments)


def _split(tree: Any, devices: Sequence[Device], dim: int) -> list[Any]:
    """Return a part per replica."""
    leaves, structure = pytree.tree_flatten(tree)
    parts = [_split_leaf(leaf, devices, dim) for leaf in leaves]
    replicas = min(map(len, parts), default=len(devices))
    return [pytree.tree_unflatten([part[replica] for part in parts], structure) for replica in range(replicas)]


def _split_leaf(leaf: Any, devices: Sequence[Device], dim: int) -> list[Any]:
    if isinstance(leaf, Tensor):
        chunks = leaf.chunk(len(devices), dim)
        return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=False)]
    if isinstance(leaf, CONTAINERS):
        return [type(leaf)(part) for part in _split(_builtin(leaf), devices, dim)]
    return [leaf] * len(devices)


def _builtin(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def replicate(module: nn.Module, devices: Sequence[Device]) -> list[nn.Module]:
    """Return a copy of `module` per device; gradients of all copies flow into `module`'s parameters.

    Copy 0 shares its buffers with `module`; changes of the other copies' buffers are lost.
    """
    parameters = list(module.parameters())
    copies = _CopyParameters.apply(devices, *parameters)
    size = len(parameters)
    replicas = []
    for number, device in enumerate(devices):
        own: dict[Tensor, Tensor] = dict(zip(parameters, copies[number * size : (number + 1) * size], strict=True))
        replicas.append(_replica(module, device, number, own, {}))
    return replicas


class _CopyParameters(torch.autograd.Function):
    """Copies all parameters to every device; backward adds the gradients in replica order.

    Autograd would add them in the order in which the replicas' threads built their graphs, which varies, so that the
    same training would give different bits each time.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[Device], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.devices = [parameter.device for parameter in parameters]
        copies = [parameter.detach().to(device) for device in devices for parameter in parameters]
        frozen = [parameter.requires_grad is False for parameter in parameters] * len(devices)
        ctx.mark_non_differentiable(*(copy for copy, still in zip(copies, frozen, strict=True) if still))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        size = len(ctx.devices)
        return None, *(_sum(gradients[place::size], device) for place, device in enumerate(ctx.devices))


def _sum(gradients: Sequence[Tensor | None], device: Device) -> Tensor | None:
    total = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient.to(device) if total is None else total + gradient.to(device)
    return total


def _replica(
    module: nn.Module,
    device: Device,
    number: int,
    copies: dict[Tensor, Tensor],
    replicas: dict[nn.Module, Any],
) -> Any:
    if module in replicas:
        return replicas[module]
    replica: Any = module._replicate_for_data_parallel()
    replicas[module] = replica
    # Recurrent layers record each parameter that is set. For other modules setattr is too slow.
    uses_setattr = type(module).__setattr__ is not nn.Module.__setattr__
    replica._former_parameters = OrderedDict()  # as in torch's replicas
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _replica(child, device, number, copies, replicas)
    for name, parameter in module._parameters.items():
        if parameter is None:
            replica._parameters[name] = None
        else:
            # As in torch, the copy is no Parameter.
            vars(replica)[name] = replica._former_parameters[name] = copies[parameter]
            if uses_setattr:
                setattr(replica, name, copies[parameter])
    for name, buffer in module._buffers.items():
        if buffer is not None:
            replica._buffers[name] = buffer.to(device, copy=number > 0)
    return replica


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[dict[str, Any]],
    devices: Sequence[Device],
    finish: Callable[[int], None],
    fail: Callable[[int, BaseException], None],
) -> list[Any]:
    """Run every replica in a separate thread, in the caller's grad, inference and autocast modes.

    The caller's thread runs none: thread-local state, such as the hooks of a checkpoint around the wrapper, must apply
    to all replicas or none.

    `finish` is called with the number of each replica that has finished, `fail` with the number and the error of each
    replica that raised.

    Raises:
        BaseException: the first that a replica raised, with a note that names the replica.
    """
    outputs: dict[int, Any] = {}
    failures: list[BaseException] = []
    modes = [_modes(device) for device in devices]
    nr_threads = torch.get_num_threads()

    def work(number: int) -> None:
        _thread.runs_replicas = True
        try:
            if torch.get_num_threads() != nr_threads:  # it was changed since the worker started
                torch.set_num_threads(nr_threads)
            with ExitStack() as stack:
                modes[number](stack)
                outputs[number] = replicas[number](*inputs[number], **kwargs[number])
            finish(number)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            error.add_note(f"in replica {number} on {devices[number]}")
            failures.append(error)
            fail(number, error)

    run_tasks([partial(work, number) for number in range(len(replicas))])
    if failures:
        raise failures[0]
    return [outputs[number] for number in range(len(replicas))]


def is_inside_replica() -> bool:
    """Whether the calling thread runs a replica of `parallel_apply`."""
    return getattr(_thread, "runs_replicas", False)


def _modes(device: Device) -> Callable[[ExitStack], None]:
    """Record the calling thread's modes; the result enters them in another thread, until its stack is closed."""
    device_type = device.type
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = _autocast(device_type)
    stream = torch.cuda.current_stream(device) if device_type == "cuda" else None

    def enter(stack: ExitStack) -> None:
        # Entering a mode costs more than checking it.
        if torch.is_inference_mode_enabled() != inference:
            stack.enter_context(torch.inference_mode(inference))  # first, because it sets the grad mode too
        if torch.is_grad_enabled() != grad:
            stack.enter_context(torch.set_grad_enabled(grad))
        if _autocast(device_type) != autocast:
            enabled, dtype, cache = autocast
            stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache))
        if stream is not None:
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(stream))

    return enter


def _autocast(device_type: str) -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )


def gather(outputs: Sequence[Any], device: Device, dim: int) -> Any:
    """Concatenate the replicas' outputs along `dim` on `device`; scalars become a vector.

    Raises:
        TypeError: an output is not a tensor, None, or a container of these.
        ValueError: the replicas' outputs differ in structure.
    """
    if all(isinstance(output, Tensor) for output in outputs):
        return _join(list(outputs), device, dim)
    flat = [pytree.tree_flatten(output) for output in outputs]
    structures = [structure for _, structure in flat]
    if any(structure != structures[0] for structure in structures):
        raise ValueError(f"outputs: expected the same structure from all replicas, got {structures}")
    joined = [_join(list(parts), device, dim) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
    return pytree.tree_unflatten(joined, structures[0])


def _join(parts: list[Any], device: Device, dim: int) -> Any:
    if all(part is None for part in parts):
        return None
    if isinstance(parts[0], CONTAINERS) and len({type(part) for part in parts}) == 1:
        return type(parts[0])(gather([_builtin(part) for part in parts], device, dim))
    if not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"outputs: expected tensors, got {sorted({type(part).__name__ for part in parts})}")
    with torch.autocast(device.type, enabled=False):  # keep the type
        if dim == 0 and all(part.dim() == 0 for part in parts):
            warnings.warn("the replicas returned scalars; they are gathered into a vector", stacklevel=2)
            return torch.stack([part.to(device) for part in parts])
        return torch.cat([part.to(device) for part in parts], dim)


class _Worker:
    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Task, threading.Lock]] = SimpleQueue()
        threading.Thread(target=self._work, name="statsd_bn replica", daemon=True).start()

    def start(self, task: Task) -> threading.Lock:
        """Start a task; the returned lock is released when the task has finished."""
        running = threading.Lock()
        running.acquire()
        self._tasks.put((task, running))
        return running

    def _work(self) -> None:
        while True:
            task, running = self._tasks.get()
            try:
                task()
                del task  # an idle worker must not keep the task's objects alive
                _idle_workers.append(self)
            finally:
                running.release()


_idle_workers: list[_Worker] = []  # append and pop are atomic: a lock could be held during a fork
os.register_at_fork(after_in_child=_idle_workers.clear)  # a forked child has the caller's thread only


def run_tasks(tasks: Sequence[Task]) -> None:
    """Run all tasks concurrently, each in a separate thread, and wait for them.

    Tasks must not raise. An exception ends that task's thread with a traceback, and no other.
    """
    for running in [_worker().start(task) for task in tasks]:
        running.acquire()


def _worker() -> _Worker:
    try:
        return _idle_workers.pop()
    except IndexError:
        return _Worker()
