"""The replication layer: registers the replicas that `nn.DataParallel` makes of a model.

After each replication every sub-module that has `__data_parallel_replicate__(ctx, copy_id)` is called, the master
copy (0) before any slave copy; the copies of one sub-module share one context. That is how the copies of a
synchronised layer find each other; a user's own modules may use it too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from client.data_parallel import any_device, sync_master
from client.data_parallel.barrier import Barrier
from client.session.current import current_connection
from client.session.protocol.member import DEFAULT_ROUND_TIMEOUT
from client.tracebacks import api_boundary
from statsd_bn.error_text import broken
from statsd_bn.errors import ConfigurationError


class CallbackContext:
    """What the copies of one sub-module share; modules may hang on it what they like.

    Attributes:
        barrier: where the replicas of this parallel forward pass meet, the same for all sub-modules.
    """

    def __init__(self, barrier: Barrier) -> None:
        self.barrier = barrier


def execute_replication_callbacks(modules: Sequence[nn.Module]) -> None:
    """Calls `__data_parallel_replicate__(ctx, copy_id)` on every sub-module of every replica that has it.

    Args:
        modules: the replicas of one module, in replica order.

    Raises:
        ConfigurationError: they are made inside a replica, and have synchronised layers in training.
    """
    connection = current_connection()
    timeout = DEFAULT_ROUND_TIMEOUT if connection is None else connection.member.round_timeout
    barrier = Barrier(len(modules), timeout)
    contexts = [CallbackContext(barrier) for _ in modules[0].modules()]
    for copy_id, module in enumerate(modules):
        vars(module)["_barrier"] = barrier
        with sync_master.slaves_of(barrier, copy_id):
            for context, submodule in zip(contexts, module.modules(), strict=True):
                callback = getattr(submodule, "__data_parallel_replicate__", None)
                if callback is not None:
                    callback(context, copy_id)


class DataParallelWithCallback(nn.DataParallel[Any]):
    """`nn.DataParallel` whose replicas know each other, so that synchronised layers work under it.

    Args:
        module: the model.
        device_ids: as for `nn.DataParallel`; any devices may be named, and one more than once:
            `["cpu"] * 4` or `["cuda:0", "cuda:0"]` make virtual replicas that share a device.
        output_device: where the outputs are gathered; default: the first device.
        dim: the dimension of the batch.

    Attributes:
        has_virtual_replicas: whether replicas share a device, or are on one that torch's own way does not know.
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
        """Splits the batch over the replicas.

        Raises:
            TypeError: a tracer of torch runs, which would see nothing of the replicas' threads.
        """
        if _is_traced(inputs, kwargs):
            raise TypeError(
                broken(
                    "DataParallelWithCallback: torch.jit.trace and torch.fx cannot record the threads of its replicas; "
                    "trace its module"
                )
            )
        if self.has_virtual_replicas:
            return any_device.scatter(inputs, kwargs or {}, device_ids, self.dim)
        return super().scatter(inputs, kwargs, device_ids)

    def replicate(self, module: nn.Module, device_ids: Any) -> list[nn.Module]:
        """Copies the module and calls the copies' replication callbacks.

        Raises:
            ConfigurationError: a part of it is compiled that has synchronised layers in training.
        """
        _check_is_not_compiled(module)
        make = any_device.replicate if self.has_virtual_replicas else super().replicate
        replicas = make(module, device_ids)
        execute_replication_callbacks(replicas)
        return replicas

    @api_boundary
    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Runs the replicas; an exception in one reaches its siblings at once and is the one raised."""
        return _parallel_apply(self, replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Joins the replicas' outputs."""
        if self.has_virtual_replicas:
            return any_device.gather(outputs, output_device, self.dim)
        return super().gather(outputs, output_device)


def patch_replication_callback(data_parallel: nn.DataParallel[Any]) -> None:
    """Teaches an existing `nn.DataParallel` what `DataParallelWithCallback` does.

    Args:
        data_parallel: the wrapped model; changed in place. One that can do so already stays as it is.

    Raises:
        TypeError: it is no `nn.DataParallel`.
    """
    if not isinstance(data_parallel, nn.DataParallel):
        raise TypeError(f"data_parallel: expected an nn.DataParallel, got {type(data_parallel).__name__}")
    if isinstance(data_parallel, DataParallelWithCallback) or "parallel_apply" in vars(data_parallel):
        return
    # Partials of module-level functions, not closures: they are copied and pickled with the module they belong to.
    data_parallel.replicate = partial(_replicate, data_parallel.replicate)  # type: ignore[method-assign]
    data_parallel.parallel_apply = partial(_parallel_apply, data_parallel)  # type: ignore[method-assign]


def _replicate(
    make_replicas: Callable[[nn.Module, Any], list[nn.Module]], module: nn.Module, device_ids: Any
) -> list[nn.Module]:
    _check_is_not_compiled(module)
    replicas = make_replicas(module, device_ids)
    execute_replication_callbacks(replicas)
    return replicas


def _is_traced(inputs: Any, kwargs: dict[str, Any] | None) -> bool:
    """Whether a tracer of torch runs; what torch.fx traces as a whole has one proxy for all of `inputs`."""
    if torch.jit.is_tracing() or isinstance(inputs, Proxy):  # type: ignore[attr-defined, no-untyped-call]
        return True
    return any(isinstance(each, Proxy) for each in (*inputs, *(kwargs or {}).values()))


def _check_is_not_compiled(module: nn.Module) -> None:
    """A copy of a compiled part would run the original, whose layers know nothing of replicas."""
    for name, part in module.named_modules():
        if _is_compiled(part) and any(map(_needs_replicas, part.modules())):
            raise ConfigurationError(
                broken(
                    f"replicas: expected nothing compiled in training, got {repr(name) if name else 'the model'} "
                    "compiled; its layers would not know the other replicas. Do not compile it, or train one process "
                    "per replica, which may be compiled"
                )
            )


def _is_compiled(module: nn.Module) -> bool:
    """Whether by `module.compile()`, by `torch.compile(module)`, or by `torch.compile(module.forward)` put into it."""
    if module._compiled_call_impl is not None or "_orig_mod" in module._modules:  # noqa: SLF001 - they have no public names
        return True
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def _needs_replicas(module: nn.Module) -> bool:
    return module.training and hasattr(module, "__data_parallel_replicate__")


@api_boundary
def _parallel_apply(
    data_parallel: nn.DataParallel[Any], replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
) -> list[Any]:
    devices = [_device(device) for device in data_parallel.device_ids[: len(replicas)]]
    barrier: Barrier = vars(replicas[0])["_barrier"]
    return any_device.parallel_apply(replicas, inputs, kwargs, devices, barrier.finish, barrier.fail)


def _device(device: int | str | torch.device) -> torch.device:
    """Returns the device with its index; a number means an accelerator's, as in torch."""
    found = torch.device(device)
    if found.type == "cpu" or found.index is not None:
        return found
    index = torch.cuda.current_device() if found.type == "cuda" else 0
    return torch.device(found.type, index)


def _needs_virtual_replicas(device_ids: Sequence[int | str | torch.device]) -> bool:
    """Torch's own way needs distinct accelerators. Without any it ignores their numbers."""
    if all(isinstance(device, int) for device in device_ids) and not torch.accelerator.is_available():
        return False
    devices = [_device(device) for device in device_ids]
    return len(set(devices)) < len(devices) or any(device.type in {"cpu", "mps"} for device in devices)
