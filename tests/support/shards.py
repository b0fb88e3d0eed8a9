"""Shards of any dtype, layout and mask: one per member process, one per virtual replica, or all in torch's layer."""

import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import client
from client.data_parallel import any_device
from client.data_parallel.replicate import execute_replication_callbacks
from support.whole_batch import CHANNELS, KINDS, Case

# Kinds for which channels_last is a layout.
IMAGES = [kind for kind in KINDS if kind in {"2d", "3d"}]

MANY = 2**24 + 1  # the first count that float32 cannot hold

# Values, and factors of the loss. Member 0 has each of its four values 2^22 times, member 1 has one value once.
MANY_VALUES = (((0.0, 0.0, 2.0, 2.0), 1.0), ((1.0, -1.0, 2.0, 0.5), 3.0))


def _as_it_is(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return x, lambda leaf: leaf.view_as(leaf)


def _channels_last(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return _as_it_is(x.contiguous(memory_format=channels_last(x)))


def channels_last(x: Tensor) -> torch.memory_format:
    return {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]


# Each layout returns a leaf, and a function that makes the layer's input from the leaf.
LAYOUTS: dict[str, Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]] = {
    "contiguous": _as_it_is,
    "channels_last": _channels_last,
    "channels first": lambda x: (x.transpose(0, 1).contiguous(), lambda leaf: leaf.transpose(0, 1)),
    "last two swapped": lambda x: (x.transpose(-1, -2).contiguous(), lambda leaf: leaf.transpose(-1, -2)),
    "every other": lambda x: (x.repeat_interleave(2, -1), lambda leaf: leaf[..., ::2]),
    "narrow": lambda x: (torch.cat([x[:, :1], x, x[:, :2]], 1), lambda leaf: leaf.narrow(1, 1, CHANNELS)),
    "one sample expanded": lambda x: (x[:1], lambda leaf: leaf.expand(x.shape)),
    "one position expanded": lambda x: (x[..., :1], lambda leaf: leaf.expand(x.shape)),
}


def _some(x: Tensor) -> Tensor:
    """Mask that keeps the first, third and last of every five positions."""
    shape = (x.shape[0], *x.shape[2:])
    turn = torch.arange(math.prod(shape)).view(shape) % 5
    return (turn != 1) & (turn != 3)


def _lengths(x: Tensor) -> Tensor:
    """Mask of a padded batch: sequences of length 1, 2, 3, ..."""
    longest = x.shape[-1]
    lengths = torch.arange(len(x)) % longest + 1
    return torch.arange(longest) < lengths.unsqueeze(1)


def _sizes(x: Tensor) -> Tensor:
    """Mask of images of various sizes in the corner of a larger one."""
    height, width = x.shape[-2:]
    sizes = torch.arange(len(x)).view(-1, 1, 1)
    rows, columns = torch.arange(height).view(1, -1, 1), torch.arange(width).view(1, 1, -1)
    return (rows <= sizes % height) & (columns <= (sizes + 1) % width)


MASKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "absent": lambda _: None,
    "some": _some,
    "lengths": _lengths,
    "sizes": _sizes,
    "all": lambda x: torch.ones(1, *x.shape[2:], dtype=torch.bool).expand(len(x), *x.shape[2:]),
    "none": lambda x: torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.bool),
}


@dataclass(frozen=True)
class Shard:
    """Leaf, input, factors of the loss and mask of one replica; `seen` receives the input's gradient unchanged."""

    leaf: Tensor
    x: Tensor
    factors: Tensor
    mask: Tensor | None
    seen: list[Tensor] = field(default_factory=list)

    @property
    def counted(self) -> Tensor:
        """Shape (N, *): the mask, or all True."""
        return torch.ones_like(self.x[:, 0], dtype=torch.bool) if self.mask is None else self.mask

    def pick(self, values: Tensor) -> Tensor:
        """Returns the (N, C, *) values at the P unmasked positions: shape (P, C)."""
        return values.movedim(1, -1)[self.counted]


@dataclass(frozen=True)
class Shards(Case):
    """A case whose shards differ in more than size; tuples have an entry per shard, or are empty for the default.

    `padding` is the input at masked positions, None for random numbers. The loss includes masked positions only with
    `loss_at_masked`.
    """

    input_dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    padding: float | None = None
    loss_at_masked: bool = False
    device: str = "cpu"

    def shards(self) -> list[Shard]:
        x, factors, _ = self.tensors()
        parts = zip(x.split(self.sizes), factors.split(self.sizes), strict=True)
        ways = itertools.zip_longest(parts, self.input_dtypes, self.layouts, self.masks)
        return [self._shard(*part, *way) for part, *way in ways]

    def _shard(self, x: Tensor, factors: Tensor, dtype: str | None, layout: str | None, mask: str | None) -> Shard:
        x, factors = (values.to(getattr(torch, dtype or self.dtype)) for values in (x, factors))
        counted = MASKS[mask or "absent"](x)
        if counted is not None:
            hidden = ~counted.unsqueeze(1)
            x = x if self.padding is None else x.masked_fill(hidden, self.padding)
            factors = factors if self.loss_at_masked else factors.masked_fill(hidden, 0)
            counted = counted.to(self.device)
        leaf, arrange = LAYOUTS[layout or "contiguous"](x)
        leaf = leaf.to(self.device).requires_grad_()
        shard = Shard(leaf, arrange(leaf), factors.to(self.device), counted)
        shard.x.register_hook(shard.seen.append)
        return shard

    def layer(self, *, synchronised: bool) -> nn.Module:
        return super().layer(synchronised=synchronised).to(self.device)


@dataclass(frozen=True)
class Outcome:
    """Results of one step: lists have an entry per shard, parameter gradients and buffers are common to all shards."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    leaves: list[Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        lists = {"output": self.outputs, "input gradient": self.gradients, "leaf gradient": self.leaves}
        named = {f"{name} {shard}": part for name, parts in lists.items() for shard, part in enumerate(parts)}
        return named | {f"{name} gradient": value for name, value in self.parameters.items()} | self.buffers


def as_members(connection: client.Connection, cases: list[Shards]) -> bytes:
    """Runs the cases one after the other, as a member process with one replica."""
    file = io.BytesIO()
    torch.save([asdict(_as_member(connection, case)) for case in cases], file)
    return file.getvalue()


def with_many_values(connection: client.Connection) -> tuple[float, float, list[float], list[float]]:
    """A step with MANY values; returns running mean and variance, an output row, and the leaf's gradient."""
    layer = client.SynchronizedBatchNorm1d(1, momentum=1.0, dtype=torch.float64)
    layer.layer_name = "bn"
    rows, part = ((MANY - 1) // 4, 0) if connection.rank == 0 else (1, 1)
    leaf, factors = (torch.tensor(both[part]).view(1, 1, -1) for both in MANY_VALUES)
    x = leaf.requires_grad_().expand(rows, -1, -1)
    output = layer(x)
    output.backward(factors.expand_as(x))
    return layer.running_mean.item(), layer.running_var.item(), output[0, 0].tolist(), leaf.grad[0, 0].tolist()


def autocast_model(kind: type[nn.Module] | None = None) -> nn.Sequential:
    """A convolution, and a layer of the given class; without a class torch's layer and an activation in place."""
    torch.manual_seed(0)
    rest = [kind(CHANNELS)] if kind else [nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True)]
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 3, bias=False), *rest).float()


def autocast_step(
    model: nn.Module, forward: Callable[[Tensor], Tensor], device: str, dtype: str, own: slice = slice(None)
) -> dict[str, Tensor]:
    """A step on the samples `own`: forward under autocast, and backward outside of it, as torch demands."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 6, 6, generator=generator)[own].to(device).requires_grad_()
    factors = torch.randn(5, CHANNELS, 4, 4, generator=generator)[own].to(device)
    with torch.autocast(torch.device(device).type, getattr(torch, dtype)):
        output = forward(x)
    (output * factors).sum().backward()
    gradients = {f"{name} gradient": parameter.grad for name, parameter in model.named_parameters()}
    return {"output": output.detach(), "input gradient": x.grad, **gradients, **dict(model.named_buffers())}


def as_autocast_member(
    connection: client.Connection, dtype: str, kinds: Sequence[type[nn.Module] | None] = (None,), backend: str = ""
) -> bytes:
    """A step with a model of each class, compiled if a backend is given; member 0 has two samples, member 1 three."""
    own = slice(2) if connection.rank == 0 else slice(2, 5)
    found = []
    for kind in kinds:
        torch.compiler.reset()
        model = client.convert_model(autocast_model(kind))
        run = torch.compile(model, fullgraph=True, backend=backend) if backend else model
        found.append(autocast_step(model, run, "cpu", dtype, own))
    file = io.BytesIO()
    torch.save(found, file)
    return file.getvalue()


def joined(results: list[bytes]) -> list[Outcome]:
    members = [loaded(result) for result in results]
    return [_together([Outcome(**outcome) for outcome in outcomes]) for outcomes in zip(*members, strict=True)]


def refused(connection: client.Connection, cases: list[Shards]) -> list[tuple[str, bool]]:
    """For each case, the error on this member, and whether its layer kept its state; a valid step follows each case."""
    results = []
    for case in cases:
        shard, layer = case.shards()[connection.rank], case.layer(synchronised=True)
        try:
            layer(shard.x, shard.mask)
        except ValueError as error:
            is_intact = all(torch.equal(value, case.tensors()[2][name]) for name, value in layer.state_dict().items())
            results.append((str(error), is_intact))
        _as_member(connection, Shards(case.kind, (2,) * len(case.sizes)))
    return results


def loaded(result: bytes) -> Any:
    return torch.load(io.BytesIO(result), weights_only=True)


def as_virtual_replicas(case: Shards) -> Outcome:
    layer, shards = case.layer(synchronised=True), case.shards()
    devices = [torch.device(case.device)] * len(shards)
    replicas = any_device.replicate(layer, devices)
    execute_replication_callbacks(replicas)
    meeting = vars(replicas[0])["_barrier"]
    inputs = [(shard.x, shard.mask) for shard in shards]
    outputs = any_device.parallel_apply(replicas, inputs, [{}] * len(shards), devices, meeting)
    torch.autograd.backward([(output * shard.factors).sum() for output, shard in zip(outputs, shards, strict=True)])
    for replica in replicas:
        assert_same_bits(dict(replica.named_buffers()), dict(layer.named_buffers()))
    return _outcome(layer, shards, outputs)


def on_the_whole_batch(case: Shards, dtype: torch.dtype | None = None) -> Outcome:
    """Torch's layer on all shards together; masked shards are packed to (P, C), and so is their output."""
    shards, layer = case.shards(), case.layer(synchronised=False).to(dtype)
    parts = [shard.pick(shard.x) if case.masks else shard.x for shard in shards]
    sizes = [len(part) for part in parts]
    if case.masks:
        layer.__class__ = nn.BatchNorm1d
    outputs = layer(torch.cat([part.to(dtype) for part in parts])).split(sizes)
    factors = [shard.pick(shard.factors) if case.masks else shard.factors for shard in shards]
    torch.autograd.backward([(output * factor).sum() for output, factor in zip(outputs, factors, strict=True)])
    return _outcome(layer, shards, list(outputs))


def by_formula(case: Shards) -> Outcome:
    """(x - mean) / sqrt(var + eps) * weight + bias at all positions, mean and var over unmasked ones; no buffers."""
    shards, layer = case.shards(), case.layer(synchronised=False)
    packed = torch.cat([shard.pick(shard.x) for shard in shards])
    mean, variance = packed.mean(0), packed.var(0, correction=0)
    outputs = [
        ((shard.x.movedim(1, -1) - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias).movedim(-1, 1)
        for shard in shards
    ]
    torch.autograd.backward([(output * shard.factors).sum() for output, shard in zip(outputs, shards, strict=True)])
    return _outcome(nn.ParameterDict(dict(layer.named_parameters())), shards, outputs)


def everywhere(members: Callable[..., list[Any]], cases: list[Shards]) -> list[Outcome]:
    """Runs cases in processes and in virtual replicas, asserts equal bits, and returns the outcomes."""
    through_a_server = joined(members(len(cases[0].sizes), as_members, cases))
    for case, outcome in zip(cases, through_a_server, strict=True):
        assert_same_bits(as_virtual_replicas(case).named(), outcome.named())
    return through_a_server


def packed(outcome: Outcome, case: Shards) -> Outcome:
    outputs = [shard.pick(output) for shard, output in zip(case.shards(), outcome.outputs, strict=True)]
    return Outcome(outputs, outcome.gradients, outcome.leaves, outcome.parameters, outcome.buffers)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compares with a tolerance relative to each value and to the largest value of its tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        size = value.detach().abs().max().item() if value.numel() else 0.0
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance * size, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compares values, types and strides exactly; NaN equals NaN."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, check_stride=True)


def _as_member(connection: client.Connection, case: Shards) -> Outcome:
    shard = case.shards()[connection.rank]
    layer = case.layer(synchronised=True)
    output = layer(shard.x) if shard.mask is None else layer(shard.x, shard.mask)
    (output * shard.factors).sum().backward()
    return _outcome(layer, [shard], [output])


def _outcome(layer: nn.Module, shards: list[Shard], outputs: list[Tensor]) -> Outcome:
    return Outcome(
        [output.detach() for output in outputs],
        [gradient for shard in shards for gradient in shard.seen],
        [shard.leaf.grad for shard in shards],
        {name: parameter.grad for name, parameter in layer.named_parameters()},
        dict(layer.named_buffers()),
    )


def _together(outcomes: list[Outcome]) -> Outcome:
    """Joins outcomes; parameter gradients are added in the order of members, as replicas add theirs."""
    for outcome in outcomes:
        assert_same_bits(outcome.buffers, outcomes[0].buffers)
    return Outcome(
        [output for outcome in outcomes for output in outcome.outputs],
        [gradient for outcome in outcomes for gradient in outcome.gradients],
        [leaf for outcome in outcomes for leaf in outcome.leaves],
        {name: sum(outcome.parameters[name] for outcome in outcomes) for name in outcomes[0].parameters},
        outcomes[0].buffers,
    )


HALVES = ("float16", "bfloat16")

# Our layer and the exact result round once from a wider type, and may differ by one unit in the last place. Parameter
# gradients are rounded on each replica and then added, so they may differ by one such unit of the largest value.
RESOLUTION = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 1e-5, "float64": 1e-10}

# The convolution rounds differently for each batch size, and its weight's gradient is rounded on each replica.
AUTOCAST = {dtype: 2 * RESOLUTION[dtype] for dtype in HALVES}


def rounded(exact, like):
    return {name: value.to(like[name].dtype) for name, value in exact.items()}


def without(named, *words):
    return {name: value for name, value in named.items() if not any(word in name for word in words)}


def assert_equal_to_torch_and_to_the_exact_result(found, case):
    """Compares with torch and, more strictly, with float64: torch uses half precision where our layer does not."""
    resolution = max(RESOLUTION[dtype] for dtype in (case.dtype, *case.input_dtypes))
    found, expected = found.named(), on_the_whole_batch(case).named()
    assert_equal(found, expected, resolution)
    exact = rounded(on_the_whole_batch(case, torch.float64).named(), found)
    assert_equal(found, exact, resolution)
    for name in without(found, "weight", "bias", "running", "tracked"):
        off = (found[name].double() - exact[name].double()).abs()
        unit = torch.finfo(found[name].dtype).eps * exact[name].double().abs()
        assert (off <= unit + 1e-5).all(), name


def autocast_on_the_whole_batch(device, dtype):
    model = autocast_model().to(device)
    expected = autocast_step(model, model, device, dtype)
    assert expected["output"].dtype == getattr(torch, dtype)
    return expected
