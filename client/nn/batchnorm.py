"""SynchronizedBatchNorm and its 1d, 2d and 3d: torch's batch norm, over all replicas of the job.

A layer is an `nn.BatchNorm*d` in every respect (parameters, buffers, state_dict, eval), and in training, when there
is anybody to synchronise with, it normalises with the statistics of the whole batch. It holds no connection: it
asks for the process's current one each time, so copies, pickles and forks of it are harmless.
"""

import itertools
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from client.data_parallel import any_device
from client.nn import custom_op, input_checks, tracing, unconnected, unsynchronized
from client.nn.call import Call, synchronized_batch_norm
from client.nn.conversion.convert import convert
from client.nn.micro_batches import Deferred, check_chunks
from client.nn.synchronized import Synchronized, check_eps_mode, twin_of
from client.tracebacks import hide_internal_frames
from client.transports.choose import Communicator, GroupSpec, communicator_for, resolve_group, transport_over
from client.transports.named_process_group import NamedProcessGroup
from client.transports.transport import Transport
from statsd_bn.errors import ConfigurationError, StatsdBNError

# What binds a layer to its replicas, to a mini-batch and to a call under way. The last is how many chunks a pickle says
# there are.
BONDS = frozenset({"_replica", "_accumulator", "_deferred", "_has_come", "_missed", "_chunks"})


class Way(Enum):
    """How a layer computes one call."""

    TORCHS = auto()
    """Torch's own operator: in eval, or with nobody to synchronise with."""

    COMPILED = auto()
    """Our operator, which looks for its transport when it runs: where torch.compile traces the call."""

    BY_ITSELF = auto()
    """One slice of this process, over the transport."""

    AS_REPLICA = auto()
    """One slice of several, whose replicas meet at a barrier; the last takes all over the transport."""


class _ProcessGroup:
    """Attribute of that name; a layer whose own class has another of this name keeps that."""

    def __get__(self, layer: Any, kind: type | None = None) -> Any:
        group = None if layer is None else layer.group
        return group.find() if isinstance(group, NamedProcessGroup) else None


_unnamed = itertools.count()


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
        eps_mode: "plus" for (var + eps)^-1/2, as torch; "clamp" for max(var, eps)^-1/2 of synchronised batches; None
            for what `set_sbn_eps_mode` has said, which is "plus" where nobody has called it.
        group: with whom the layer synchronises over the server: None for the whole job, "local" for the members of
            this host, or a `client.Group`. Without a connection None means torch's default process group, if there is
            one.
        chunks: micro-batches per mini-batch. Each call in training is normalised by itself, and the running statistics
            move once after `chunks` of them, towards those of all their values together; where a mini-batch has
            fewer, by `commit_running_statistics`.
        process_group: with whom the layer synchronises over torch's collectives, without a server.

    Attributes:
        layer_name: the layer's name on the wire, the same on every member. `convert_model` sets it to the place in the
            model; a layer made by hand is called after its class and how many were made before it.
        group: as given; for a process group of torch's its name and size.
        process_group: as given.
        chunks: as given; what is pending moves the running statistics when it is set.

    Shape:
        Input (N, C, *) as the torch layer of the same dimension takes it, output the same. N may differ between
        replicas, and be 0.

    Raises:
        ValueError: `eps_mode` is neither "plus" nor "clamp", `group` is neither None, "local" nor a `client.Group`,
            `process_group` is something else, both are given, or `chunks` is below 1; in `forward`, the
            input has other dimensions or channels, the mask another shape, or the whole batch has one value per
            channel.
        TypeError: `chunks` is not an int; in `forward`, the input is not floating-point or a DTensor, or the mask not
            boolean.
        StatsdBNError: in `forward` and `backward`, the exchange with the other members failed; most kinds are
            RoundFailed.
    """

    process_group = _ProcessGroup()

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
        check_eps_mode(eps_mode)
        check_chunks(chunks)
        group = resolve_group(group, process_group)
        without_bias = {} if bias else {"bias": False}  # torch before 2.13 has no such argument
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **without_bias)
        if eps_mode is not None:
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
        if type(input) is not Tensor or mask is not None:
            traced: Tensor | None = tracing.leaf(self, (input,) if mask is None else (input, mask), {})
            if traced is not None:
                return traced
        self._check_input_dim(input)
        input_checks.check(self, input)
        if mask is not None:
            input_checks.check_mask(self, input, mask)
        return self._normalise(self, input, mask)

    def _normalise(self, of: Any, input: Tensor, mask: Tensor | None) -> Tensor:  # noqa: A002 - torch's name
        """Computes one call; `of` is the layer, or what its subclass's `forward` has handed over in its name."""
        way, transport = self._route(mask)
        if way is Way.TORCHS:
            return unsynchronized.forward(of, input, self._deferred_now())
        if way is Way.COMPILED:
            return custom_op.forward(of, input, mask, self._deferred_now())
        assert transport is not None  # noqa: S101 - the other ways exchange
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise tracing.refusal(self.layer_name, "traced by torch.jit.trace in training mode")
        weight = of.weight
        if type(input) is not Tensor or type(weight) is not nn.Parameter:
            input_checks.check_local(self, input, weight)
        replica = self._replica if way is Way.AS_REPLICA else None
        deferred = None if self._deferred is None else self._deferred_now()
        call = Call(of, transport, self._accumulator, deferred, replica)
        try:
            return synchronized_batch_norm(input, weight, of.bias, mask, call)
        except StatsdBNError as error:
            hide_internal_frames(error, for_caller=True)
            raise

    def reset_running_stats(self) -> None:
        """Torch's; what is pending is forgotten."""
        super().reset_running_stats()
        self.forget_pending()

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """`client.convert_model(module)` under torch's name; as there, the class it is called on makes no difference.

        Args:
            module: any module; containers are changed in place.
            process_group: with whom the layers synchronise, as `convert_model` takes it.

        Returns:
            The module.

        Raises:
            ValueError: as `convert_model` says.
        """
        return convert(module, resolve_group(None, process_group), stacklevel=3)

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
        kept = {name: value for name, value in state.items() if name not in BONDS}
        return {**kept, "_chunks": self.chunks} if self.chunks > 1 else kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over the state of a copy or pickle."""
        super().__setstate__({name: value for name, value in state.items() if name != "_chunks"})
        if chunks := state.get("_chunks"):
            self.chunks = chunks

    def _load_from_state_dict(self, *args: Any, **named: Any) -> None:
        """What was pending belongs to the state that is replaced, such as that of a step that failed."""
        super()._load_from_state_dict(*args, **named)
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

    def _route(self, mask: Tensor | None) -> tuple[Way, Transport | None]:
        """Returns how this call is computed, and over which transport if it exchanges anything.

        It asks for the communicator once, so that the way and the transport fit together.
        """
        is_accumulated = self._accumulator is not None
        if not (self.training or is_accumulated or (self.running_mean is None and self.running_var is None)):
            return Way.TORCHS, None
        is_traced = torch.compiler.is_compiling() and self._replica is None
        if is_traced and mask is not None:
            return Way.COMPILED, None
        communicator = communicator_for(self.group) if self.training and not is_accumulated else None
        if mask is None and not self._must_synchronise(communicator) and self._can_be_torchs(is_traced=is_traced):
            return Way.TORCHS, None
        if is_traced:
            return Way.COMPILED, None
        is_replica = self._replica is not None and (self.training or is_accumulated)
        transport = transport_over(communicator, self.layer_name, self.group)
        return (Way.AS_REPLICA if is_replica else Way.BY_ITSELF), transport

    def _must_synchronise(self, communicator: Communicator | None) -> bool:
        """Whether other batches belong to this one; while `recalibrate` counts the pass, all that it counts."""
        if communicator is not None or self._accumulator is not None:
            return True
        if not self.training:
            return False
        if self._replica is not None:
            return self._replica[0].nr_replicas > 1
        if not isinstance(self.group, NamedProcessGroup):
            unconnected.tell(self.layer_name)
        return False

    def _can_be_torchs(self, *, is_traced: bool) -> bool:
        """Where the input of a micro-batch is traced, only our operator can measure what it saw."""
        is_transformed = is_traced or torch._C._are_functorch_transforms_active()  # noqa: SLF001 - has no public name
        return self._deferred_now() is None or not is_transformed

    def _deferred_now(self) -> Deferred | None:
        """Statistics that are not kept need no deferring."""
        return self._deferred if self.training and self.track_running_stats else None


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
