"""SynchronizedBatchNorm and its 1d, 2d and 3d: torch's batch norm, over all replicas of the job.

A layer is an `nn.BatchNorm*d` in every respect (parameters, buffers, state_dict, eval), and in training, when there
is anybody to synchronise with, it normalises with the statistics of the whole batch. It holds no connection: it
asks for the process's current one each time, so copies, pickles and forks of it are harmless.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from client.autograd.checkpointing import exchanges, is_inside_backward
from client.autograd.exchange import Exchange
from client.autograd.functional import Slice, batch_norm, held
from client.connection import groups
from client.connection.current import current_connection
from client.connection.groups import Group
from client.data_parallel import any_device
from client.kernels import dispatch
from client.lanes.choose import lane_for
from client.lanes.in_process import LocalPipe
from client.lanes.lane import Lane
from client.layers import custom_op, input_checks, running_stats, unsynchronized
from client.layers.convert import convert
from client.layers.micro_batches import Deferred, check_chunks
from client.layers.synchronized import Synchronized, twin_of
from client.layers.unconnected import unconnected
from statsd_bn.errors import ConfigurationError
from statsd_bn.moments import Moments

EPS_MODES = ("plus", "clamp")

_unnamed = itertools.count()


def check_eps_mode(eps_mode: str) -> None:
    """Raises ValueError where `eps_mode` is not one of `EPS_MODES`."""
    if eps_mode not in EPS_MODES:
        raise ValueError(f"eps_mode: expected one of {EPS_MODES}, got {eps_mode!r}")


@twin_of(nn.SyncBatchNorm)
class SynchronizedBatchNorm(nn.modules.batchnorm._BatchNorm, Synchronized):  # noqa: SLF001 - as torch's own
    """What the layers share, and by itself the twin of `torch.nn.SyncBatchNorm`, for input of any dimension.

    Args:
        num_features: C, the channels.
        eps: keeps the inverse standard deviation finite.
        momentum: weight of the newest batch in the running statistics; None for a cumulative average.
        affine: learn `weight` and `bias`, each of shape (C,).
        track_running_stats: keep running statistics for eval; without them eval uses those of its own batch, alone.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: learn `bias` where `affine`.
        eps_mode: "plus" for (var + eps)^-1/2, as torch; "clamp" for max(var, eps)^-1/2 of synchronised batches.
        group: with whom the layer synchronises: None for the whole job, "local" for the members of this host, or a
            `client.Group`.
        chunks: micro-batches per mini-batch. Each call in training is normalised by itself, and the running statistics
            move once after `chunks` of them, towards those of all their values together; where a mini-batch has
            fewer, by `commit_running_statistics`.
        process_group: None, for `torch.nn.SyncBatchNorm`'s sake.

    Attributes:
        layer_name: the layer's name on the wire, the same on every member. `convert_model` sets it to the place in the
            model; a layer made by hand is called after its class and how many were made before it.
        group: as given.
        chunks: as given; what is pending moves the running statistics when it is set.

    Shape:
        Input (N, C, *) as the torch layer of the same dimension takes it, output the same. N may differ between
        replicas, and be 0.

    Raises:
        ValueError: `eps_mode` is neither, `group` is none, `chunks` is below 1, or `process_group` is not None; in
            `forward`, the input has other dimensions or channels, the mask another shape, or the whole batch has one
            value per channel.
        TypeError: `chunks` is no int; in `forward`, the input is not floating-point or a DTensor, or the mask not
            boolean.
        StatsdBNError: in `forward` and `backward`, the exchange with the other members failed; most kinds are
            RoundFailed.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        eps_mode: str = "plus",
        group: Group | str | None = None,
        chunks: int = 1,
        process_group: None = None,
    ) -> None:
        check_eps_mode(eps_mode)
        groups.check(group)
        check_chunks(chunks)
        _refuse(process_group)
        without_bias = {} if bias else {"bias": False}  # torch before 2.13 has no such argument
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **without_bias)
        self.eps_mode = eps_mode
        self.group = group
        self.chunks = chunks
        self.layer_name = f"{type(self).__name__}-{next(_unnamed)}"

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
        """Normalises `input`, in training with the statistics of the whole batch.

        Args:
            input: shape (N, C, *).
            mask: shape (N, *), bool: which positions count for the statistics; None for all. Masked positions are
                normalised like the rest.
        """
        self._check_input_dim(input)
        input_checks.check(self, input)
        if mask is not None:
            input_checks.check_mask(self, input, mask)
        is_compiling = torch.compiler.is_compiling() and self._replica is None
        if not self._uses_batch_statistics() or (mask is None and self._is_as_torchs(is_compiling=is_compiling)):
            return unsynchronized.forward(self, input, self._deferred_now())
        if is_compiling:
            return self._compiled(input, mask)
        input_checks.check_local(self, input, self.weight)
        return self._together(Slice(input, self.weight, self.bias, mask))

    def reset_running_stats(self) -> None:
        """Torch's; what is pending is forgotten."""
        super().reset_running_stats()
        self.forget_pending()

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """`client.convert_model(module)` under torch's name; as there, the class it is called on makes no difference.

        Args:
            module: any module; containers are changed in place.
            process_group: None.

        Returns:
            The module, or its replacement if it is itself a batch norm.

        Raises:
            ValueError: `process_group` is not None, or as `convert_model` says.
        """
        _refuse(process_group)
        return convert(module, stacklevel=3)

    def extra_repr(self) -> str:
        """Torch's, and what is not its default."""
        eps_mode = "" if self.eps_mode == "plus" else f", eps_mode={self.eps_mode!r}"
        group = "" if self.group is None else f", group={self.group!r}"
        chunks = "" if self.chunks == 1 else f", chunks={self.chunks}"
        return f"{super().extra_repr()}{eps_mode}{group}{chunks}"

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle is a layer like any other: it is no replica beside those of its original.

        What is pending of a mini-batch stays behind, and no class is named that is not public.
        """
        state: dict[str, Any] = super().__getstate__()
        kept = {name: value for name, value in state.items() if name not in {"_replica", "_tally", "_deferred"}}
        return {**kept, "_chunks": self.chunks} if self.chunks > 1 else kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over the state of a copy or pickle."""
        chunks = state.get("_chunks", 1)
        super().__setstate__({name: value for name, value in state.items() if name != "_chunks"})
        self.chunks = chunks

    def _load_from_state_dict(self, *args: Any) -> None:
        """What was pending belongs to the state that is replaced, such as that of a step that failed."""
        super()._load_from_state_dict(*args)
        self.forget_pending()

    def __data_parallel_replicate__(self, context: Any, copy_id: int) -> None:
        """Makes this copy one of the replicas of its process.

        Raises:
            ConfigurationError: these are replicas of a replica: the others in their process would be left out.
        """
        if self.training and any_device.is_inside_replica():
            raise ConfigurationError(
                "DataParallelWithCallback: expected none inside a replica of another, got one around layer "
                f"{self.layer_name!r}; give the outer one all devices"
            )
        self._replica = (context.barrier, copy_id)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:  # noqa: PLR2004 - the batch and the channels
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _uses_batch_statistics(self) -> bool:
        return self._is_tallied() or self.training or (self.running_mean is None and self.running_var is None)

    def _is_as_torchs(self, *, is_compiling: bool) -> bool:
        """Whether torch's own operator will do. Where its input is traced, nothing but ours can measure what it saw."""
        if self._has_company():
            return False
        is_transformed = is_compiling or torch._C._are_functorch_transforms_active()  # noqa: SLF001 - has no public name
        return self._deferred_now() is None or not is_transformed

    def _is_tallied(self) -> bool:
        """Whether `recalibrate` counts this pass, in which this process's batch is the whole batch."""
        return self._tally is not None

    def _has_company(self) -> bool:
        if self._is_tallied():
            return True
        if not self.training:
            return False
        connection = current_connection()
        if connection is not None and not connection.is_alone(self.group):
            return True
        if self._replica is not None:
            return self._replica[0].nr_replicas > 1
        if not torch.compiler.is_compiling():
            unconnected.tell(self.layer_name)
        return False

    def _lane(self) -> Lane:
        if self._is_tallied() or not self.training:
            return LocalPipe(self.layer_name)
        return lane_for(self.layer_name, self.group)

    def _compiled(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The same as one operator, in which the compiler does not look."""
        output: Tensor
        lane = custom_op.named(self.group) if self.training else custom_op.ALONE
        deferred = self._deferred_now()
        number = custom_op.NOT_DEFERRED if deferred is None else deferred.number
        output, statistics, ticket = custom_op.batch_norm(
            x, self.weight, self.bias, mask, self.layer_name, *lane, self.eps, self.eps_mode, number
        )
        if self.training:
            statistics = statistics.detach()
            running_stats.move(
                self,
                statistics[custom_op.NEWEST_MEAN],
                statistics[custom_op.NEWEST_VARIANCE],
                is_due=ticket[custom_op.IS_DUE],
                has_values=ticket[custom_op.NEWEST_COUNT] > 0,
            )
        return output

    def _together(self, mine: Slice) -> Tensor:
        seat = self._replica if self.training or self._is_tallied() else None
        if seat is not None:
            mine = held(mine)
        if is_inside_backward() and (earlier := self._earlier(mine, 0 if seat is None else seat[1])):
            return batch_norm([mine], earlier)[0]
        if seat is None:
            output, due = self._normalise([mine])[0]
        else:
            barrier, replica = seat
            point = f"layer {self.layer_name!r}"
            output, due = barrier.meet(replica, point, mine, self._normalise_replicas)
            output = output if torch.is_grad_enabled() else output.detach()
        if due is not None:
            running_stats.move_by(self, due)
        return output

    def _earlier(self, mine: Slice, replica: int) -> Exchange | None:
        """The call that a checkpoint computes again."""
        if self._is_tallied():
            return None
        with torch.no_grad():
            moments = dispatch.moments(mine.input, mine.mask)
        return exchanges.find(self.layer_name, self._lane(), replica, moments)

    def _normalise_replicas(self, slices: list[Slice]) -> list[tuple[Tensor, Moments | None]]:
        """Runs in the thread of the last to come, whose grad mode is only its own."""
        with torch.enable_grad():
            return self._normalise(slices)

    def _normalise(self, slices: list[Slice]) -> list[tuple[Tensor, Moments | None]]:
        exchange = Exchange(self._lane(), self.layer_name, self.eps, self.eps_mode)
        outputs = batch_norm(slices, exchange)
        if self._tally is None:
            exchanges.remember(exchange, has_graph=any(output.requires_grad for output in outputs))
        due = self._due(exchange.moments)
        return [(output, due) for output in outputs]

    def _due(self, batch: Moments) -> Moments | None:
        """Counts a batch; returns what every replica's running statistics move by now, if they move."""
        if self._tally is not None:
            self._tally.add(batch)
            return None
        if not self.training:
            return None
        deferred = self._deferred_now()
        return batch if deferred is None else deferred.add(batch)

    def _deferred_now(self) -> Deferred | None:
        """Statistics that are not kept need no deferring."""
        return self._deferred if self.training and self.track_running_stats else None


def _refuse(process_group: Any) -> None:
    if process_group is not None:
        raise ValueError(
            f"process_group: expected None, got {process_group!r}, which means nothing to the aggregation server; say "
            "with whom layers synchronise by client.convert_model(..., group=...)"
        )


# Torch's class stands first, because it knows the dimensions of its input; all else is ours.


@twin_of(nn.BatchNorm1d)
class SynchronizedBatchNorm1d(nn.BatchNorm1d, SynchronizedBatchNorm):
    """Synchronised batch norm over (N, C) or (N, C, L) input; see `SynchronizedBatchNorm`."""


@twin_of(nn.BatchNorm2d)
class SynchronizedBatchNorm2d(nn.BatchNorm2d, SynchronizedBatchNorm):
    """Synchronised batch norm over (N, C, H, W) input; see `SynchronizedBatchNorm`."""


@twin_of(nn.BatchNorm3d)
class SynchronizedBatchNorm3d(nn.BatchNorm3d, SynchronizedBatchNorm):
    """Synchronised batch norm over (N, C, D, H, W) input; see `SynchronizedBatchNorm`."""
