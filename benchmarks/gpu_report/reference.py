"""Float64 reference of synchronised batch norm, and the error that a correct result may have.

The reference is the definition, written with torch's plain operators in float64 and differentiated by autograd; it uses
no code of this project. The allowed error of a result follows from the types alone:

- The result is rounded once to its own type, an error of half an ulp. Below the smallest normal number an ulp no
  longer shrinks.
- Before that each value goes through at most `STEPS` operations in the compute type, which is float64 for float64
  inputs and float32 for all others. Each operation rounds once, relative to the largest term.
- Statistics and gradients of parameters are sums over n values. A sum that is computed as a tree rounds each value
  log2(n) times on its way up.
- The variance is a difference of two float64 sums, E[x²] - E[x]², so its error is `DIFFERENCE` roundings of float64
  relative to the larger sum, or mean² / variance times as many relative to the variance.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-5
MOMENTUM = 0.1

# Subtract, scale, weigh and add, for each of the gradient's two terms, plus the roundings of vectors in the terms.
STEPS = 12

# Square, sum, square of the sum, quotient and difference, for both sums.
DIFFERENCE = 10


class TooFar(AssertionError):
    """A result is farther from its reference than rounding explains."""


@dataclass(frozen=True, eq=False, slots=True)
class Expected:
    """Expected value of a result, and its bounds.

    Attributes:
        value: shape (C,) or (C, values per channel), float64.
        error: the largest error of a correct result, of the same shape.
        dtype: the type of the result.
    """

    value: Tensor
    error: Tensor
    dtype: torch.dtype

    def distance(self, found: Tensor) -> float:
        """Returns the largest error in units of the allowed one; infinity for NaN, and for another type or shape.

        Args:
            found: shape (C,) or (N, C, *).
        """
        found = channels_first(found).to(self.value.device)
        if found.dtype != self.dtype or found.shape != self.value.shape:
            return math.inf
        error = (found.double() - self.value).abs()
        share = torch.where(error == 0, error, error / self.error)
        return float(share.nan_to_num(nan=math.inf).max()) if share.numel() else 0.0


def expected(
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> dict[str, Expected]:
    """Returns output, gradients and running statistics of one call of a fresh layer in training.

    Args:
        x: the whole batch, shape (N, C, *), in the layer's type. The reference is computed on its device.
        grad: of the output.
        weight: shape (C,), or None.
        bias: shape (C,), or None.
        mask: shape (N, *), bool: which positions count for the statistics; None for all. At least two must count.
    """
    call = _Call(channels_first(x).double().requires_grad_(), channels_first(grad).double(), weight, bias)
    call.compute(mask)
    with torch.no_grad():
        return call.results(x.dtype)


class _Call:
    """One call in float64: every tensor of the input's size has shape (C, N * positions), and vectors (C, 1)."""

    def __init__(self, x: Tensor, grad: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        self.x, self.grad = x, grad
        self.parameters = {
            name: each.detach().to(x.device, torch.float64).unsqueeze(1).requires_grad_()
            for name, each in (("weight", weight), ("bias", bias))
            if each is not None
        }
        ones = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
        self.scale, self.shift = self.parameters.get("weight", ones), self.parameters.get("bias", 0 * ones)

    def compute(self, mask: Tensor | None) -> None:
        """Computes the output and, by autograd, the gradients."""
        counted = self.x if mask is None else self.x[:, mask.flatten()]
        self.number = counted.shape[1]
        self.mean = counted.mean(1, keepdim=True)
        self.variance = (counted - self.mean).square().mean(1, keepdim=True)
        self.invstd = 1 / (self.variance + EPS).sqrt()
        self.normal = (self.x - self.mean) * self.invstd
        self.output = self.normal * self.scale + self.shift
        self.output.backward(self.grad)

    def results(self, narrow: torch.dtype) -> dict[str, Expected]:
        """Returns the expected results for an input of this type."""
        compute = torch.float64 if narrow == torch.float64 else torch.float32
        unit = torch.finfo(compute).eps / 2
        unit64 = DIFFERENCE * torch.finfo(torch.float64).eps / 2
        # Error of one value, relative to the largest term; the mean's error is in units of the standard deviation.
        lost = self.mean.square() * self.invstd.square() + self.mean.abs() * self.invstd
        relative = (STEPS + math.log2(self.number)) * unit + unit64 * lost
        weighted, normal, scale = self.grad.abs(), self.normal.abs(), self.scale.abs()
        along = weighted * normal
        means = weighted.sum(1, keepdim=True) / self.number + normal * along.sum(1, keepdim=True) / self.number
        output = relative * ((normal + 1) * scale + self.shift.abs())
        found = {
            "output": _rounded(self.output, output, narrow),
            "input gradient": _rounded(self.x.grad, relative * scale * self.invstd * (weighted + means), narrow),
        }
        sums = {"weight": weighted + along, "bias": weighted}
        for name, parameter in self.parameters.items():
            found[f"{name} gradient"] = _rounded(parameter.grad.squeeze(1), (relative * sums[name]).sum(1), compute)
        return found | self._running(relative, compute)

    def _running(self, relative: Tensor, compute: torch.dtype) -> dict[str, Expected]:
        unbiased = self.variance * (self.number / max(self.number - 1, 1))
        mean, variance = MOMENTUM * self.mean, 1 - MOMENTUM + MOMENTUM * unbiased
        # Roundings of the moving average's difference and product; `_rounded` adds the rounding of its sum.
        unit = torch.finfo(compute).eps
        of_mean = unit * mean.abs() + MOMENTUM * relative / self.invstd
        of_variance = unit * variance + MOMENTUM * relative / self.invstd.square()
        return {
            "running mean": _rounded(mean.squeeze(1), of_mean.squeeze(1), compute),
            "running variance": _rounded(variance.squeeze(1), of_variance.squeeze(1), compute),
        }


def _rounded(value: Tensor, error: Tensor, dtype: torch.dtype) -> Expected:
    """Adds half an ulp of the value, in the given type, to its error."""
    about, value = torch.finfo(dtype), value.detach()
    return Expected(value, error + about.eps / 2 * value.abs().clamp(min=about.smallest_normal), dtype)


def channels_first(tensor: Tensor) -> Tensor:
    """Returns a tensor of shape (N, C, *) as (C, N * positions), and a vector as it is."""
    tensor = tensor.detach()
    return tensor if tensor.dim() == 1 else tensor.transpose(0, 1).flatten(1)


def distances(found: dict[str, Tensor], expected: dict[str, Expected]) -> dict[str, float]:
    """Returns the largest error of each result, in units of the allowed one.

    Raises:
        TooFar: the names differ, or a result exceeds its allowed error.
    """
    if found.keys() != expected.keys():
        raise TooFar(f"expected {', '.join(sorted(expected))}, got {', '.join(sorted(found))}")
    shares = {name: each.distance(found[name]) for name, each in expected.items()}
    far = [f"{name}: {_described(found[name], expected[name])}" for name, share in shares.items() if not share <= 1]
    if far:
        raise TooFar("\n".join(far))
    return shares


def _described(found: Tensor, expected: Expected) -> str:
    flat = channels_first(found).to(expected.value.device)
    if flat.dtype != expected.dtype or flat.shape != expected.value.shape:
        return f"expected {expected.dtype} of {tuple(expected.value.shape)}, got {flat.dtype} of {tuple(flat.shape)}"
    share = ((flat.double() - expected.value).abs() / expected.error).nan_to_num(nan=math.inf)
    place = int(share.argmax())
    wanted, got, error = (float(each.flatten()[place]) for each in (expected.value, flat, expected.error))
    nr_far = int((share > 1).sum())
    return f"{nr_far} of {share.numel()} too far; expected {wanted:.9g} ± {error:.2g}, got {got:.9g}"


def has_equal_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal to the last bit."""
    return first.keys() == second.keys() and all(bits(first[name]) == bits(second[name]) for name in first)


def bits(tensor: Tensor) -> bytes:
    """Returns type, shape and bytes of a tensor."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return repr((tensor.dtype, tuple(tensor.shape))).encode() + values
