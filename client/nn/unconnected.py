"""Warns once where a process is one of several and trains without a connection to the others."""

import gc
import logging
import os
from typing import Any

from torch import distributed

from client.nn.synchronized import Synchronized
from client.session import current
from client.transports.named_process_group import NamedProcessGroup

logger = logging.getLogger("statsd_bn.client")


class Unconnected:
    """Remembers whether it has warned."""

    def __init__(self) -> None:
        self._is_told = False
        self._launched: str | None = None

    def tell(self, layer: str) -> None:
        """Warns, the first time, if this process is one of several and has never been connected to them.

        The launcher says so, or torch's process group, which may be initialised later than the first forward pass.
        """
        if self._is_told or current.is_told_alone() or not (others := self._others()):
            return
        self._is_told = True
        if not current.has_been_connected():
            why, what = "this process is not connected", "call client.connect() before training"
        elif current.has_been_alone():
            why, what = "client.connect() heard of no others", "call it after init_process_group()"
        else:
            return
        logger.warning("%s, and %s: %s; %s", others, why, _with_others(layer), what)

    def _others(self) -> str:
        """Returns what says that there are other processes; "" if nothing does."""
        if self._launched is None:
            processes = os.environ.get("WORLD_SIZE", "")
            is_of_several = processes.isdecimal() and int(processes) > 1
            self._launched = f"WORLD_SIZE is {processes}" if is_of_several else ""
        if self._launched or not (distributed.is_available() and distributed.is_initialized()):
            return self._launched
        size = distributed.get_world_size()
        return f"torch's process group has {size} ranks" if size > 1 else ""


def _with_others(layer: str) -> str:
    """Names a layer, and says how many more of this process are trained the same way."""
    others = sum(map(_is_alone, gc.get_objects())) - 1
    if others < 1:
        return f"layer {layer!r} normalises its batch alone"
    return f"layer {layer!r} and {others} more normalise their batches alone"


def _is_alone(anything: object) -> bool:
    """Whether it is a layer in training that no process group of its own and no replicas synchronise.

    It goes by the type: `isinstance` would ask a proxy for its class, which may fail.
    """
    if not issubclass(type(anything), Synchronized):
        return False
    layer: Any = anything
    is_trained = getattr(layer, "training", False)  # one that is just being made does not have it yet
    return is_trained and layer._replica is None and not isinstance(layer.group, NamedProcessGroup)  # noqa: SLF001 - ours


unconnected = Unconnected()


def tell(layer: str) -> None:
    """Warns, see `Unconnected.tell`."""
    unconnected.tell(layer)


# torch.compile calls it while it traces a layer, and keeps nothing of it. As `torch.compiler.assume_constant_result`,
# which would load the compiler.
tell._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name
