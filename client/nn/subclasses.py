"""Classes generated from users' subclasses of torch's batch norm; each runs the `forward` of the user's class.

timm's BatchNormAct2d becomes SynchronizedBatchNormAct2d(SubclassWithForward, BatchNormAct2d, SuperForward). In the
original `forward`, `super().forward(x)` calls `SuperForward`, and calls of `batch_norm` are overridden, see
`client.nn.override`.
"""

import copyreg
import functools
import inspect
import logging
import re
from collections.abc import Iterator
from itertools import pairwise
from types import FunctionType
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.utils import parametrize

from client.nn import input_checks
from client.nn.batchnorm import TRANSIENT_ATTRIBUTES, ExecutionMode, SynchronizedBatchNorm
from client.nn.override import BatchNormCall, BatchNormOverride, without_override
from client.ops.checkpointing import is_inside_backward
from statsd_bn.errors import ConfigurationError
from statsd_bn.text import wrap

logger = logging.getLogger("statsd_bn.client")

# Names of collectives over torch's process group, such as fvcore's `differentiable_all_reduce`.
_COLLECTIVE = re.compile("all_?(?:reduce|gather)", re.IGNORECASE)

# The generated class of each original, or the error of deriving it.
_generated: "WeakKeyDictionary[type[nn.Module], type[nn.Module] | str]" = WeakKeyDictionary()


class SynchronizedSubclass:
    """First base of a generated class."""

    converted_from: ClassVar[type[nn.Module]]

    def __init_subclass__(cls, **named: Any) -> None:
        """Hide generated classes from the original's `__init_subclass__`, which may register its subclasses."""
        if "converted_from" not in vars(cls):
            super().__init_subclass__(**named)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle and copy by the original class. A user's subclass of a generated class pickles by its own name."""
        if "converted_from" not in vars(type(self)):
            return super().__reduce_ex__(protocol)
        state = _without_transient(self.__getstate__())  # the original may have its own `__getstate__`
        return rebuilt_layer, (type(self).converted_from, self.chunks), state


class SubclassWithForward(SynchronizedSubclass):
    """First base of a generated class if the original overrides `forward`."""

    _logged_warnings: ClassVar[set[str]] = set()

    def __new__(cls, *args: Any, **named: Any) -> Any:  # noqa: D102 - as `object`'s
        new: Any = super().__new__
        layer = new(cls) if new is object.__new__ else new(cls, *args, **named)
        vars(layer)["_bypassed"] = []  # a list, because replicas share it, while a flag would be set on one replica
        return layer

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the original's `forward`; in training its calls of `batch_norm` are synchronised."""
        if (proxy := input_checks.fx_proxy(self, args, kwargs)) is not None:
            return proxy
        if not self.training and self._accumulator is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if is_compiling():
            return self._traced_forward(*args, **kwargs)
        self.__dict__.pop("_was_called", None)  # left by a call that raised, or that a checkpoint recomputed
        # If `is_special`, the original's increment of `num_batches_tracked` is undone.
        is_special = self._accumulator is not None or self._deferred is not None or is_inside_backward()
        tracked = self._tracked_snapshot() if is_special else None
        with BatchNormOverride(self, SubclassWithForward._compute_call, tracked, _FORWARD_CODE) as override:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not (self.__dict__.pop("_was_called", False) or override.was_called):
            output = self._handle_bypass(output, (*args, *kwargs.values()))
        elif override.has_unrelated_calls:
            _warn_once(type(self), self.layer_name, unrelated=True)
        return output

    def _traced_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """`forward` under torch.compile. Empty batches have a graph of their own: `_handle_bypass` tests for them."""
        self._was_called = False
        with BatchNormOverride(self, SubclassWithForward._compute_traced_call, self._tracked_snapshot()):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not self._was_called:
            output = self._handle_bypass(output, (*args, *kwargs.values()))
        return output

    def _tracked_snapshot(self: Any) -> Tensor | None:
        tracked: Tensor | None = self.num_batches_tracked
        return None if tracked is None else tracked.clone()

    def _compute_traced_call(self: Any, call: BatchNormCall, tracked_before: Tensor | None) -> Any:
        """`_compute_call` under torch.compile: only at run time is it known whether the call counts as a batch."""
        self._was_called = True
        is_deferred = self._active_deferred() is not None
        if tracked_before is None or is_deferred or self._route(None) is not ExecutionMode.COMPILED:
            return self._compute_call(call, tracked_before if is_deferred else None)
        tracked = self.num_batches_tracked
        call.num_batches_tracked = is_due = torch.zeros_like(tracked)
        output = self._compute_call(call, None)
        tracked.copy_(tracked_before + (tracked - tracked_before) * is_due)
        return output

    def _compute_call(self: Any, call: BatchNormCall, tracked_before: Tensor | None) -> Any:
        """Compute one call of `batch_norm` in place of torch."""
        # A `forward` may move parts of the batch into channels, so the input may have more channels than the layer.
        input_checks.check_input(self, call.input, input_checks.channels_of(call))
        deferred = self._active_deferred()
        # The accumulator and the deferred update have one pair of statistics for each layer.
        has_one_pair = self._accumulator is not None or deferred is not None
        if has_one_pair and call.running_mean is not None and call.running_mean is not self.running_mean:
            if self._accumulator is not None:
                return call.forward()
            text = "expected chunks=1: its forward updates other running statistics too"
            raise ConfigurationError(wrap(f"layer {self.layer_name!r}: {text}"))
        if tracked_before is not None:
            # The original has counted a call that may be a recomputed one, or not the last of its mini-batch.
            self.num_batches_tracked.copy_(tracked_before)
        if deferred is not None:
            call.num_batches_tracked = self.num_batches_tracked
            call.momentum = None if self.momentum is None else call.momentum
        if not (call.training or self._accumulator is not None):
            return call.forward()
        return self._normalise(call, call.input, None)

    def _handle_bypass(self: Any, output: Any, arguments: tuple[Any, ...]) -> Any:
        """Finish a `forward` that did not call `batch_norm`."""
        empty = [x for x in arguments if isinstance(x, Tensor) and x.numel() == 0 and x.dim() > 1]
        channels = input_checks.channels_of(self, self.num_features)
        if empty and empty[0].shape[1] == channels and isinstance(output, Tensor) and not self._bypassed:
            # The other ranks wait for this one. Adding the empty sum, 0, makes the round's backward pass part of the
            # output's graph.
            return output + SynchronizedBatchNorm.forward(self, empty[0]).sum()
        # With other inputs the bypass is a mistake that the other ranks make too, so none of them waits in a round.
        if not self._bypassed:
            self._bypassed.append(True)
        _warn_once(type(self), self.layer_name)
        return output


_FORWARD_CODE = SubclassWithForward.forward.__code__


class SuperForward(SynchronizedBatchNorm):
    """Last base of a generated class if the original overrides `forward`: the target of `super().forward`."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise `input` as `SynchronizedBatchNorm` does."""
        if is_compiling():
            self._was_called = True
            return super().forward(input, mask)
        if self.training or self._accumulator is not None:
            vars(self)["_was_called"] = True
        return without_override(super().forward, input, mask)


@input_checks.constant_in_trace
def _warn_once(cls: Any, layer: str, *, unrelated: bool = False) -> None:
    """Log once per class and problem: no call of `batch_norm`, or not every call, gets the layer's tensors."""
    problem = (
        "%s: the forward of %s also calls batch_norm without the layer's tensors; that call is not synchronised"
        if unrelated
        else "%s not synchronised: the forward of %s did not call batch_norm with the layer's tensors; "
        "a rank without rows must call it with an empty tensor of shape (0, C)"
    )
    if problem not in cls._logged_warnings:
        cls._logged_warnings.add(problem)
        logger.warning(problem, f"layer {layer!r}", cls.converted_from.__qualname__)


_names = {*dir(SubclassWithForward), *dir(SuperForward)} - {*dir(nn.SyncBatchNorm), "process_group"}
RESERVED_NAMES = sorted(name for name in _names if not name.startswith("__"))


def has_own_forward(module: nn.Module) -> bool:
    """Whether an instance has a `forward` that replaces its class's, such as a compiled one."""
    return any(name in vars(module) for name in ("forward", "_compiled_call_impl"))  # torch calls these instead


def reason_not_synchronised(module: nn.Module) -> str:
    """Why an unsynchronised module cannot be converted; "" if it can."""
    if has_own_forward(module):
        return "compiled, or its forward was replaced; convert the model first"
    if parametrize.is_parametrized(module):
        return "parametrized; convert the model first"
    if isinstance(module, nn.DataParallel):
        return "" if type(module) is nn.DataParallel else "a subclass of nn.DataParallel"
    return _reserved_names_of(module) or reason_not_derivable(type(module))


def reason_not_derivable(original: type[nn.Module]) -> str:
    """Why no synchronised class can be derived from a class; "" if one can."""
    return next(_reasons_not_derivable(original), "") or _reserved_names_of(original)


def _reasons_not_derivable(original: type[nn.Module]) -> Iterator[str]:
    """Yield the reasons; each check expects that the ones before it have passed."""
    if not (isinstance(original, type) and issubclass(original, nn.modules.batchnorm._BatchNorm)):  # noqa: SLF001 - base of all
        yield "expected a subclass of nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or torch's _BatchNorm"
    if issubclass(original, SynchronizedBatchNorm):
        yield "it is synchronised already"
    if issubclass(original, nn.SyncBatchNorm):
        yield "it is a subclass of nn.SyncBatchNorm, which synchronises already"
    if issubclass(original, nn.modules.lazy.LazyModuleMixin):
        yield "it is lazy; run one batch through the model first"
    if isinstance(error := _generated.get(original), str):
        yield error
    methods = [(name, value) for cls in _user_classes(original) for name, value in vars(cls).items()]
    if any(name == "__call__" for name, _ in methods):
        yield "it overrides __call__, which may bypass its forward"
    # For example, detectron2's NaiveSyncBatchNorm calls a collective, and no `batch_norm`, in training.
    names = _names_in(original.forward)
    if "batch_norm" not in names and any(map(_COLLECTIVE.search, names)):
        yield "its forward synchronises already; see client.register_conversion"
    # An `__init__` is exempt, because `convert_model` does not run it; a new instance of the class would recurse in it.
    if endless := next((name for name, value in methods if name != "__init__" and _calls_super_of_type(value)), ""):
        yield f"its {endless} calls super(self.__class__, self), which recurses for ever in a subclass; write super()"


def _reserved_names_of(original: type[nn.Module] | nn.Module) -> str:
    names = [name for name in RESERVED_NAMES if hasattr(original, name)]
    return f"{' and '.join(names)}: synchronised layers have attributes of this name; rename them" if names else ""


def _calls_super_of_type(method: Any) -> bool:
    """Whether a method calls `super(self.__class__, self)` or `super(type(self), self)`."""
    # Names are in the order of first use, so a method that uses either name earlier is missed.
    return any(one == "super" and other in {"__class__", "type"} for one, other in pairwise(_names_in(method)))


def bypasses_ours(cls: type[SynchronizedBatchNorm]) -> bool:
    """Whether the `forward` of a subclass of a synchronised class calls torch's `batch_norm`."""
    names = _names_in(cls.forward)
    return "batch_norm" in names and "forward" not in names  # if it calls another `forward`, that may be ours


def _names_in(function: Any) -> tuple[str, ...]:
    """Names that a function's code reads, in the order of their first use; () for other objects."""
    if isinstance(function, FunctionType):  # other objects may have an endless chain of `__wrapped__`
        function = inspect.unwrap(function)
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


def _user_classes(original: type[nn.Module]) -> tuple[type, ...]:
    """A class and its bases before torch's own."""
    bases = original.__mro__
    return bases[: next(place for place, cls in enumerate(bases) if cls.__module__ == nn.modules.batchnorm.__name__)]


def synchronized_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return `original` with synchronised statistics, as a generated class; the same one for each call.

    Args:
        original: a subclass of `nn.BatchNorm1d/2d/3d`, or of torch's `_BatchNorm` for input of any dimension. It may
            override `forward`.

    Returns:
        The class. Its pickles contain the name of `original`, which must be importable where they are loaded.

    Raises:
        TypeError: `original` cannot be synchronised; the text says why.
    """
    if reason := reason_not_derivable(original):
        raise TypeError(f"{original!r}: {reason}")
    if original not in _generated:
        body = {"converted_from": original, "__module__": original.__module__, "__doc__": original.__doc__}
        body["_logged_warnings"] = set()
        bases: tuple[type, ...] = SynchronizedSubclass, original, SynchronizedBatchNorm
        if any("forward" in vars(cls) for cls in _user_classes(original)):
            bases = SubclassWithForward, original, SuperForward
        metaclass: Any = type(original)
        _generated[original] = _picklable(metaclass)(f"Synchronized{original.__name__}", bases, body)
    return cast("type[nn.Module]", _generated[original])


@functools.cache
def _picklable(metaclass: Any) -> Any:
    """Derive a metaclass that pickles its classes by their original: generated classes are in no module."""
    derived = type("PickledByItsOriginal", (metaclass,), {})
    copyreg.pickle(derived, _reduce_class)
    return derived


def _reduce_class(cls: type[nn.Module]) -> Any:
    """Pickle a generated class by its original, and a class that a user derives from it by its own name."""
    original = vars(cls).get("converted_from")
    return cls.__qualname__ if original is None else (synchronized_class, (original,))


def convert_subclass(layer: nn.Module) -> nn.Module:
    """Change a layer's class to the generated one, if it can have one; the layer stays the same object."""
    if reason_not_synchronised(layer):
        return layer
    try:
        object.__setattr__(layer, "__class__", synchronized_class(type(layer)))
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        # Raised, for example, by a metaclass that needs more arguments.
        _generated[type(layer)] = f"no class can be derived from it: {error}"
    else:
        vars(layer)["_bypassed"] = []
    return layer


def rebuilt_layer(original: type[nn.Module], chunks: int = 1) -> Any:
    """Create a layer of the class generated from `original`, without state; pickles and copies start with it."""
    generated = synchronized_class(original)
    layer: Any = generated.__new__(generated)
    layer.chunks = chunks
    return layer


# Pickles contain the module of these functions, so it must not change when this file moves.
rebuilt_layer.__module__ = synchronized_class.__module__ = "client"


def _without_transient(state: Any) -> Any:
    if isinstance(state, tuple):
        return tuple(map(_without_transient, state))
    if isinstance(state, dict):
        return {name: value for name, value in state.items() if name not in TRANSIENT_ATTRIBUTES}
    return state
