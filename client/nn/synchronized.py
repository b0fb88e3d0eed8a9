"""Synchronized: what every layer of ours is and has, whichever of torch's classes it stands for."""

from collections.abc import Callable
from typing import ClassVar, TypeVar

from torch import nn

from client.data_parallel.barrier import Barrier
from client.nn import running_stats, tracing
from client.nn.micro_batches import Deferred, MomentAccumulator, check_chunks
from client.transports.choose import GroupSpec
from client.transports.named_process_group import NamedProcessGroup

Kind = TypeVar("Kind", bound=type[nn.Module])

EPS_MODES = ("plus", "clamp")

TWINS: dict[type[nn.Module], type[nn.Module]] = {}
"""Which class of ours stands for which of torch's."""

CONVERSIONS: dict[type[nn.Module], Callable[[nn.Module], nn.Module]] = {}
"""How layers of a class, and of its subclasses that have no entry of their own, become synchronised."""


def twin_of(torchs: type[nn.Module]) -> Callable[[Kind], Kind]:
    """Makes a class of ours the one that stands for a class of torch's."""

    def register(ours: Kind) -> Kind:
        TWINS[torchs] = ours
        return ours

    return register


def register_conversion(original: type[nn.Module], convert: Callable[[nn.Module], nn.Module]) -> None:
    """Makes `client.convert_model` convert the layers of a class in a way of your own.

    Subclasses of torch's batch norms need none as a rule: `convert_model` keeps their `forward`, and synchronises what
    it hands to `batch_norm`. Register a conversion for a class that computes its statistics itself. detectron2's adds
    something to torch's layer in its `forward` only, so it becomes that, with its tensors, and then ours:

        def without_its_own_collectives(layer: NaiveSyncBatchNorm) -> nn.Module:
            layer.__class__ = nn.BatchNorm2d
            return client.convert_model(layer)

        client.register_conversion(NaiveSyncBatchNorm, without_its_own_collectives)

    `client.revert_model` makes torch's layer of it.

    Args:
        original: the class of the layers; their subclasses are converted the same way, but for those that have a
            conversion of their own.
        convert: takes a layer and returns the module that replaces it, which may be the same. Another one is taken as
            it is, with all that is in it. Parameters and buffers that an optimizer knows already should be taken over
            as they are.

    Raises:
        TypeError: `original` is not a class of modules, or `convert` cannot be called.
    """
    if not (isinstance(original, type) and issubclass(original, nn.Module)):
        raise TypeError(f"original: expected a subclass of nn.Module, got {original!r:.80}")
    if not callable(convert):
        raise TypeError(f"convert: expected a function of a layer, got {convert!r:.80}")
    CONVERSIONS[original] = convert


def conversion_of(kind: type[nn.Module]) -> Callable[[nn.Module], nn.Module] | None:
    """Returns how layers of a class are converted; None if they are not."""
    return next((CONVERSIONS[base] for base in kind.__mro__ if base in CONVERSIONS), None)


class Synchronized:
    """A layer of ours, and its mini-batches that come in micro-batches.

    Attributes:
        eps_mode: "plus" or "clamp"; of a layer that was given none the class's, which `set_sbn_eps_mode` sets.
        layer_name: its name on the wire; the same for all that were made without our `__init__`, as by that of torch.
        group: with whom it synchronises.
        converted_from: the class that was adopted, see `client.nn.adopted`; None in a class of its own.
        is_unreached: whether its `forward` was seen to come to no `batch_norm` in training.
    """

    eps_mode: str = "plus"
    layer_name: str = "unnamed"
    group: GroupSpec = None
    _replica: tuple[Barrier, int] | None = None
    _accumulator: MomentAccumulator | None = None
    _deferred: Deferred | None = None
    _has_come: bool = False
    _missed: list[bool]
    _process_group_before: NamedProcessGroup | None = None
    converted_from: ClassVar[type[nn.Module] | None] = None
    is_unreached: ClassVar[bool] = False

    def __prepare_scriptable__(self) -> nn.Module:
        """What `torch.jit.script` asks for.

        Raises:
            TypeError: always.
        """
        raise tracing.refusal(self.layer_name, "scripted by torch.jit.script")

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
                self._deferred = Deferred(chunks)

    def commit_running_statistics(self) -> None:
        """Ends a mini-batch: its micro-batches so far move the running statistics; without any nothing happens."""
        if self._deferred is not None and (pending := self._deferred.take()):
            running_stats.move_by(self, pending)

    def forget_pending(self) -> None:
        """The micro-batches of an unfinished mini-batch will not move the running statistics."""
        if self._deferred is not None:
            self._deferred.take()


def check_eps_mode(eps_mode: str | None) -> None:
    """Raises ValueError where `eps_mode` is neither None nor one of `EPS_MODES`."""
    if eps_mode is not None and eps_mode not in EPS_MODES:
        raise ValueError(f"eps_mode: expected one of {EPS_MODES}, got {eps_mode!r}")


def set_sbn_eps_mode(mode: str) -> None:
    """Sets `eps_mode` for all layers of this process that were given none themselves, made before or after.

    The name is that of Synchronized-BatchNorm-PyTorch, where "clamp" is the default. All ranks must say the same. A
    pickle or copy of a layer does not keep what is said here.

    Args:
        mode: "plus" for (var + eps)^-1/2, as torch; "clamp" for max(var, eps)^-1/2 of synchronised batches.

    Raises:
        ValueError: `mode` is neither "plus" nor "clamp".
    """
    if mode not in EPS_MODES:
        raise ValueError(f"mode: expected one of {EPS_MODES}, got {mode!r}")
    Synchronized.eps_mode = mode


# The attributes that a layer of ours has and torch's has not.
OWN_ATTRIBUTES = tuple(Synchronized.__annotations__)
