"""Replicas that may share a device: what torch's DataParallel does around its modules, for any devices.

Torch's own scatter, replicate, parallel_apply and gather need distinct accelerators. These take any list of devices, so
that `["cpu"] * 4` makes four replicas on a laptop; they follow torch's rules (chunks of the batch, replica 0 shares
its buffers with the module, gradients flow back into the module's parameters).
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from client.data_parallel import thread_pool

Device = torch.device

# Classes derived from these are leaves to pytree, which knows only those that are registered with it.
CONTAINERS = (dict, list, tuple)

_thread = threading.local()


def scatter(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[Device], dim: int
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Splits every tensor in `inputs` and `kwargs` along `dim`; everything else goes to all replicas.

    Returns:
        Positional and keyword arguments per replica; fewer than devices if the batch is smaller.
    """
    if inputs and not kwargs and all(isinstance(value, Tensor) for value in inputs):  # walking trees is slow
        parts = list(zip(*(_split_leaf(value, devices, dim) for value in inputs), strict=False))
        return tuple(parts), tuple({} for _ in parts)
    if not pytree.tree_leaves((inputs, kwargs)):
        return (), ()
    arguments = _split((inputs, kwargs), devices, dim)
    return tuple(args for args, _ in arguments), tuple(keywords for _, keywords in arguments)


def _split(tree: Any, devices: Sequence[Device], dim: int) -> list[Any]:
    """Returns a part per replica."""
    leaves, structure = pytree.tree_flatten(tree)
    parts = [_split_leaf(leaf, devices, dim) for leaf in leaves]
    replicas = min(map(len, parts), default=len(devices))
    return [pytree.tree_unflatten([part[replica] for part in parts], structure) for replica in range(replicas)]


def _split_leaf(leaf: Any, devices: Sequence[Device], dim: int) -> list[Any]:
    if isinstance(leaf, Tensor):
        chunks = leaf.chunk(len(devices), dim)
        return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=False)]
    if isinstance(leaf, CONTAINERS):
        return [type(leaf)(part) for part in _split(_plain(leaf), devices, dim)]
    return [leaf] * len(devices)


def _plain(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def replicate(module: nn.Module, devices: Sequence[Device]) -> list[nn.Module]:
    """Returns a copy of `module` per device; gradients of all copies flow into `module`'s parameters.

    Copy 0 shares its buffers with `module`; the others' buffers are their own and are forgotten.
    """
    parameters = list(module.parameters())
    copies = _Copies.apply(devices, *parameters)
    size = len(parameters)
    return [
        _replica(
            module,
            device,
            number,
            dict(zip(parameters, copies[number * size : (number + 1) * size], strict=True)),
            {},
        )
        for number, device in enumerate(devices)
    ]


class _Copies(torch.autograd.Function):
    """Every device's copies of all parameters; backward adds their gradients in replica order.

    Left to autograd, the order would be that in which the replicas' threads happened to build their graphs, and
    the same training would end in other bits each time.
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
    made: dict[nn.Module, Any],
) -> Any:
    if module in made:
        return made[module]
    replica: Any = module._replicate_for_data_parallel()
    made[module] = replica
    # Recurrent layers notice a parameter that is set, and keep it in a list; for others that takes too long.
    notices = type(module).__setattr__ is not nn.Module.__setattr__
    replica._former_parameters = OrderedDict()  # where torch's replicas keep them
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _replica(child, device, number, copies, made)
    for name, parameter in module._parameters.items():
        if parameter is None:
            replica._parameters[name] = None
        else:
            # The copy is no Parameter: as in torch, replicas have none of their own.
            vars(replica)[name] = replica._former_parameters[name] = copies[parameter]
            if notices:
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
    """Runs every replica in a thread of its own, in the caller's grad, inference and autocast modes.

    None runs in the caller's thread, not even the first: what is bound to that thread, as the hooks of a checkpoint
    around the wrapper, must find all replicas or none.

    Args:
        replicas: the modules.
        inputs: positional arguments per replica.
        kwargs: keyword arguments per replica.
        devices: where each runs.
        finish: told which replica is through.
        fail: told which replica raised what.

    Raises:
        BaseException: the first that a replica raised, with a note that says which replica it was.
    """
    outputs: dict[int, Any] = {}
    failures: list[BaseException] = []
    modes = [_modes(device) for device in devices]
    nr_threads = torch.get_num_threads()

    def work(number: int) -> None:
        _thread.runs_replicas = True
        try:
            if torch.get_num_threads() != nr_threads:  # the worker is older than the number
                torch.set_num_threads(nr_threads)
            with ExitStack() as stack:
                modes[number](stack)
                outputs[number] = replicas[number](*inputs[number], **kwargs[number])
            finish(number)
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            error.add_note(f"in replica {number} on {devices[number]}")
            failures.append(error)
            fail(number, error)

    thread_pool.run([partial(work, number) for number in range(len(replicas))])
    if failures:
        raise failures[0]
    return [outputs[number] for number in range(len(replicas))]


def is_inside_replica() -> bool:
    """Whether the calling thread is one in which `parallel_apply` runs a replica."""
    return getattr(_thread, "runs_replicas", False)


def _modes(device: Device) -> Callable[[ExitStack], None]:
    """Reads the calling thread's modes; the result enters them in another thread, until the stack is closed."""
    kind = device.type
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = _autocast(kind)
    stream = torch.cuda.current_stream(device) if kind == "cuda" else None

    def enter(stack: ExitStack) -> None:
        # The thread is in most of them already, and to enter one costs more than to ask.
        if torch.is_inference_mode_enabled() != inference:
            stack.enter_context(torch.inference_mode(inference))  # it sets the grad mode too, so it comes first
        if torch.is_grad_enabled() != grad:
            stack.enter_context(torch.set_grad_enabled(grad))
        if _autocast(kind) != autocast:
            enabled, dtype, cache = autocast
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
        if stream is not None:
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(stream))

    return enter


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def gather(outputs: Sequence[Any], device: Device, dim: int) -> Any:
    """Joins the replicas' outputs along `dim` on `device`; scalars become a vector.

    Raises:
        TypeError: an output is neither tensor nor None nor a container of these.
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
        return type(parts[0])(gather([_plain(part) for part in parts], device, dim))
    if not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"outputs: expected tensors, got {sorted({type(part).__name__ for part in parts})}")
    with torch.autocast(device.type, enabled=False):  # joining changes no type
        if dim == 0 and all(part.dim() == 0 for part in parts):
            warnings.warn("the replicas returned scalars; they are gathered into a vector", stacklevel=2)
            return torch.stack([part.to(device) for part in parts])
        return torch.cat([part.to(device) for part in parts], dim)
