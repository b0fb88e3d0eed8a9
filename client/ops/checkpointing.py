"""Recomputation: a forward pass that a checkpoint runs again must find what its first run found.

`torch.utils.checkpoint` frees activations and computes them again when backward needs them. The second run takes
place inside the autograd engine. It must neither move the running statistics again nor exchange again: the
other members may be elsewhere by then. So a call that runs inside the engine looks for the earlier call with its rows.
"""

import math
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from client.ops import findings
from client.ops.exchange import Exchange, present_turn
from client.ops.statistics import ChannelMoments
from client.transports.process_group import follows
from client.transports.transport import Transport
from statsd_bn.moments import Moments

# Nothing keeps the exchange of a reentrant checkpoint's first run, of a layer before the first parameter that learns,
# or of a compiled one. Pipelines have up to a few dozen micro-batches under way; an exchange holds four vectors per
# layer.
KEPT_WITHOUT_GRAPH = 32

# How far a recomputed sum may be from the first, relative to the largest of its vector: kernels that add in
# another order each time differ by rounding, another batch by far more.
TOLERANCE = 1e-3

# Which of two sums is nearer says nothing below this, float32's own rounding.
ROUNDING = 1e-7


def is_inside_backward() -> bool:
    """Whether the calling thread runs inside the autograd engine."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - has no public name


class Exchanges:
    """The calls that may be computed again, by the name of their layer."""

    def __init__(self) -> None:
        self._with_graph: defaultdict[str, WeakSet[Exchange]] = defaultdict(WeakSet)
        self._without_graph: OrderedDict[str, deque[Exchange]] = OrderedDict()  # the layer that was called last is last
        self._nr_without_graph = 0
        self._latest: dict[str, int] = {}
        self._lock = threading.Lock()

    def remember(self, exchange: Exchange, *, has_graph: bool) -> None:
        """Keeps a call as long as its graph lives, or, if it has none, until newer calls displace it."""
        with self._lock:
            if has_graph:
                if exchange.layer not in self._with_graph:
                    self._forget_layers_without_calls()
                self._with_graph[exchange.layer].add(exchange)
            else:
                self._keep(exchange)

    def _forget_layers_without_calls(self) -> None:
        for layer in [layer for layer, calls in self._with_graph.items() if not calls]:
            del self._with_graph[layer]

    def _keep(self, exchange: Exchange) -> None:
        """Keeps a call, and forgets the layer that was called least recently if it may be gone, with its model.

        It may be, once the others have been called so often that each could have replaced all that is kept of it.
        """
        layers = self._without_graph
        layers.setdefault(exchange.layer, deque(maxlen=KEPT_WITHOUT_GRAPH)).append(exchange)
        layers.move_to_end(exchange.layer)
        self._nr_without_graph += 1
        self._latest[exchange.layer] = self._nr_without_graph
        oldest = next(iter(layers))
        if self._nr_without_graph - self._latest[oldest] > KEPT_WITHOUT_GRAPH * len(layers):
            del layers[oldest], self._latest[oldest]

    def find(self, layer: str, transport: Transport, replica: int, moments: ChannelMoments) -> Exchange | None:
        """Returns the call of `layer` to which local replica number `replica` brought these moments, if there is one.

        Where several calls come near, as those of micro-batches may, it is the nearest. Calls that are equal here may
        not be so on another member: of equally near ones it is the one that was computed nearest to the asking node of
        autograd, among those that the node can mean; if that says nothing, the latest that waits to be computed again.
        Those that one node ran without nodes between, a compiled graph's, are found in the order of the program.
        """
        with self._lock:
            calls = [*self._with_graph.get(layer, ()), *self._without_graph.get(layer, ())]
        calls = [call for call in calls if call.transport == transport or follows(transport, call.transport)]
        node = _asking_node()
        near: list[tuple[float, float, bool, int, Exchange]] = [
            (
                0.0 if distance <= ROUNDING else distance,
                _distance_to(node, call),
                replica in call.computed_again,
                -call.number,
                call,
            )
            for call, distance in _distances(calls, replica, moments)
            if distance <= TOLERANCE
        ]
        if not near:
            return None
        nearest, *_, call = min(near)
        call = _first_beside(call, [other for distance, *_, other in near if distance == nearest])
        call.computed_again.add(replica)
        call.turns += present_turn()
        return call


def _first_beside(call: Exchange, near: list[Exchange]) -> Exchange:
    """Returns the call of the same node, a compiled graph's, that comes next in the order of the program.

    Two calls of one layer on an empty batch are such: they are equal here, and not on another member.
    """
    first = call.turns[0]
    if not first.is_inside_node or len(call.local) > 1:  # the numbers of replicas' threads say nothing
        return call
    beside = [other for other in near if other.turns[0] == first and len(other.local) == 1]
    return min(beside, key=lambda other: (len(other.turns), other.number))


def _asking_node() -> int | None:
    """Returns the sequence number of the node that wants something computed again; None outside of any."""
    node = torch._C._current_autograd_node()  # noqa: SLF001 - has no public name
    return None if node is None else int(node._sequence_nr())  # noqa: SLF001 - as above


def _distance_to(node: int | None, call: Exchange) -> float:
    """Returns how far the asking node is from a call, by sequence numbers; infinity if it cannot mean the call.

    What is inside another checkpoint is computed again for that one first, so a call may have been computed more than
    once. Replicas have threads of their own, whose numbers say nothing about the call's.
    """
    if node is None or len(call.local) > 1:
        return 0.0
    found = (turn.distance_to(node) for turn in call.turns)
    return min((distance for distance in found if distance is not None), default=math.inf)


def _distances(calls: list[Exchange], replica: int, moments: ChannelMoments) -> Iterator[tuple[Exchange, float]]:
    """Yields the calls that may be meant, and how far their moments are from these.

    Where moments stay on a device, the only call for an input of that shape is taken for the one, and a later call
    raises if it was not. Only if there are several the host has to look at their values, and waits for the device.
    """
    alike = [call for call in calls if _has_shape(call, replica, moments.shape)]
    if len(alike) == 1 and alike[0].capacity:
        findings.check_computed_again(alike[0].layer, alike[0].local[replica].vectors, moments.vectors, TOLERANCE)
        yield alike[0], 0.0
    elif alike:
        again = moments.on_host()
        for call in alike:
            yield call, _distance(call.local[replica].on_host(), again)


def _has_shape(call: Exchange, replica: int, shape: tuple[int, ...]) -> bool:
    return replica < len(call.local) and call.local[replica].shape == shape


def _distance(first: Moments, again: Moments) -> float:
    """Returns how far apart the sums are, relative to the largest of each vector; infinity if the counts differ."""
    if first.count != again.count:
        return np.inf
    before, now = np.nan_to_num(first.vectors), np.nan_to_num(again.vectors)
    largest = np.abs(before).max(axis=1, keepdims=True)
    return float((np.abs(before - now) / np.where(largest > 0, largest, 1.0)).max())


exchanges = Exchanges()


# Hooks for saved tensors, which a checkpoint has: what a thread does with what its nodes save for backward.
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_torchs: Any = torch._C._autograd  # noqa: SLF001 - `torch.autograd.graph` can add hooks, but not say whether there are any

# Torch 2.6 and 2.7 have no such function.
_top: Callable[[bool], _Hooks | None] | None = getattr(_torchs, "_top_saved_tensors_default_hooks", None)


def may_have_hooks() -> bool:
    """Whether hooks may see what the calling thread saves; always where torch cannot tell."""
    return _top is None or _top(True) is not None  # noqa: FBT003 - torch's way to ask outside of a trace too


@contextmanager
def without_hooks() -> Iterator[None]:
    """While it lasts, no hooks see what the calling thread saves, if torch can tell which there are."""
    hooks = []
    while _top is not None and (top := _top(True)) is not None:  # noqa: FBT003 - as above
        hooks.append(top)
        _torchs._pop_saved_tensors_default_hooks()  # noqa: SLF001 - as above
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _torchs._push_saved_tensors_default_hooks(pack, unpack)  # noqa: SLF001 - as above
