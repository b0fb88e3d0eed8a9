"""scatter, replicate, parallel_apply and gather for any devices; torch's functions need distinct accelerators.

Replicas run in pooled threads: starting a thread takes 80 µs, and starting torch's threads in it takes milliseconds.
"""

import os
import threading
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from client.data_parallel.barrier import Barrier

Device = torch.device
Task = Callable[[], None]

CONTAINERS = (dict, list, tuple)

_thread = threading.local()


def scatter(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[Device], dim: int
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Return the arguments of each replica: a part of every tensor along `dim`, and all other values.

    If the batch is smaller than the number of devices, only the first devices get arguments.
    """
    arguments = _split((inputs, kwargs), devices, dim) if inputs or kwargs else []
    return tuple(args for args, _ in arguments), tuple(keywords for _, keywords in arguments)


def _split(value: Any, devices: Sequence[Device], dim: int) -> list[Any]:
    """Return a part per replica."""
    if isinstance(value, Tensor):
        chunks = value.chunk(len(devices), dim)
        return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=False)]
    if not (isinstance(value, CONTAINERS) and value):
        return [value] * len(devices)
    parts = [_split(value[key], devices, dim) for key in _keys(value)]
    return [_like(value, items) for items in zip(*parts, strict=False)]


def _keys(container: Any) -> Collection[Any]:
    return container.keys() if isinstance(container, dict) else range(len(container))


def _like(container: Any, items: Iterable[Any]) -> Any:
    """Return a container of the same class and keys with other items."""
    if isinstance(container, dict):
        pairs = dict(zip(container, items, strict=True))
        kind: Any = type(container)  # made by its constructor, since a subclass may hold the items as attributes too
        return kind(container.default_factory, pairs) if isinstance(container, defaultdict) else kind(pairs)
    is_namedtuple = hasattr(container, "_fields")
    return type(container)(*items) if is_namedtuple else type(container)(items)


def replicate(module: nn.Module, devices: Sequence[Device]) -> list[nn.Module]:
    """Copy `module` to each device. Copy 0 shares the module's buffers; the module's parameters get all gradients."""
    parameters = list(module.parameters())
    copies = _CopyParameters.apply(devices, *parameters)
    size = len(parameters)
    replicas = []
    for number, device in enumerate(devices):
        own: dict[Tensor, Tensor] = dict(zip(parameters, copies[number * size : (number + 1) * size], strict=True))
        replicas.append(_replica(module, device, own, is_first=number == 0))
    return replicas


class _CopyParameters(torch.autograd.Function):
    """Copies all parameters to every device; backward adds the gradients in replica order.

    Autograd would add them in the order in which the replicas' threads built their graphs, which varies.
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
    moved = [gradient.to(device) for gradient in gradients if gradient is not None]
    return sum(moved[1:], moved[0]) if moved else None


def _replica(module: nn.Module, device: Device, copies: dict[Tensor, Tensor], *, is_first: bool) -> Any:
    replicas: dict[nn.Module, Any] = {part: part._replicate_for_data_parallel() for part in module.modules()}
    for part, replica in replicas.items():
        replica._modules.update({name: replicas[child] for name, child in part._modules.items() if child is not None})
        replica._former_parameters = OrderedDict()  # as in torch's replicas
        # Recurrent layers record each parameter that is set. For other modules setattr is too slow.
        uses_setattr = type(part).__setattr__ is not nn.Module.__setattr__
        for name, parameter in part._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
                continue
            # As in torch, the copy is no Parameter.
            vars(replica)[name] = replica._former_parameters[name] = copies[parameter]
            if uses_setattr:
                setattr(replica, name, copies[parameter])
        for name, buffer in part._buffers.items():
            if buffer is not None:
                replica._buffers[name] = buffer.to(device, copy=not is_first)
    return replicas[module]


def parallel_apply(
    replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any], devices: list[Device], barrier: Barrier
) -> list[Any]:
    """Run every replica in a separate thread, in the caller's grad, inference and autocast modes.

    The caller's thread runs no replica: thread-local state, such as the hooks of a checkpoint around the wrapper, must
    apply to all replicas or none.
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
                for mode in modes[number]:
                    stack.enter_context(mode)
                outputs[number] = replicas[number](*inputs[number], **kwargs[number])
            barrier.finish(number)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            error.add_note(f"in replica {number} on {devices[number]}")
            failures.append(error)
            barrier.fail(number, error)

    run_tasks([partial(work, number) for number in range(len(replicas))])
    if failures:
        raise failures[0]
    return [outputs[number] for number in range(len(replicas))]


def is_inside_replica() -> bool:
    """Whether the calling thread runs a replica of `parallel_apply`."""
    return getattr(_thread, "runs_replicas", False)


def _modes(device: Device) -> list[AbstractContextManager[Any]]:
    """The calling thread's modes that differ from a new thread's, to be entered in another thread."""
    modes: list[AbstractContextManager[Any]] = [torch.set_grad_enabled(torch.is_grad_enabled())]
    if torch.is_inference_mode_enabled():
        modes.insert(0, torch.inference_mode())  # first, because it sets the grad mode too
    if torch.is_autocast_enabled(device.type):
        dtype, has_cache = torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()
        modes.append(torch.autocast(device.type, dtype, cache_enabled=has_cache))
    if device.type == "cuda":
        modes += [torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device))]
    return modes


def gather(outputs: Sequence[Any], device: Device, dim: int) -> Any:
    """Concatenate tensors, None, or equal containers of these, along `dim` on `device`; scalars become a vector."""
    if all(isinstance(output, Tensor) for output in outputs):
        return _concatenate(outputs, device, dim)
    if all(output is None for output in outputs):
        return None
    if not any(isinstance(output, CONTAINERS) for output in outputs):
        raise TypeError(f"outputs: expected tensors, got {sorted({type(output).__name__ for output in outputs})}")
    structures = list(map(_structure, outputs))
    if any(structure != structures[0] for structure in structures):
        raise ValueError(f"outputs: expected the same structure from all replicas, got {structures}")
    parts = [[output[key] for output in outputs] for key in _keys(outputs[0])]
    return _like(outputs[0], [gather(part, device, dim) for part in parts])


def _structure(output: Any) -> str:
    name = type(output).__name__
    return f"{name} of {sorted(map(str, _keys(output)))}" if isinstance(output, CONTAINERS) else name


def _concatenate(parts: Sequence[Tensor], device: Device, dim: int) -> Tensor:
    with torch.autocast(device.type, enabled=False):  # keep the type
        if dim == 0 and all(part.dim() == 0 for part in parts):
            warnings.warn("the replicas returned scalars; they are gathered into a vector", stacklevel=2)
            return torch.stack([part.to(device) for part in parts])
        return torch.cat([part.to(device) for part in parts], dim)


# The queue of each idle worker. Append and pop are atomic, without a lock that a fork could leave locked.
_idle_workers: list["SimpleQueue[tuple[Task, threading.Lock]]"] = []
os.register_at_fork(after_in_child=_idle_workers.clear)  # a forked child has the caller's thread only


def run_tasks(tasks: Sequence[Task]) -> None:
    """Run all tasks concurrently, each in a separate thread, and wait for them; they must not raise."""
    for running in [_start(task) for task in tasks]:
        running.acquire()


def _start(task: Task) -> threading.Lock:
    """Start a task in a worker; the returned lock is released when the task has finished."""
    try:
        queue = _idle_workers.pop()
    except IndexError:
        queue = SimpleQueue()
        threading.Thread(target=_work, args=(queue,), name="statsd_bn replica", daemon=True).start()
    running = threading.Lock()
    running.acquire()
    queue.put((task, running))
    return running


def _work(queue: "SimpleQueue[tuple[Task, threading.Lock]]") -> None:
    while True:
        task, running = queue.get()
        try:
            task()
            del task  # an idle worker must not keep the task's objects alive
            _idle_workers.append(queue)
        finally:
            running.release()
