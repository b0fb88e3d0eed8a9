"""The backends: different ways to compute a layer's four steps, and the choice between them."""

from typing import Protocol

from torch import Tensor

from client.kernels import cpu, cuda
from client.kernels.elementwise import Elementwise, around
from client.kernels.layout import alike, dense
from client.kernels.statistics import Statistics
from client.kernels.vectors import on_host, vector
from statsd_bn.moments import Moments
from statsd_bn.reduction import FloatArray


class Backend(Protocol):
    """Computes the four steps of a layer for slices of one kind; `dispatch` says what each step returns.

    All backends return the same up to rounding. A faster way to compute the steps becomes a class with these six
    methods, and goes into the list below.

    Example usage:

        backend = backend_for(x, mask)
        moments = backend.moments(x, number)
        output = backend.normalise(x, statistics, weight, bias)
        grad, x = backend.for_backward(grad, x, statistics)
        sums = backend.backward_sums(grad, x, statistics)
        gradient = backend.input_gradient(grad, x, statistics, means, weight)
    """

    def takes(self, x: Tensor) -> bool:
        """Whether it can compute with `x`, which need not be dense."""

    def moments(self, x: Tensor, number: int) -> Moments:
        """Returns the moments of a slice with so many values per channel, at least one."""

    def normalise(self, x: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns the output, in the type of `x`."""

    def for_backward(self, grad: Tensor, x: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Returns both as the next two steps read them, which copy only what does not lie so."""

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: Statistics) -> FloatArray:
        """Returns Σdy and Σdy·(x - mean), shape (2, C)."""

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: Statistics, means: FloatArray, weight: Tensor | None
    ) -> Tensor:
        """Returns dx, in the type of `x`; `means`: Σdy / n and slope * Σdy·(x - mean) / n, shape (2, C)."""


class Cpu:
    """Torch's vectorised operators on a CPU; statistics far from zero it leaves to the elementwise ones."""

    takes = staticmethod(cpu.takes)

    def moments(self, x: Tensor, number: int) -> Moments:
        """Centres the values only where they are far from zero."""
        x = dense(x)
        first, second = cpu.sums(x, x)
        if cpu.are_near_zero(first, second, number):
            return Moments(number, first, second)
        center = vector(first / number, x).double().numpy()
        return around(number, center, *cpu.shifted_sums(x, center))

    def normalise(self, x: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Scales without centring."""
        if not statistics.is_near_zero:
            return _ELEMENTWISE.normalise(x, statistics, weight, bias)
        x = dense(x)
        output = cpu.normalise_small(x, statistics.mean, statistics.invstd, weight, bias)
        if output is not None:
            return output
        factor = _weighted(statistics, weight)
        addend = -factor * statistics.mean
        return cpu.scale(x, factor, addend if bias is None else addend + on_host(bias))

    def for_backward(self, grad: Tensor, x: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Returns both alike, except for the elementwise operators."""
        return alike(grad, x) if statistics.is_near_zero else (grad, x)

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: Statistics) -> FloatArray:
        """Sums without centring, and takes the mean's part off."""
        if not statistics.is_near_zero:
            return _ELEMENTWISE.backward_sums(grad, x, statistics)
        found = cpu.sums(*alike(grad, x))
        found[1] -= statistics.mean * found[0]
        return found

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: Statistics, means: FloatArray, weight: Tensor | None
    ) -> Tensor:
        """Combines gradient and input without centring."""
        if not statistics.is_near_zero:
            return _ELEMENTWISE.input_gradient(grad, x, statistics, means, weight)
        invstd = statistics.invstd
        by_grad = _weighted(statistics, weight)
        factor = -by_grad * (invstd * invstd * means[1])
        return cpu.combine(*alike(grad, x), by_grad, factor, -by_grad * means[0] - factor * statistics.mean)


class Cuda:
    """The fused operators of torch's own SyncBatchNorm."""

    takes = staticmethod(cuda.takes)

    def moments(self, x: Tensor, number: int) -> Moments:
        """Leaves values far from zero to the elementwise operators."""
        found = cuda.moments(dense(x))
        return Moments.from_centred(number, *found) if found else _ELEMENTWISE.moments(x, number)

    def normalise(self, x: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """As `cuda.normalise`."""
        return cuda.normalise(dense(x), statistics.mean, statistics.invstd, weight, bias)

    def for_backward(self, grad: Tensor, x: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - the interface's
        """Returns both alike."""
        return alike(grad, x)

    def backward_sums(self, grad: Tensor, x: Tensor, statistics: Statistics) -> FloatArray:
        """As `cuda.backward_sums`."""
        return cuda.backward_sums(*alike(grad, x), statistics.mean, statistics.invstd)

    def input_gradient(
        self, grad: Tensor, x: Tensor, statistics: Statistics, means: FloatArray, weight: Tensor | None
    ) -> Tensor:
        """As `cuda.input_gradient`."""
        return cuda.input_gradient(*alike(grad, x), statistics.mean, statistics.invstd, means, weight)


def _weighted(statistics: Statistics, weight: Tensor | None) -> FloatArray:
    return statistics.invstd if weight is None else statistics.invstd * on_host(weight)


_ELEMENTWISE = Elementwise()

# The first that takes a slice computes it; what none takes, the elementwise operators do.
_WITHOUT_MASK: tuple[Backend, ...] = (Cpu(), Cuda())


def backend_for(x: Tensor, mask: Tensor | None = None) -> Backend:
    """Returns the backend for a slice.

    Args:
        x: shape (N, C, *).
        mask: shape (N, *), bool: which positions count; None for all.
    """
    if mask is not None:
        return Elementwise(mask)
    for backend in _WITHOUT_MASK:
        if backend.takes(x):
            return backend
    return _ELEMENTWISE
