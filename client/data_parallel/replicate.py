"""Replication callbacks, which connect the replicas that `nn.DataParallel` makes of a model.

Each replication calls `__data_parallel_replicate__(ctx, copy_id)` of every sub-module that has it, on the master copy
(0) before the slave copies. Synchronised layers get their barrier this way; users' modules may define the method too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from client.data_parallel import any_device, sync_master
from client.data_parallel.barrier import Barrier
from client.session.connection import current_connection
from client.session.protocol.member import DEFAULT_ROUND_TIMEOUT
from client.tracebacks import api_boundary
from statsd_bn.errors import ConfigurationError
from statsd_bn.text import wrap


class CallbackContext:
    """Context that the copies of one sub-module share; modules may set attributes on it.

    All sub-modules share `barrier`, the one of this parallel forward pass.
    """

    def __init__(self, barrier: Barrier) -> None:
        self.barrier = barrier


@api_boundary
def execute_replication_callbacks(modules: Sequence[nn.Module]) -> None:
    """Call `__data_parallel_replicate__(ctx, copy_id)` on every sub-module that has it, in every replica.

    Args:
        modules: replicas of one module, in replica order.

    Raises:
        ConfigurationError: the module is inside a replica already, and has synchronised layers in training.
    """
    connection = current_connection()
    timeout = DEFAULT_ROUND_TIMEOUT if connection is None else connection.member.round_timeout
    barrier = Barrier(len(modules), timeout)
    contexts = [CallbackContext(barrier) for _ in modules[0].modules()]
    for copy_id, module in enumerate(modules):
        vars(module)["_barrier"] = barrier
        token = sync_master.current_replica.set((barrier, copy_id))
        try:
            for context, submodule in zip(contexts, module.modules(), strict=True):
                if (callback := getattr(submodule, "__data_parallel_replicate__", None)) is not None:
                    callback(context, copy_id)
        finally:
            sync_master.current_replica.reset(token)


class DataParallelWithCallback(nn.DataParallel[Any]):
    """`nn.DataParallel` with replication callbacks, so that synchronised layers work in its replicas.

    Args:
        module: the model.
        device_ids: as for `nn.DataParallel`, but any devices, also repeated ones: `["cpu"] * 4` or
            `["cuda:0", "cuda:0"]` make virtual replicas that share a device.
        output_device: device of the gathered outputs; default: the first device.
        dim: dimension of the batch.

    Attributes:
        has_virtual_replicas: whether replicas share a device, or use one that torch's DataParallel does not support.
    """

    has_virtual_replicas: bool = False

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        self.has_virtual_replicas = _needs_virtual_replicas(device_ids or ())
        if not self.has_virtual_replicas:
            super().__init__(module, device_ids, output_device, dim)  # type: ignore[arg-type]
            return
        nn.Module.__init__(self)
        devices = [_device(device) for device in device_ids or ()]
        self.module = module
        self.dim = dim
        self.device_ids: list[Any] = devices
        self.src_device_obj = devices[0]
        self.output_device: Any = devices[0] if output_device is None else _device(output_device)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any) -> Any:
        """Split the batch over the replicas; raise TypeError under a tracer, which would not see their threads."""
        # The root of a torch.fx trace has one proxy for all of `inputs`.
        values = (inputs,) if isinstance(inputs, Proxy) else (*inputs, *(kwargs or {}).values())
        if torch.jit.is_tracing() or any(isinstance(each, Proxy) for each in values):  # type: ignore[attr-defined, no-untyped-call]
            tracers = "torch.jit.trace and torch.fx cannot record the threads of its replicas"
            raise TypeError(wrap(f"DataParallelWithCallback: {tracers}; trace its module"))
        if self.has_virtual_replicas:
            return any_device.scatter(inputs, kwargs or {}, device_ids, self.dim)
        return super().scatter(inputs, kwargs, device_ids)

    def replicate(self, module: nn.Module, device_ids: Any) -> list[nn.Module]:
        """Copy the module, which must not be compiled, and call the copies' replication callbacks."""
        return _replicate(any_device.replicate if self.has_virtual_replicas else super().replicate, module, device_ids)

    @api_boundary
    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas; an exception in one stops the others in their current or next layer, and is raised here."""
        return _parallel_apply(self, replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Concatenate the replicas' outputs."""
        if self.has_virtual_replicas:
            return any_device.gather(outputs, output_device, self.dim)
        return super().gather(outputs, output_device)


def patch_replication_callback(data_parallel: nn.DataParallel[Any]) -> None:
    """Make an existing `nn.DataParallel` behave like `DataParallelWithCallback`.

    It is changed in place, unless it has been patched already. TypeError is raised for other modules.
    """
    if not isinstance(data_parallel, nn.DataParallel):
        raise TypeError(f"data_parallel: expected an nn.DataParallel, got {type(data_parallel).__name__}")
    if isinstance(data_parallel, DataParallelWithCallback) or "parallel_apply" in vars(data_parallel):
        return
    # Partials of module-level functions, because closures cannot be pickled with the module.
    data_parallel.replicate = partial(_replicate, data_parallel.replicate)  # type: ignore[method-assign]
    data_parallel.parallel_apply = partial(_parallel_apply, data_parallel)  # type: ignore[method-assign]


def _replicate(
    make_replicas: Callable[[nn.Module, Any], list[nn.Module]], module: nn.Module, device_ids: Any
) -> list[nn.Module]:
    _check_is_not_compiled(module)
    replicas = make_replicas(module, device_ids)
    execute_replication_callbacks(replicas)
    return replicas


def _check_is_not_compiled(module: nn.Module) -> None:
    """Raise ConfigurationError for compiled parts with layers in training: each copy would run the original module."""
    for name, part in module.named_modules():
        if _is_compiled(part) and any(
            each.training and hasattr(each, "__data_parallel_replicate__") for each in part.modules()
        ):
            problem = "is compiled, and compiled layers cannot synchronise the replicas of one process"
            remedy = "do not compile it, or train one process per replica"
            raise ConfigurationError(wrap(f"{repr(name) if name else 'the model'} {problem}; {remedy}"))


def _is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()`, `torch.compile(module)` or `torch.compile(module.forward)` has compiled it."""
    if module._compiled_call_impl is not None or "_orig_mod" in module._modules:  # noqa: SLF001 - they have no public names
        return True
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


@api_boundary
def _parallel_apply(
    data_parallel: nn.DataParallel[Any], replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
) -> list[Any]:
    devices = [_device(device) for device in data_parallel.device_ids[: len(replicas)]]
    return any_device.parallel_apply(replicas, inputs, kwargs, devices, vars(replicas[0])["_barrier"])


def _device(device: int | str | torch.device) -> torch.device:
    """The device with its index; as in torch, a number means an accelerator."""
    device = torch.device(device)
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device() if device.type == "cuda" else 0)


def _needs_virtual_replicas(device_ids: Sequence[int | str | torch.device]) -> bool:
    """Whether torch's DataParallel cannot use these devices: it needs distinct accelerators."""
    if all(isinstance(device, int) for device in device_ids) and not torch.accelerator.is_available():
        return False
    devices = [_device(device) for device in device_ids]
    return len(set(devices)) < len(devices) or any(device.type in {"cpu", "mps"} for device in devices)
