"""The base of all synchronised layers, and the registry of the classes they replace."""

from collections.abc import Callable
from typing import ClassVar, TypeVar

from torch import nn

from client.data_parallel.barrier import Barrier
from client.nn import input_checks, running_stats
from client.nn.running_stats import DeferredUpdate, MomentAccumulator, check_chunks
from client.transports.choose import GroupSpec
from client.transports.named_process_group import NamedProcessGroup

LayerClass = TypeVar("LayerClass", bound=type[nn.Module])

EPS_MODES = ("plus", "clamp")

REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {}
"""The synchronised class of each of torch's classes."""

CONVERSIONS: dict[type[nn.Module], Callable[[nn.Module], nn.Module]] = {}
"""The conversion of each class; subclasses without an entry inherit it."""


def replaces(original: type[nn.Module]) -> Callable[[LayerClass], LayerClass]:
    """Register the decorated class as the synchronised replacement of one of torch's classes."""

    def register(replacement: LayerClass) -> LayerClass:
        REPLACEMENTS[original] = replacement
        return replacement

    return register


def register_conversion(original: type[nn.Module], convert: Callable[[nn.Module], nn.Module]) -> None:
    """Register how `client.convert_model` converts the layers of a class.

    Subclasses of torch's batch norms rarely need this: `convert_model` keeps their `forward` and synchronises its calls
    of `batch_norm`. Register a conversion for a class that computes its statistics itself. For example, detectron2's
    class only adds a `forward` to torch's layer, so its conversion restores torch's class and converts the result:

        def without_its_own_collectives(layer: NaiveSyncBatchNorm) -> nn.Module:
            layer.__class__ = nn.BatchNorm2d
            return client.convert_model(layer)

        client.register_conversion(NaiveSyncBatchNorm, without_its_own_collectives)

    `client.revert_model` restores torch's class, not the registered one.

    Args:
        original: the class of the layers, and of subclasses without a conversion of their own.
        convert: takes a layer and returns the module that replaces it, which may be the same one. A different module
            is used unchanged, with all its children. Keep parameters and buffers that an optimizer may already hold.

    Raises:
        TypeError: `original` is not a class of modules, or `convert` is not callable.
    """
    if not (isinstance(original, type) and issubclass(original, nn.Module)):
        raise TypeError(f"original: expected a subclass of nn.Module, got {original!r:.80}")
    if not callable(convert):
        raise TypeError(f"convert: expected a function of a layer, got {convert!r:.80}")
    CONVERSIONS[original] = convert


def conversion_of(cls: type[nn.Module]) -> Callable[[nn.Module], nn.Module] | None:
    """The registered conversion of a class, or None."""
    return next((CONVERSIONS[base] for base in cls.__mro__ if base in CONVERSIONS), None)


class SynchronizedLayer:
    """Base of all synchronised layers: their options, and the pending update of their running statistics."""

    eps_mode: str = "plus"  # the default, see `set_sbn_eps_mode`
    layer_name: str = "unnamed"  # on the wire; the default is for layers created by torch's `__init__` alone
    group: GroupSpec = None
    _replica: tuple[Barrier, int] | None = None
    _accumulator: MomentAccumulator | None = None
    _deferred: DeferredUpdate | None = None
    _was_called: bool = False
    _bypassed: list[bool]
    _process_group_before: NamedProcessGroup | None = None
    converted_from: ClassVar[type[nn.Module] | None] = None  # of a converted subclass
    is_bypassed: ClassVar[bool] = False  # whether its `forward` was seen to skip `batch_norm` in training

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


def set_options(layer: SynchronizedLayer, eps_mode: str | None, group: GroupSpec, chunks: int) -> None:
    """Set the options of a new layer, or raise ValueError or TypeError."""
    if eps_mode is not None:
        if eps_mode not in EPS_MODES:
            raise ValueError(f"eps_mode: expected one of {EPS_MODES}, got {eps_mode!r}")
        layer.eps_mode = eps_mode
    layer.group = group
    layer.chunks = chunks


def set_sbn_eps_mode(mode: str) -> None:
    """Set the default `eps_mode` of all layers in this process, existing and future ones.

    The name comes from Synchronized-BatchNorm-PyTorch, where "clamp" is the default. All ranks must use the same mode.
    Pickles and copies of a layer do not contain this default.

    Args:
        mode: "plus" for (var + eps)^-1/2, as torch; "clamp" for max(var, eps)^-1/2 of synchronised batches.

    Raises:
        ValueError: `mode` is neither "plus" nor "clamp".
    """
    if mode not in EPS_MODES:
        raise ValueError(f"mode: expected one of {EPS_MODES}, got {mode!r}")
    SynchronizedLayer.eps_mode = mode


# Attributes that torch's layers do not have.
OWN_ATTRIBUTES = tuple(SynchronizedLayer.__annotations__)
