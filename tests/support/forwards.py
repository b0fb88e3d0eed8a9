"""Forwards that call `F.batch_norm`, and come to it and to their globals in many ways."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.nn.functional import batch_norm

functional = F
CHANNELS = 4
FACTOR = 2.0
nr_calls = 0


def normalised(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, layer.training)


class LikeTimms(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__(CHANNELS, momentum=momentum, dtype=torch.float64)
        self.drop = nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        x = F.batch_norm(x, *tensors, training=self.training, momentum=factor, eps=self.eps)
        return self.act(self.drop(x))


class Below(LikeTimms):
    """Calls the forward of another class, which is a copy too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Twice(LikeTimms):
    """Normalises twice by the layer's tensors."""

    def forward(self, x: Tensor) -> Tensor:
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        x = F.batch_norm(x, *tensors, self.training).sin()
        return F.batch_norm(x, *tensors, self.training)


class Helping(LikeTimms):
    """Normalises the second time in a function."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return normalised(self, x.sin())


class Method(LikeTimms):
    """Normalises the second time in a method."""

    def again(self, x: Tensor) -> Tensor:
        return normalised(self, x)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return self.again(x.sin())


class Hidden(LikeTimms):
    """Has a method that is called as one of tensors."""

    def sin(self, x: Tensor) -> Tensor:
        return normalised(self, x)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return self.sin(x.abs())


class Imported(LikeTimms):
    """Normalises the second time by a name of its module."""

    def forward(self, x: Tensor) -> Tensor:
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return batch_norm(F.batch_norm(x, *tensors, self.training).sin(), *tensors, self.training)


class ImportedWithin(LikeTimms):
    """Normalises the second time by a name that it imports."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.functional import batch_norm as again  # noqa: PLC0415 - that is what it does

        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return again(F.batch_norm(x, *tensors, self.training).sin(), *tensors, self.training)


class OperatorToo(LikeTimms):
    """Normalises the second time by the operator."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.running_mean, self.running_var
        x = F.batch_norm(x, *kept, self.weight, self.bias, self.training).sin()
        return torch.batch_norm(x, self.weight, self.bias, *kept, self.training, 0.1, self.eps, cudnn_enabled=False)


class Inside(LikeTimms):
    """Normalises in a function inside."""

    def forward(self, x: Tensor) -> Tensor:
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        (x,) = [F.batch_norm(one, *tensors, self.training) for one in (x,)]
        return x


class Access(LikeTimms):
    """Decides itself what its attributes are."""

    def __getattr__(self, name: str) -> object:
        return (lambda x: normalised(self, x)) if name == "tanh" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return self.tanh(x.sin())


class Counting(LikeTimms):
    """Changes a global."""

    def forward(self, x: Tensor) -> Tensor:
        global nr_calls  # noqa: PLW0603 - that is what it does
        nr_calls += 1
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class Comparing(LikeTimms):
    """Hands on what `F` is."""

    def forward(self, x: Tensor) -> Tensor:
        assert F is torch.nn.functional
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class Constant(LikeTimms):
    """Reads a global."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return x * FACTOR


class AllGlobals(LikeTimms):
    """Reads a global in another way."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return x * globals().get("FACTOR")


class Closed(LikeTimms):
    """Has a function in a cell."""


def _closed(again: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return again(self, x.sin())

    return forward


Closed.forward = _closed(normalised)


class Named(LikeTimms):
    """Has a default for an argument that is given by name."""

    def forward(self, x: Tensor, *, by: float = 3.0) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training) * by


class Looked(LikeTimms):
    """Normalises the second time by a method that it looks up."""

    def again(self, x: Tensor) -> Tensor:
        return normalised(self, x)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return getattr(self, "aga" + "in")(x.sin())


class Given(LikeTimms):
    """Is given a function that it calls."""

    def forward(self, x: Tensor, then: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return x if then is None else then(self, x.sin())


class Before(LikeTimms):
    """Normalises the first time in a function."""

    def forward(self, x: Tensor) -> Tensor:
        x = normalised(self, x).sin()
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class ImportedBefore(LikeTimms):
    """Normalises the first time by a name of its module."""

    def forward(self, x: Tensor) -> Tensor:
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(batch_norm(x, *tensors, self.training).sin(), *tensors, self.training)


class Either(LikeTimms):
    """Normalises small batches in another way."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return normalised(self, x)


class Guarded(LikeTimms):
    """Normalises in another way if it fails."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            factor = {2: FACTOR, 7: FACTOR}[len(x)]
            x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        except KeyError:
            return normalised(self, x) * FACTOR
        return x * factor


class Disguised(LikeTimms):
    """Has methods that are called as those of tensors."""

    def dim(self, x: Tensor) -> Tensor:
        return normalised(self, x).sin()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dim(x)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class Checking(LikeTimms):
    """Checks its input itself."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        self.kept = normalised(self, input)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        x = x + self.kept
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class Scaling(LikeTimms):
    """Changes one of its tensors by a method that is not known."""

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean.mul_(1.0)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class Nested(LikeTimms):
    """Has two calls among the arguments of `F.batch_norm`, of which the first is known."""

    def forward(self, x: Tensor) -> Tensor:
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(x * float(FACTOR) + normalised(self, x).sin(), *tensors, self.training)


class WithDefault(LikeTimms):
    """Has arguments beside its input."""

    def forward(self, x: Tensor, times: float = 2.0, *, plus: float = 0.5) -> Tensor:
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(x, *tensors, self.training) * times + plus


class WithDefaultAndMore(LikeTimms):
    """The same, which does not begin plainly."""

    def forward(self, x: Tensor, times: float = 2.0, *, plus: float = 0.5) -> Tensor:
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(x.mul(1.0), *tensors, self.training) * times + plus


class WithClass(LikeTimms):
    """Defines a class, whose body looks for globals in another way."""

    def forward(self, x: Tensor) -> Tensor:
        class Options:
            factor = FACTOR

        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training) * Options.factor


class TwoNames(LikeTimms):
    """Has two names for `torch.nn.functional`, of which either may get another meaning."""

    def forward(self, x: Tensor) -> Tensor:
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        x = F.batch_norm(x, *tensors, self.training)
        return functional.batch_norm(x.sin(), *tensors, self.training)


# Until they come to `F.batch_norm` they do something that must be looked at.
NOT_PLAIN = [Before, ImportedBefore, Either, Guarded, Disguised, Checking, Scaling, Nested]

ALL = [
    *(
        LikeTimms,
        Below,
        Twice,
        TwoNames,
        WithDefault,
        WithDefaultAndMore,
        WithClass,
        Named,
        Given,
        Helping,
        Method,
        Hidden,
        Imported,
        ImportedWithin,
    ),
    *(OperatorToo, Inside, Access, Counting, Comparing, Constant, AllGlobals, Closed, Looked),
    *NOT_PLAIN,
]
