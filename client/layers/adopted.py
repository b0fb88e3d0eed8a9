"""Adopted classes: a subclass of torch's batch norm whose own `forward` stays, and whose statistics are synchronised.

    BatchNormAct2d                        calls F.batch_norm, then an activation
    SynchronizedBatchNormAct2d            made here: (Adopted, BatchNormAct2d, SynchronizedBatchNorm)

The class that is made here derives from the original one, so `isinstance`, attributes and methods stay. Where the
original's `forward` calls `super().forward(x)` it comes to ours by itself; where it calls `batch_norm`, that is
intercepted.
"""

import logging
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from client.autograd.checkpointing import is_inside_backward
from client.layers import input_checks
from client.layers.batchnorm import SynchronizedBatchNorm
from client.layers.conversion_report import why_left, why_not
from client.layers.interception import Handed, Interception
from client.layers.synchronized import CONVERSIONS

logger = logging.getLogger("statsd_bn.client")

_made: "WeakKeyDictionary[type[nn.Module], type[nn.Module]]" = WeakKeyDictionary()


class Adopted:
    """What a class that is made here has beside the original's and ours; it stands before both."""

    converted_from: ClassVar[type[nn.Module]]
    _is_told = False

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The original's; where it calls `batch_norm` in training, the statistics are those of the whole batch."""
        if not self.training and self._tally is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        counted = self._counted()
        interception = Interception(self, lambda handed: self._normalise_handed(handed, counted))
        with interception:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not torch.compiler.is_compiling():
            was_normalised = vars(self).pop("_was_normalised", False)
            if not (was_normalised or interception.is_reached):
                self._tell_unreached()
        return output

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """A copy or pickle names the original class, and the class made of it is found again."""
        return _rebuilt, (type(self).converted_from,), self.__getstate__()

    def _normalise(self: Any, of: Any, input: Tensor, mask: Tensor | None) -> Tensor:  # noqa: A002 - torch's name
        """Computes one call, to which the original has come by `batch_norm` or by `super().forward`."""
        if not torch.compiler.is_compiling():
            vars(self)["_was_normalised"] = True
        output: Tensor = super()._normalise(of, input, mask)  # type: ignore[misc]
        return output

    def _counted(self: Any) -> Tensor | None:
        """Returns the number of batches before this call, where a call must not simply count on."""
        tracked: Tensor | None = self.num_batches_tracked
        if tracked is None or torch.compiler.is_compiling():
            return None
        is_special = self._tally is not None or self._deferred_now() is not None or is_inside_backward()
        return tracked.clone() if is_special else None

    def _normalise_handed(self: Any, handed: Handed, counted: Tensor | None) -> Tensor:
        """Computes one call of `batch_norm`, in place of torch."""
        input_checks.check(self, handed.input)
        if counted is not None:
            # The original has counted this call: it may be computed again, or not be the last of its mini-batch.
            self.num_batches_tracked.copy_(counted)
        if self._deferred_now() is not None:
            handed.num_batches_tracked = self.num_batches_tracked
            handed.momentum = None if self.momentum is None else handed.momentum
        if not (handed.training or self._tally is not None):
            return handed.forward()
        output: Tensor = self._normalise(handed, handed.input, None)
        return output

    def _tell_unreached(self: Any) -> None:
        """Warns once of a layer whose `forward` went another way."""
        if self._is_told:
            return
        type(self)._is_told = True  # noqa: SLF001 - of all its layers
        logger.warning(
            "layer %r is not synchronised: the forward of %s did not call batch_norm with the layer's tensors",
            self.layer_name,
            self.converted_from.__qualname__,
        )


def synchronized_class(original: type[nn.Module]) -> type[nn.Module]:
    """Class that is `original` with synchronised statistics; the same one each time.

    Args:
        original: a subclass of `nn.BatchNorm1d/2d/3d`, which may have a `forward` of its own.

    Raises:
        TypeError: it is no such class; the text says why.
    """
    if reason := why_not(original):
        raise TypeError(f"{original!r}: {reason}")
    made = _made.get(original)
    if made is None:
        body = {"converted_from": original, "__module__": original.__module__, "__doc__": original.__doc__}
        made = _made[original] = type(
            f"Synchronized{original.__name__}", (Adopted, original, SynchronizedBatchNorm), body
        )
    return made


def adopt(layer: nn.Module) -> nn.Module:
    """Gives a layer the class that is made of its own; it stays the same object, so that all references stay right.

    A layer that cannot be adopted stays as it is.
    """
    if why_left(layer):
        return layer
    layer.__class__ = synchronized_class(type(layer))
    layer.eps_mode = "plus"  # type: ignore[assignment]
    return layer


CONVERSIONS[nn.modules.batchnorm._BatchNorm] = adopt  # noqa: SLF001 - the base of all its batch norms


def _rebuilt(original: type[nn.Module]) -> nn.Module:
    made = synchronized_class(original)
    layer: nn.Module = made.__new__(made)
    return layer
