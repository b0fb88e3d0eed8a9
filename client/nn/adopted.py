"""Adopted classes: a subclass of torch's batch norm whose own `forward` stays, and whose statistics are synchronised.

    BatchNormAct2d                        calls F.batch_norm, then an activation
    SynchronizedBatchNormAct2d            made here: (Intercepted, BatchNormAct2d, Behind)

The class that is made here derives from the original one, so `isinstance`, attributes and methods stay. Where the
original's `forward` calls `super().forward(x)` it comes to ours by itself; where it calls `batch_norm`, that is
intercepted, see `client.nn.interception`.
"""

import copyreg
import functools
import logging
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from client.nn import input_checks, tracing
from client.nn.batchnorm import BONDS, SynchronizedBatchNorm, Way
from client.nn.conversion.reasons import REFUSED, own, why_left, why_not
from client.nn.interception import Handed, Interception, unseen
from client.nn.synchronized import CONVERSIONS
from client.ops.checkpointing import is_inside_backward
from statsd_bn.error_text import broken
from statsd_bn.errors import ConfigurationError

logger = logging.getLogger("statsd_bn.client")

_made: "WeakKeyDictionary[type[nn.Module], type[nn.Module]]" = WeakKeyDictionary()


class Adopted:
    """What a class that is made here has beside the original's and ours; it stands before both."""

    converted_from: ClassVar[type[nn.Module]]
    # The layers that were given this class: a warning says how many.
    _adopted: ClassVar["WeakSet[nn.Module]"]

    def __init_subclass__(cls, **given: Any) -> None:
        """The original, which may keep a list of its subclasses or want something of each, hears only of others'."""
        if "converted_from" not in vars(cls):
            super().__init_subclass__(**given)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """A copy or pickle names the original class, and the class made of it is found again.

        A class that somebody derives from that one has a name.
        """
        if "converted_from" not in vars(type(self)):
            return super().__reduce_ex__(protocol)
        return rebuilt_layer, (type(self).converted_from, self.chunks), self.__getstate__()

    def __getstate__(self: Any) -> Any:
        """What the original says that a copy keeps, which need not be ours: so what no copy keeps is left out here.

        A class that somebody derives from one that is made here is not made with its chunks, and keeps them.
        """
        state = _without_bonds(super().__getstate__())
        is_made_with_chunks = "converted_from" in vars(type(self))
        if is_made_with_chunks or self.chunks == 1 or not isinstance(state, dict):
            return state
        return {**state, "_chunks": self.chunks}


class Intercepted(Adopted):
    """The same for a class with a `forward` of its own."""

    _told: ClassVar[set[str]]

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """A layer that is made of this class, copied or loaded; `adopt` does the same for one that it is given to."""
        new: Any = super().__new__
        layer: Any = new(cls) if new is object.__new__ else new(cls, *args, **named)
        return _watched(layer)

    @property
    def is_unreached(self: Any) -> bool:
        """Whether the layer's `forward` was seen to come to no `batch_norm` in training."""
        return bool(self._missed)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The original's; where it calls `batch_norm` in training, the statistics are those of the whole batch."""
        if (traced := tracing.leaf(self, args, kwargs)) is not None:
            return traced
        if not self.training and self._accumulator is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if is_compiling():
            return self._traced(*args, **kwargs)
        self.__dict__.pop("_has_come", None)  # from a call that raised, or one that a checkpoint computed again
        # Whether this call must not simply count on.
        is_special = self._accumulator is not None or self._deferred is not None or is_inside_backward()
        counted = self._tracked_now() if is_special else None
        with Interception(self, Intercepted._normalise_handed, counted, _OF_FORWARD) as interception:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if interception.nr_without_tensors > 1:
            _tell(type(self), self.layer_name, "ambiguous")
        if not (self.__dict__.pop("_has_come", False) or interception.is_reached):
            output = self._pass_by(output, (*args, *kwargs.values()))
        elif interception.nr_passed_by:
            _tell(type(self), self.layer_name, "passed by")
        return output

    def _traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The same where torch.compile traces it, for each size of batch that it tells apart: 0 is one by itself."""
        self._has_come = False
        with Interception(self, Intercepted._normalise_traced, self._tracked_now()):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not self._has_come:
            output = self._pass_by(output, (*args, *kwargs.values()))
        return output

    def _tracked_now(self: Any) -> Tensor | None:
        tracked: Tensor | None = self.num_batches_tracked
        return None if tracked is None else tracked.clone()

    def _normalise_traced(self: Any, handed: Handed, counted: Tensor | None) -> Tensor:
        """The same where torch.compile traces the call: only when it runs it is known whether it counts."""
        self._has_come = True
        output: Tensor
        is_deferred = self._deferred_now() is not None
        if counted is None or is_deferred or self._route(None)[0] is not Way.COMPILED:
            output = self._normalise_handed(handed, counted if is_deferred else None)
            return output
        tracked = self.num_batches_tracked
        handed.num_batches_tracked = is_due = torch.zeros_like(tracked)
        output = self._normalise_handed(handed, None)
        tracked.copy_(counted + (tracked - counted) * is_due)
        return output

    def _normalise_handed(self: Any, handed: Handed, counted: Tensor | None) -> Tensor:
        """Computes one call of `batch_norm`, in place of torch."""
        input_checks.check(self, handed.input, handed.nr_channels)
        deferred = self._deferred_now()
        # What counts passes, or waits for micro-batches, knows one pair of statistics for each layer.
        knows_one = self._accumulator is not None or deferred is not None
        if knows_one and handed.running_mean is not None and not handed.moves_own(self):
            if self._accumulator is not None:
                return handed.forward()
            text = "expected chunks=1, since its forward has other running statistics beside its own"
            raise ConfigurationError(broken(f"layer {self.layer_name!r}: {text}"))
        if counted is not None:
            # The original has counted this call: it may be computed again, or not be the last of its mini-batch.
            self.num_batches_tracked.copy_(counted)
        if deferred is not None:
            handed.num_batches_tracked = self.num_batches_tracked
            handed.momentum = None if self.momentum is None else handed.momentum
        if not (handed.training or self._accumulator is not None):
            return handed.forward()
        output: Tensor = self._normalise(handed, handed.input, None)
        return output

    def _pass_by(self: Any, output: Any, arguments: tuple[Any, ...]) -> Any:
        """Ends a call that came to no `batch_norm`: one of an empty batch, which the others wait for, or a mistake.

        Where a batch with values came to none, the others are in no round of this layer either.
        """
        empty = [x for x in arguments if isinstance(x, Tensor) and x.numel() == 0 and x.dim() > 1]
        channels = input_checks.channels_of(self, self.num_features)
        is_awaited = empty and empty[0].shape[1] == channels and isinstance(output, Tensor) and not self._missed
        if not is_awaited:
            if not self._missed:
                self._missed.append(True)
            _tell_unreached(type(self), self.layer_name)
            return output
        # The sum is 0. It makes the round's backward pass a part of the output's.
        return output + SynchronizedBatchNorm.forward(self, empty[0]).sum()


_OF_FORWARD = Intercepted.forward.__code__


class Behind(SynchronizedBatchNorm):
    """Stands behind a class with a `forward` of its own, which comes here by `super().forward`."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
        """As ours."""
        if is_compiling():
            self._has_come = True
            return super().forward(input, mask)
        if self.training or self._accumulator is not None:
            vars(self)["_has_come"] = True
        return unseen(super().forward, input, mask)


_WARNINGS = {
    "unreached": (
        "not synchronised: %s; the forward of %s did not call batch_norm with the layer's tensors; "
        "a rank without rows must call it too, with an empty tensor of shape (0, C)"
    ),
    "passed by": "%s: the forward of %s calls batch_norm without its tensors too; that call is not synchronised",
    "ambiguous": "%s: the forward of %s calls batch_norm several times without tensors; all are synchronised",
}


def _tell(kind: Any, layer: str, what: str) -> None:
    """Warns once of a class whose `forward` went another way."""
    if what in kind._told:  # noqa: SLF001 - of a class that is made here
        return
    kind._told.add(what)  # noqa: SLF001 - as above
    logger.warning(_WARNINGS[what], _with_others(kind, layer), kind.converted_from.__qualname__)


def _with_others(kind: Any, layer: str) -> str:
    """Names a layer, and says how many more were converted that are still of its class."""
    others = sum(type(each) is kind for each in list(kind._adopted)) - 1  # noqa: SLF001 - of a class that is made here
    return f"layer {layer!r} ({others} more of its class)" if others > 0 else f"layer {layer!r}"


def _tell_unreached(kind: Any, layer: str) -> None:
    _tell(kind, layer, "unreached")


# What torch.compile takes for a constant it computes while it traces. As `torch.compiler.assume_constant_result`, which
# would load the compiler.
_tell_unreached._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name


def synchronized_class(original: type[nn.Module]) -> type[nn.Module]:
    """Class that is `original` with synchronised statistics; the same one each time.

    Args:
        original: a subclass of `nn.BatchNorm1d/2d/3d`, or of `_BatchNorm`, from which torch derives these, for input of
            any dimension. It may have a `forward` of its own.

    Returns:
        The class. A pickle of it names `original`, which must be found by its name where the pickle is loaded.

    Raises:
        TypeError: it is no such class; the text says why.
    """
    if reason := why_not(original):
        raise TypeError(f"{original!r}: {reason}")
    made = _made.get(original)
    if made is None:
        body = {
            "converted_from": original,
            "_told": set(),
            "_adopted": WeakSet(),
            "__module__": original.__module__,
            "__doc__": original.__doc__,
        }
        metaclass: Any = type(original)
        has_forward = any("forward" in vars(kind) for kind in own(original))
        bases = (Intercepted, original, Behind) if has_forward else (Adopted, original, SynchronizedBatchNorm)
        made = _made[original] = _metaclass(metaclass)(f"Synchronized{original.__name__}", bases, body)
    return made


@functools.cache
def _metaclass(metaclass: Any) -> Any:
    """Metaclass of the classes that are made here, for pickle: no module has them by their name."""
    made = type("PickledByItsOriginal", (metaclass,), {})
    copyreg.pickle(made, _reduced)
    return made


def _reduced(kind: type[nn.Module]) -> Any:
    """What pickle writes for a class that is made here; one that somebody derives from it has a name."""
    original = vars(kind).get("converted_from")
    return kind.__qualname__ if original is None else (synchronized_class, (original,))


def adopt(layer: nn.Module) -> nn.Module:
    """Gives a layer the class that is made of its own; it stays the same object, so that all references stay right.

    A layer that cannot be adopted stays as it is.
    """
    if why_left(layer):
        return layer
    try:
        made: Any = synchronized_class(type(layer))
        object.__setattr__(layer, "__class__", made)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        # Of a metaclass of somebody's own, say, that wants more than Python gives it.
        REFUSED[type(layer)] = f"no class can be derived from it: {error}"
        return layer
    made._adopted.add(layer)  # noqa: SLF001 - of a class that is made here
    return _watched(layer)


def _watched(layer: nn.Module) -> nn.Module:
    """Gives a layer the list that it shares with its replicas, whose attributes are its own."""
    vars(layer)["_missed"] = []
    return layer


CONVERSIONS[nn.modules.batchnorm._BatchNorm] = adopt  # noqa: SLF001 - the base of all its batch norms


def rebuilt_layer(original: type[nn.Module], chunks: int = 1) -> nn.Module:
    """Layer without a state, of the class that is made of `original`, as pickles and copies begin with."""
    made = synchronized_class(original)
    layer: Any = made.__new__(made)
    layer.chunks = chunks
    return cast("nn.Module", layer)


# Pickles name them, so they stay where they are whatever becomes of this file.
rebuilt_layer.__module__ = synchronized_class.__module__ = "client"


def _without_bonds(state: Any) -> Any:
    if isinstance(state, tuple):
        return tuple(map(_without_bonds, state))
    if isinstance(state, dict):
        return {name: value for name, value in state.items() if name not in BONDS}
    return state
