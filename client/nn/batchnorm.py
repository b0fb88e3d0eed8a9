"""The synchronised layers: torch's batch norm over all replicas of the job.

A layer holds no connection and looks up the current one in each call, so it can be copied, pickled and forked.
"""

import itertools
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from client.data_parallel import any_device
from client.data_parallel.barrier import Barrier
from client.nn import custom_op, input_checks, running_stats, unsynchronized
from client.nn.call import SynchronizedCall, plain_call, synchronized_batch_norm
from client.nn.running_stats import DeferredUpdate, MomentAccumulator, check_chunks
from client.session.groups import Group
from client.tracebacks import hide_internal_frames
from client.transports.choose import Communicator, GroupSpec, communicator_for, resolve_group, transport_over
from client.transports.process_group import NamedProcessGroup
from client.transports.transport import Transport
from statsd_bn.errors import ConfigurationError, StatsdBNError

EPS_MODES = ("plus", "clamp")

# Attributes of a replica, a mini-batch or a call: copies and pickles drop them. `__getstate__` adds `_chunks` to the
# state; pickles of generated classes drop it, because they pass the chunks to `rebuilt_layer`.
TRANSIENT_ATTRIBUTES = frozenset({"_replica", "_accumulator", "_deferred", "_was_called", "_bypassed", "_chunks"})


class ExecutionMode(Enum):
    """Implementation of a call for which `_route` chooses no transport."""

    UNSYNCHRONIZED = auto()  # torch's operator: in eval, or without other ranks and replicas
    COMPILED = auto()  # our operator, under torch.compile; it chooses its transport when it runs


class _ProcessGroup:
    """The attribute `process_group`. Not a `property`: a subclass may set its own attribute of this name."""

    def __get__(self, layer: Any, kind: type | None = None) -> Any:
        group = None if layer is None else layer.group
        return group.find() if isinstance(group, NamedProcessGroup) else None


_unnamed = itertools.count()


class SynchronizedBatchNorm(nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - as torch's own
    """Base of the layers, and the replacement of `torch.nn.SyncBatchNorm`, for input of any dimension.

    A layer equals an `nn.BatchNorm*d` in parameters, buffers, state_dict and eval. In training it normalises with the
    statistics of the whole batch, if there are other replicas.

    Args:
        num_features: C, the channels.
        eps: keeps the inverse standard deviation finite.
        momentum: weight of the newest batch in the running statistics; None for a cumulative average.
        affine: learn `weight` and `bias`, each of shape (C,).
        track_running_stats: keep running statistics for eval; without them eval uses the statistics of its batch.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: learn `bias` where `affine`.
        eps_mode: "plus" for (var + eps)^-1/2, as torch; "clamp" for max(var, eps)^-1/2 of synchronised batches; None
            for the mode that `set_sbn_eps_mode` sets, "plus" by default.
        group: ranks that the layer synchronises with over the server: None for the whole job, "local" for the members
            of this host, or a `client.Group`. Without a connection None means torch's default process group, if there
            is one.
        chunks: micro-batches per mini-batch. Each call in training is normalised separately, and after `chunks` calls
            the running statistics are updated once, with the values of all these calls. If a mini-batch ends with
            fewer calls, use `commit_running_statistics`.
        process_group: ranks that the layer synchronises with over torch's collectives, without a server.

    Attributes:
        layer_name: the layer's name on the wire, the same on every member. `convert_model` sets it to the path in the
            model. A layer created otherwise has the name of its class with a number.
        chunks: the argument. Setting another value updates the running statistics with the pending micro-batches.

    Shape:
        Input and output (N, C, *), as for the torch layer. N may differ between replicas, and be 0.

    Raises:
        ValueError: `eps_mode`, `group`, `process_group` or `chunks` is invalid, or both `group` and `process_group` are
            set; in `forward`, the input has other dimensions or channels, the mask has another shape or device, the
            whole batch has one value per channel, or masks exclude all values.
        TypeError: `chunks` is not an int; in `forward`, the input is not floating-point, the input or `weight` is a
            DTensor, or the mask is not boolean.
        StatsdBNError: in `forward` and `backward`, the exchange with the other members failed; usually a RoundFailed.
    """

    process_group = _ProcessGroup()
    eps_mode: str = "plus"  # the default, see `set_sbn_eps_mode`
    layer_name: str = "unnamed"  # on the wire; the default is for layers created by torch's `__init__` alone
    group: GroupSpec = None
    _replica: tuple[Barrier, int] | None = None
    _accumulator: MomentAccumulator | None = None
    _deferred: DeferredUpdate | None = None
    _was_called: bool = False
    _bypassed: Sequence[bool] = ()  # [True] if the `forward` of a converted subclass was seen to skip `batch_norm`
    _process_group_before: NamedProcessGroup | None = None
    converted_from: ClassVar[type[nn.Module] | None] = None  # the original class of a converted subclass
    convert_sync_batchnorm: ClassVar[Callable[..., nn.Module]]  # `client.nn.conversion` sets it

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
        eps_mode: str | None = None,
        group: GroupSpec = None,
        chunks: int = 1,
        process_group: Any = None,
    ) -> None:
        without_bias = {} if bias else {"bias": False}  # torch before 2.13 has no such argument
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **without_bias)
        _set_options(self, eps_mode, resolve_group(group, process_group), chunks)
        self.layer_name = f"{type(self).__name__}-{next(_unnamed)}"

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise `input`, in training with the statistics of the whole batch.

        Args:
            input: shape (N, C, *).
            mask: shape (N, *), bool: positions that count for the statistics; None for all. The other positions are
                normalised too.
        """
        if type(input) is not Tensor or mask is not None:
            proxy: Tensor | None = input_checks.fx_proxy(self, (input,) if mask is None else (input, mask), {})
            if proxy is not None:
                return proxy
        self._check_input_dim(input)
        input_checks.check_input(self, input)
        if mask is not None:
            input_checks.check_mask(self, input, mask)
        return self._normalise(self, input, mask)

    def _normalise(self, call: Any, input: Tensor, mask: Tensor | None) -> Tensor:
        """Compute one call; `call` is the layer, or the `BatchNormCall` of a subclass's `forward`."""
        route = self._route(mask)
        if route is ExecutionMode.UNSYNCHRONIZED:
            return unsynchronized.forward(call, input, self._active_deferred())
        if route is ExecutionMode.COMPILED:
            return custom_op.forward(call, input, mask, self._active_deferred())
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise input_checks.tracing_error(self, "traced by torch.jit.trace in training mode")
        weight, bias = input_checks.parameters_of(call)
        if type(input) is not Tensor or type(weight) is not nn.Parameter:
            input_checks.check_not_distributed(self, input, weight)
        replica = self._replica if self.training or self._accumulator is not None else None
        try:
            if replica is None and mask is None and self._accumulator is None and self._deferred is None:
                output = plain_call(call, route, input, weight, bias)
                if output is not None:
                    return output
            synchronized = SynchronizedCall(call, route, self._accumulator, self._active_deferred(), replica)
            return synchronized_batch_norm(input, weight, bias, mask, synchronized)
        except StatsdBNError as error:
            hide_internal_frames(error, for_caller=True)
            raise

    def reset_running_stats(self) -> None:
        """Reset the running statistics, and drop pending micro-batches."""
        super().reset_running_stats()
        self.forget_pending()

    def extra_repr(self) -> str:
        """Torch's representation and the options that differ from their defaults."""
        options = ("eps_mode", "plus"), ("group", None), ("chunks", 1)
        own = [f"{name}={getattr(self, name)!r}" for name, default in options if getattr(self, name) != default]
        return ", ".join([super().extra_repr(), *own])

    def __prepare_scriptable__(self) -> nn.Module:
        """Hook of `torch.jit.script`, which cannot record an exchange."""
        raise input_checks.tracing_error(self, "scripted by torch.jit.script")

    @property
    def chunks(self) -> int:
        """Micro-batches per mini-batch."""
        return 1 if self._deferred is None else self._deferred.chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        check_chunks(chunks)
        if chunks != self.chunks:
            self.commit_running_statistics()
            vars(self).pop("_deferred", None)
            if chunks > 1:
                self._deferred = DeferredUpdate(chunks)

    def commit_running_statistics(self) -> None:
        """End the mini-batch now: update the running statistics with its micro-batches so far, if there are any."""
        if self._deferred is not None and (pending := self._deferred.pop()):
            running_stats.update_from(self, pending)

    def forget_pending(self) -> None:
        """Drop the micro-batches of the unfinished mini-batch: they will not update the running statistics."""
        if self._deferred is not None:
            self._deferred.pop()

    def __getstate__(self) -> dict[str, Any]:
        """Drop transient attributes: a copy is not among its original's replicas, and has no pending micro-batches."""
        state: dict[str, Any] = super().__getstate__()
        state = {name: value for name, value in state.items() if name not in TRANSIENT_ATTRIBUTES}
        return {**state, "_chunks": self.chunks} if self.chunks > 1 else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "_chunks"})
        if chunks := state.get("_chunks"):
            self.chunks = chunks

    def _load_from_state_dict(self, *args: Any, **named: Any) -> None:
        """Drop pending micro-batches, which belong to the replaced state."""
        super()._load_from_state_dict(*args, **named)
        self.forget_pending()

    def __data_parallel_replicate__(self, context: Any, copy_id: int) -> None:
        """Make this copy a replica; raise ConfigurationError for nested replicas, which would not meet outer ones."""
        if self.training and any_device.is_inside_replica():
            problem = f"nested DataParallelWithCallback around layer {self.layer_name!r}"
            raise ConfigurationError(f"{problem}; wrap the model once, with all devices")
        self._replica = (context.barrier, copy_id)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:  # noqa: PLR2004 - the batch and the channels
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _route(self, mask: Tensor | None) -> Transport | ExecutionMode:
        """Choose the transport of this call, or an `ExecutionMode`."""
        is_accumulated = self._accumulator is not None
        if not (self.training or is_accumulated or (self.running_mean is None and self.running_var is None)):
            return ExecutionMode.UNSYNCHRONIZED
        is_traced = is_compiling() and self._replica is None
        if is_traced and mask is not None:
            return ExecutionMode.COMPILED
        communicator = communicator_for(self.group) if self.training and not is_accumulated else None
        if mask is None and not self._must_synchronise(communicator):
            # In a trace or a torch.func transform, only our operators can measure a micro-batch's moments.
            is_transformed = is_traced or torch._C._are_functorch_transforms_active()  # noqa: SLF001 - has no public name
            if not is_transformed or self._active_deferred() is None:
                return ExecutionMode.UNSYNCHRONIZED
        if is_traced:
            return ExecutionMode.COMPILED
        return transport_over(communicator, self.layer_name, self.group)

    def _must_synchronise(self, communicator: Communicator | None) -> bool:
        """Whether other ranks or replicas have slices of the batch, or `recalibrate` accumulates moments."""
        if communicator is not None or self._accumulator is not None:
            return True
        if self.training and self._replica is not None:
            return self._replica[0].nr_replicas > 1
        if self.training and not isinstance(self.group, NamedProcessGroup):
            unsynchronized.warn_if_unconnected(self.layer_name)
        return False

    def _active_deferred(self) -> DeferredUpdate | None:
        return self._deferred if self.training and self.track_running_stats else None


def _set_options(layer: SynchronizedBatchNorm, eps_mode: str | None, group: GroupSpec, chunks: int) -> None:
    """Set the options of a new layer, or raise ValueError or TypeError."""
    if eps_mode is not None:
        layer.eps_mode = _checked_mode("eps_mode", eps_mode)
    layer.group, layer.chunks = group, chunks


def _checked_mode(name: str, mode: str) -> str:
    if mode not in EPS_MODES:
        raise ValueError(f"{name}: expected one of {EPS_MODES}, got {mode!r}")
    return mode


def set_sbn_eps_mode(mode: str) -> None:
    """Set the default `eps_mode` of all layers in this process, existing and future ones.

    The name comes from Synchronized-BatchNorm-PyTorch, where "clamp" is the default. All ranks must use the same mode.
    Pickles and copies of a layer do not contain this default.

    Args:
        mode: "plus" for (var + eps)^-1/2, as torch; "clamp" for max(var, eps)^-1/2 of synchronised batches.

    Raises:
        ValueError: `mode` is neither "plus" nor "clamp".
    """
    SynchronizedBatchNorm.eps_mode = _checked_mode("mode", mode)


OWN_ATTRIBUTES = tuple(SynchronizedBatchNorm.__annotations__)  # attributes that torch's layers do not have


# Torch's class comes first in the bases of these three, so that its `_check_input_dim` is used.
class SynchronizedBatchNorm1d(nn.BatchNorm1d, SynchronizedBatchNorm):
    """Synchronised batch norm over (N, C) or (N, C, L) input; see `SynchronizedBatchNorm`."""


class SynchronizedBatchNorm2d(nn.BatchNorm2d, SynchronizedBatchNorm):
    """Synchronised batch norm over (N, C, H, W) input; see `SynchronizedBatchNorm`."""


class SynchronizedBatchNorm3d(nn.BatchNorm3d, SynchronizedBatchNorm):
    """Synchronised batch norm over (N, C, D, H, W) input; see `SynchronizedBatchNorm`."""


class LazySynchronizedBatchNorm(nn.modules.batchnorm._LazyNormBase, SynchronizedBatchNorm):  # noqa: SLF001 - torch's
    """Base of the three lazy layers, which learn their channels from the first input, as torch's do.

    Args and errors: see `SynchronizedBatchNorm`; there is no `num_features` and no `process_group`. Torch looks up
    `forward` before its hook changes the class to `cls_to_become`, so the lazy class needs our `forward` too.
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
        without_bias = {} if bias else {"bias": False}
        super().__init__(eps, momentum, affine, track_running_stats, device, dtype, **without_bias)
        _set_options(self, eps_mode, resolve_group(group, None), chunks)

    def initialize_parameters(self, input: Tensor, mask: Tensor | None = None) -> None:  # noqa: ARG002 - forward's
        """Set the shape (C,) of parameters and buffers; torch passes all arguments of `forward`."""
        super().initialize_parameters(input)


class LazySynchronizedBatchNorm1d(LazySynchronizedBatchNorm, nn.LazyBatchNorm1d):
    """Becomes a `SynchronizedBatchNorm1d` in its first forward pass."""

    cls_to_become = SynchronizedBatchNorm1d


class LazySynchronizedBatchNorm2d(LazySynchronizedBatchNorm, nn.LazyBatchNorm2d):
    """Becomes a `SynchronizedBatchNorm2d` in its first forward pass."""

    cls_to_become = SynchronizedBatchNorm2d


class LazySynchronizedBatchNorm3d(LazySynchronizedBatchNorm, nn.LazyBatchNorm3d):
    """Becomes a `SynchronizedBatchNorm3d` in its first forward pass."""

    cls_to_become = SynchronizedBatchNorm3d
