"""smart_ddp(): DistributedDataParallel with the arguments that the model's device asks for, and synchronised layers."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from client.nn.conversion import convert as synchronised
from client.nn.layer import SynchronizedLayer
from client.tracebacks import api_boundary
from statsd_bn.environment import integer
from statsd_bn.error_text import broken
from statsd_bn.errors import ConfigurationError

# DistributedDataParallel is broken there (ultralytics/yolov5#8395).
REFUSED_VERSION = "1.12.0"

# Buffers that a synchronised layer moves alike on all its ranks; a subclass may have others.
EQUAL_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@api_boundary
def smart_ddp(
    model: nn.Module, *, static_graph: bool = True, convert: bool = True, broadcast_buffers: bool | None = None
) -> DistributedDataParallel:
    """Wraps a model in DistributedDataParallel, its batch norms synchronised.

    All processes call it, with the model on its device and the process group initialised. The synchronised layers find
    their connection in each forward pass, so `client.connect` may come before or after.

    The wrapper sends rank 0's buffers to the others when it is made.

    Args:
        model: with all parameters on one device.
        static_graph: every step computes with the same parameters in the same way, which lets checkpoints be
            reentrant and costs less; under `no_sync` the first step must synchronise each of its backward passes. False
            for a graph that changes: then each step looks for the parameters that it does not use.
        convert: `client.convert_model` the model first, with its defaults; False for a model that is to stay as it is.
        broadcast_buffers: send rank 0's buffers again before each forward pass, which is DistributedDataParallel's own
            default. None: only if the model has buffers other than those of layers that synchronise over all ranks,
            which are equal on all ranks anyway; a batch norm that is not converted would drift apart. True under
            torch's `Join`: a rank whose data ends early takes over the others' buffers at the end.

    Raises:
        RuntimeError: torch is 1.12.0, or there is no process group.
        ValueError: no parameter of the model learns, or they are on several devices, or on a CUDA device that is not
            this process's; or as `convert_model` says.
        ConfigurationError: the model is on a CUDA device, and `LOCAL_RANK` does not say which is this process's.

    Warns:
        UserWarning: as `convert_model`.
    """
    check_version(torch.__version__)
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            broken(
                "process group: expected an initialised one, got none; call torch.distributed.init_process_group() "
                "first"
            )
        )
    arguments = arguments_for(_device_of(model), os.environ, static_graph=static_graph)
    if convert:
        model = synchronised(model, stacklevel=4)  # the border's frame is between
    wrapper = DistributedDataParallel(model, **arguments)
    # Not as an argument: in older versions of torch that leaves out the broadcast at the beginning too.
    wrapper.broadcast_buffers = _may_differ(model) if broadcast_buffers is None else broadcast_buffers
    return wrapper


smart_DDP = smart_ddp  # noqa: N816 - YOLOv5 spells it so


def check_version(version: str) -> None:
    """Raises RuntimeError where torch is 1.12.0, or a local build of it such as 1.12.0+cu113."""
    if version.partition("+")[0] == REFUSED_VERSION:
        raise RuntimeError(
            broken(
                f"torch: expected any version but {REFUSED_VERSION}, whose DistributedDataParallel is broken, got "
                f"{version}"
            )
        )


def arguments_for(device: torch.device, environ: Mapping[str, str], *, static_graph: bool) -> dict[str, Any]:
    """Returns what DistributedDataParallel is to be told of a model on this device.

    Raises:
        ConfigurationError: the device is a CUDA one, and `environ` has no `LOCAL_RANK` of 0 or more.
        ValueError: the device is a CUDA one other than that of this number.
    """
    # A parameter that a step does not use is waited for, unless it was looked for (ultralytics/yolov5#10410).
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
        raise ValueError(
            broken(
                f"model: expected its parameters on cuda:{local_rank}, the device of LOCAL_RANK {local_rank}, got "
                f"{device}; call torch.cuda.set_device(LOCAL_RANK) and move the model there"
            )
        )
    return arguments | {"device_ids": [local_rank], "output_device": local_rank}


def _may_differ(model: nn.Module) -> bool:
    """Whether the model has buffers that may come to differ between the ranks."""
    layers = [layer for layer in model.modules() if isinstance(layer, SynchronizedLayer) and _is_over_all_ranks(layer)]
    equal = {id(getattr(layer, name)) for layer in layers for name in EQUAL_BUFFERS}
    return any(id(buffer) not in equal for buffer in model.buffers())


def _is_over_all_ranks(layer: SynchronizedLayer) -> bool:
    return layer.group is None or getattr(layer.group, "size", 0) == distributed.get_world_size()


def _device_of(model: nn.Module) -> torch.device:
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            broken(
                f"model: expected a parameter that learns, got {len(parameters)} parameters and none with "
                "requires_grad; without any there are no gradients to average, and the model needs no wrapper"
            )
        )
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise ValueError(f"model: expected all parameters on one device, got {', '.join(devices)}")
    return parameters[0].device
