"""smart_ddp(): DistributedDataParallel with synchronised layers, and with arguments for the model's device."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from client.nn.batchnorm import SynchronizedBatchNorm
from client.nn.conversion import convert_model
from client.tracebacks import api_boundary
from statsd_bn.environment import integer
from statsd_bn.errors import ConfigurationError
from statsd_bn.text import wrap

REFUSED_VERSION = "1.12.0"  # its DistributedDataParallel is broken (ultralytics/yolov5#8395)

# Buffers that a synchronised layer updates equally on all its ranks; subclasses may have others.
EQUAL_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@api_boundary
def smart_ddp(
    model: nn.Module, *, static_graph: bool = True, convert: bool = True, broadcast_buffers: bool | None = None
) -> DistributedDataParallel:
    """Wraps a model with synchronised batch norms in DistributedDataParallel.

    All processes call it, with the model on its device and the process group initialised. The synchronised layers look
    up their connection in each forward pass, so `client.connect` may be called before or after.

    At construction the wrapper broadcasts rank 0's buffers.

    Args:
        model: a model with all parameters on one device.
        static_graph: all steps use the same parameters in the same way, which allows reentrant checkpoints and is
            faster; in the first step no backward pass may run under `no_sync`. False for a changing graph: then each
            step searches for unused parameters.
        convert: apply `client.convert_model` first, with its defaults.
        broadcast_buffers: broadcast rank 0's buffers again before each forward pass, which is DistributedDataParallel's
            default. None: only if the model has buffers outside of layers that synchronise over all ranks,
            because the buffers of a batch norm that is not converted would diverge. Pass True under torch's `Join`: a
            rank with fewer batches receives the other ranks' buffers at the end.

    Raises:
        RuntimeError: torch is 1.12.0, or there is no process group.
        ValueError: no parameter requires a gradient, or the parameters are on several devices, or on another process's
            CUDA device; or an error of `convert_model`.
        ConfigurationError: the model is on a CUDA device, and `LOCAL_RANK` is not set.

    Warns:
        UserWarning: as `convert_model`.
    """
    if torch.__version__.partition("+")[0] == REFUSED_VERSION:  # or a local build of it, such as 1.12.0+cu113
        expected = f"expected any version but {REFUSED_VERSION}, whose DistributedDataParallel is broken"
        raise RuntimeError(wrap(f"torch: {expected}, got {torch.__version__}"))
    if not (distributed.is_available() and distributed.is_initialized()):
        text = "process group: expected an initialised one, got none; call torch.distributed.init_process_group() first"
        raise RuntimeError(wrap(text))
    arguments = arguments_for(_device_of(model), os.environ, static_graph=static_graph)
    if convert:
        model = convert_model(model)
    wrapper = DistributedDataParallel(model, **arguments)
    # Not as an argument: given False, older versions of torch omit the initial broadcast too.
    wrapper.broadcast_buffers = _may_differ(model) if broadcast_buffers is None else broadcast_buffers
    return wrapper


smart_DDP = smart_ddp  # noqa: N816 - YOLOv5's spelling


def arguments_for(device: torch.device, environ: Mapping[str, str], *, static_graph: bool) -> dict[str, Any]:
    """Returns the arguments of DistributedDataParallel for a model's device; a CUDA device must be `LOCAL_RANK`'s."""
    # Unless it searches for unused parameters, DistributedDataParallel waits for them (ultralytics/yolov5#10410).
    arguments: dict[str, Any] = {"static_graph": static_graph, "find_unused_parameters": not static_graph}
    if device.type != "cuda":
        return arguments
    local_rank = integer(environ, "LOCAL_RANK", -1)
    if local_rank < 0:
        raise ConfigurationError(
            f"LOCAL_RANK: expected the number of this process on its host, since the model is on {device}, got "
            f"{environ.get('LOCAL_RANK')!r}; torchrun sets it"
        )
    if device.index != local_rank:
        expected = f"expected its parameters on cuda:{local_rank}, the device of LOCAL_RANK {local_rank}"
        remedy = "call torch.cuda.set_device(LOCAL_RANK) and move the model there"
        raise ValueError(wrap(f"model: {expected}, got {device}; {remedy}"))
    return arguments | {"device_ids": [local_rank], "output_device": local_rank}


def _may_differ(model: nn.Module) -> bool:
    """Whether the model has buffers that may diverge between the ranks."""
    size = distributed.get_world_size()
    layers = [layer for layer in model.modules() if isinstance(layer, SynchronizedBatchNorm)]
    over_all = [layer for layer in layers if layer.group is None or getattr(layer.group, "size", 0) == size]
    equal = {id(getattr(layer, name)) for layer in over_all for name in EQUAL_BUFFERS}
    return any(id(buffer) not in equal for buffer in model.buffers())


def _device_of(model: nn.Module) -> torch.device:
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        got = f"expected a parameter with requires_grad, got none among {len(parameters)}"
        raise ValueError(wrap(f"model: {got}; a model without gradients needs no wrapper"))
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise ValueError(f"model: expected all parameters on one device, got {', '.join(devices)}")
    return parameters[0].device
