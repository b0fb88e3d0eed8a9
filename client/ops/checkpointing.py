"""Recomputation: a forward pass that a checkpoint runs a second time uses the results of its first run.

The second run takes place during the backward pass. It must neither update the running statistics again nor exchange
again, since the other members may be in other rounds by then. So a call during a backward pass reuses the results of
the earlier call that had the same moments. Hooks for saved tensors, by which a checkpoint sees what a node saves, are
thread-local: one replica's thread computes for all replicas, without its own hooks.
"""

import math
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from client.ops.device_errors import check_recomputation
from client.ops.exchange import Exchange, current_position
from client.ops.statistics import ChannelMoments
from client.transports.process_group import switched_from_server
from client.transports.transport import Transport

# Number of cached calls without a graph for each layer: calls in the first run of a reentrant checkpoint, calls before
# the first trainable parameter, and compiled calls. A pipeline has up to a few dozen micro-batches in flight.
MAX_WITHOUT_GRAPH = 32

# The largest accepted difference of a recomputed sum, relative to the largest sum of its vector. Kernels that add in
# varying order round differently; the sums of another batch differ by far more. Calls within ROUNDING are equally near.
TOLERANCE, ROUNDING = 1e-3, 1e-7


def is_inside_backward() -> bool:
    """Whether autograd is running a backward pass in the calling thread."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - has no public name


class ExchangeCache:
    """The calls that may be recomputed, by layer name."""

    def __init__(self) -> None:
        self._with_graph: defaultdict[str, WeakSet[Exchange]] = defaultdict(WeakSet)
        self._without_graph: OrderedDict[str, deque[Exchange]] = OrderedDict()  # the layer with the latest call is last
        self._nr_without_graph = 0
        self._latest: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, exchange: Exchange, *, has_graph: bool) -> None:
        """Cache a call as long as its graph lives, or, without a graph, until newer calls replace it."""
        with self._lock:
            if not has_graph:
                self._add_without_graph(exchange)
                return
            if exchange.layer not in self._with_graph:
                for layer in [layer for layer, calls in self._with_graph.items() if not calls]:
                    del self._with_graph[layer]
            self._with_graph[exchange.layer].add(exchange)

    def _add_without_graph(self, exchange: Exchange) -> None:
        """Cache a call, and drop the layer that was called least recently if its model may be gone."""
        layers = self._without_graph
        layers.setdefault(exchange.layer, deque(maxlen=MAX_WITHOUT_GRAPH)).append(exchange)
        layers.move_to_end(exchange.layer)
        self._nr_without_graph += 1
        self._latest[exchange.layer] = self._nr_without_graph
        oldest = next(iter(layers))
        if self._nr_without_graph - self._latest[oldest] > MAX_WITHOUT_GRAPH * len(layers):
            del layers[oldest], self._latest[oldest]

    def find(self, layer: str, transport: Transport, replica: int, moments: ChannelMoments) -> Exchange | None:
        """The call of `layer` to which a local replica contributed these moments, if any.

        Of several similar calls, for example of micro-batches, the one with the nearest moments is returned. If several
        are equally near, the order is: nearest to the recomputing autograd node, not yet recomputed, latest.
        """
        with self._lock:
            calls = [*self._with_graph.get(layer, ()), *self._without_graph.get(layer, ())]
        calls = [
            call for call in calls if call.transport == transport or switched_from_server(transport, call.transport)
        ]
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001 - has no public name
        distances = dict(_distances(calls, replica, moments))
        nearest = min(distances.values(), default=math.inf)
        if nearest > TOLERANCE:
            return None
        near = [call for call, distance in distances.items() if distance <= max(nearest, ROUNDING)]
        call = min(near, key=lambda it: (_distance_to(node, it), replica in it.recomputed, -it.number))
        call = _first_of_node(call, near)
        call.recomputed.add(replica)
        call.positions += current_position()
        return call


exchange_cache = ExchangeCache()


def _first_of_node(call: Exchange, near: list[Exchange]) -> Exchange:
    """Return `call`, or of several calls with equal moments inside one node the next to recompute in program order."""
    first = call.positions[0]
    if not first.is_inside_node or len(call.local) > 1:  # as in `_distance_to`
        return call
    of_node = [other for other in near if other.positions[0] == first and len(other.local) == 1]
    return min(of_node, key=lambda other: (len(other.positions), other.number))


def _distance_to(node: Any, call: Exchange) -> float:
    """Distance of the recomputing node from a call, by sequence numbers; infinity if it cannot recompute that call."""
    if node is None or len(call.local) > 1:  # the threads of replicas number their nodes separately
        return 0.0
    number = node._sequence_nr()  # noqa: SLF001 - as above
    # A call inside a node is recomputed by that older node; any other call is recomputed by a newer node.
    distances = (nr - number if is_inside_node else number - nr + 1 for nr, is_inside_node in call.positions)
    return min((distance for distance in distances if distance > 0), default=math.inf)


def _distances(calls: list[Exchange], replica: int, moments: ChannelMoments) -> Iterator[tuple[Exchange, float]]:
    """Yield the calls with an input of this shape, each with the distance of its moments."""
    candidates = [call for call in calls if replica < len(call.local) and call.local[replica].shape == moments.shape]
    # A single candidate with moments on a device is assumed to match; a later call raises if it does not.
    if len(candidates) == 1 and candidates[0].capacity:
        (call,) = candidates
        check_recomputation(call.layer, call.local[replica].vectors, moments.vectors, TOLERANCE)
        yield call, 0.0
    else:
        for call in candidates:
            yield call, _distance(call.local[replica], moments)


def _distance(first: ChannelMoments, again: ChannelMoments) -> float:
    """Difference of the sums relative to each vector's largest sum; infinity if counts differ. Waits for devices."""
    if int(first.count) != int(again.count):
        return math.inf
    before, now = first.vectors.nan_to_num(), again.vectors.to(first.vectors.device).nan_to_num()
    largest = before.abs().amax(1, keepdim=True)
    return float(((before - now).abs() / torch.where(largest > 0, largest, 1.0)).max())


_autograd: Any = torch._C._autograd  # noqa: SLF001 - `torch.autograd.graph` can add hooks, but not list them

# Returns a thread's innermost hooks for saved tensors (they pack and unpack what nodes save for backward), or None.
# Torch 2.6 and 2.7 do not have it.
_top: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


def may_have_hooks() -> bool:
    """Whether hooks may apply to tensors that the calling thread saves; True where torch cannot list them."""
    return _top is None or _top(True) is not None  # noqa: FBT003 - list them during a trace as well


@contextmanager
def without_hooks() -> Iterator[None]:
    """Disable the calling thread's hooks for saved tensors, if torch can list them."""
    hooks = []
    while _top is not None and (top := _top(True)) is not None:  # noqa: FBT003 - as above
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001 - as above
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)  # noqa: SLF001 - as above
