"""The autograd function: all local replicas in, all outputs out, one exchange each way.

One node for all replicas of a process, because CPU autograd walks the graph in one thread: a node per replica
would wait for a sibling that is behind it in the same thread, for ever.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from client import kernels
from client.kernels import Statistics
from client.pipe import Pipe
from statsd_bn.messages import BACKWARD, RoundKey, Rows
from statsd_bn.moments import Moments
from statsd_bn.reduction import FloatArray


@dataclass(frozen=True, slots=True)
class Slice:
    """What one replica brings: its input (N, C, *) and its copies of weight and bias, (C,) or None."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None


@dataclass(slots=True)
class Exchange:
    """One layer's call: how it reaches the others, what they know together, and which rounds it has had."""

    pipe: Pipe
    layer: str
    eps: float
    eps_mode: str
    moments: Moments | None = None
    key: RoundKey | None = None
    walks: Counter[str] = field(default_factory=Counter)

    def backward_key(self, phase: str) -> RoundKey:
        """Returns the key of the next round of `phase`: a graph that is kept may be walked more than once."""
        assert self.key is not None  # noqa: S101 - forward has set it
        self.walks[phase] += 1
        walk = self.walks[phase]
        return replace(self.key, phase=phase if walk == 1 else f"{phase} {walk}")


def batch_norm(slices: list[Slice], exchange: Exchange) -> tuple[list[Tensor], Moments]:
    """Normalises the local replicas' slices with the statistics of the whole batch.

    Args:
        slices: one per local replica, in replica order.
        exchange: a fresh one for this call.

    Returns:
        An output per slice, and the moments of the whole batch, from which every replica updates its running
        statistics with the same numbers.

    Raises:
        ValueError: the whole batch has one value per channel.
        StatsdBNError: the exchange failed; most kinds are RoundFailed.
    """
    outputs = _SynchronizedBatchNorm.apply(
        exchange,
        *(slice_.input for slice_ in slices),
        *(slice_.weight for slice_ in slices),
        *(slice_.bias for slice_ in slices),
    )
    assert exchange.moments is not None  # noqa: S101 - forward has set it, or raised
    return list(outputs), exchange.moments


class _SynchronizedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Any) -> tuple[Tensor, ...]:
        inputs, weights, biases = _thirds(tensors)
        measured = [kernels.moments(x) for x in inputs]
        rows = Rows(tuple(moments.count for moments in measured), np.stack([moments.vectors for moments in measured]))
        aggregate = exchange.pipe.run_slave(rows)
        exchange.key = aggregate.key
        exchange.moments = Moments.from_vectors(aggregate.count, aggregate.values)
        _check_count(aggregate.count, exchange.layer, inputs[0])
        if aggregate.count == 0:
            statistics = Statistics(1, *np.zeros((3, inputs[0].shape[1])))
        else:
            statistics = Statistics.of(exchange.moments, exchange.eps, exchange.eps_mode)
        ctx.save_for_backward(*inputs, *weights)
        ctx.exchange, ctx.statistics = exchange, statistics
        return tuple(
            kernels.normalise(x, statistics, weight, bias)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        replicas = len(grads)
        inputs, weights = ctx.saved_tensors[:replicas], ctx.saved_tensors[replicas:]
        statistics: Statistics = ctx.statistics
        local = [kernels.backward_sums(grad, x, statistics) for grad, x in zip(grads, inputs, strict=True)]
        input_grads = _input_gradients(ctx, grads, inputs, weights, np.stack(local))
        weight_grads = [
            _parameter_gradient(sums[1] * statistics.invstd, weight)
            for sums, weight in zip(local, weights, strict=True)
        ]
        bias_grads = [_parameter_gradient(sums[0], weight) for sums, weight in zip(local, weights, strict=True)]
        return None, *input_grads, *weight_grads, *bias_grads


def _input_gradients(
    ctx: Any,
    grads: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor | None, ...],
    local: FloatArray,
) -> list[Tensor | None]:
    """Only the input's gradient needs the other replicas; parameters keep their local sums, as under DDP."""
    if not any(ctx.needs_input_grad[1 : 1 + len(inputs)]):
        return [None] * len(inputs)
    counts = tuple(x.numel() // x.shape[1] for x in inputs)
    aggregate = ctx.exchange.pipe.run_slave(Rows(counts, local), ctx.exchange.backward_key(BACKWARD))
    return [
        kernels.input_gradient(grad, x, ctx.statistics, aggregate.values, weight)
        for grad, x, weight in zip(grads, inputs, weights, strict=True)
    ]


def _parameter_gradient(values: FloatArray, like: Tensor | None) -> Tensor | None:
    return None if like is None else torch.from_numpy(values).to(like.dtype).to(like.device)


def _check_count(count: int, layer: str, x: Tensor) -> None:
    if count == 1:
        raise ValueError(
            f"layer {layer!r}: expected more than 1 value per channel over all replicas when training, got 1 "
            f"(this replica's input has shape {tuple(x.shape)})"
        )


def _thirds(tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    size = len(tensors) // 3
    return tensors[:size], tensors[size : 2 * size], tensors[2 * size :]
