"""The lazy layers: they learn their number of channels from their first input, as torch's do.

A lazy layer becomes an ordinary one in its first forward, by a hook that is bound to it and changes its class in place.
That same forward normalises: torch looks it up before the hook runs, so it has to be the synchronised one already.
"""

import torch
from torch import Tensor, nn

from client.nn.batchnorm import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
)
from client.nn.micro_batches import check_chunks
from client.nn.synchronized import check_eps_mode, twin_of
from client.session import groups
from client.session.groups import Group


class LazySynchronizedBatchNorm(nn.modules.batchnorm._LazyNormBase, SynchronizedBatchNorm):  # noqa: SLF001 - as there
    """What the three lazy layers share. Use `LazySynchronizedBatchNorm1d`, `2d` or `3d`.

    Args:
        eps: see `SynchronizedBatchNorm`, as the others.
        momentum: weight of the newest batch in the running statistics.
        affine: learn `weight` and `bias`.
        track_running_stats: keep running statistics for eval.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: learn `bias` where `affine`.
        eps_mode: "plus", "clamp" or None.
        group: with whom the layer synchronises.
        chunks: micro-batches per mini-batch.

    Raises:
        ValueError: `eps_mode` is neither "plus" nor "clamp", or `chunks` is below 1.
        ConfigurationError: `group` is neither None, "local" nor a `client.Group`.
        TypeError: `chunks` is not an int.
    """

    def __init__(
        self,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        eps_mode: str | None = None,
        group: Group | str | None = None,
        chunks: int = 1,
    ) -> None:
        check_eps_mode(eps_mode)
        groups.check(group)
        check_chunks(chunks)
        without_bias = {} if bias else {"bias": False}  # torch before 2.13 has no such argument
        super().__init__(eps, momentum, affine, track_running_stats, device, dtype, **without_bias)
        if eps_mode is not None:
            self.eps_mode = eps_mode
        self.group = group
        self.chunks = chunks

    def initialize_parameters(self, input: Tensor, mask: Tensor | None = None) -> None:  # noqa: A002, ARG002 - forward's
        """Gives parameters and buffers the shape (C,) of an `input` (N, C, *); it is given all that `forward` is."""
        super().initialize_parameters(input)


@twin_of(nn.LazyBatchNorm1d)
class LazySynchronizedBatchNorm1d(LazySynchronizedBatchNorm, nn.LazyBatchNorm1d):
    """A `SynchronizedBatchNorm1d` from its first forward on."""

    cls_to_become = SynchronizedBatchNorm1d


@twin_of(nn.LazyBatchNorm2d)
class LazySynchronizedBatchNorm2d(LazySynchronizedBatchNorm, nn.LazyBatchNorm2d):
    """A `SynchronizedBatchNorm2d` from its first forward on."""

    cls_to_become = SynchronizedBatchNorm2d


@twin_of(nn.LazyBatchNorm3d)
class LazySynchronizedBatchNorm3d(LazySynchronizedBatchNorm, nn.LazyBatchNorm3d):
    """A `SynchronizedBatchNorm3d` from its first forward on."""

    cls_to_become = SynchronizedBatchNorm3d
