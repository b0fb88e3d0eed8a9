"""TritonExchange: the plain call of a layer on CUDA, computed by Triton's kernels.

Masks, replicas and second derivatives go by the operators of torch, see `client.kernels.on_device`; what those need to
know of this call is made from its buffers when they ask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from client.autograd import non_finite
from client.autograd.device_exchange import DeviceExchange
from client.autograd.findings import Few, Findings, hand_in_of_rows, verdicts
from client.autograd.functional import Exchanging, Slice, apply_function, backward_by_operators
from client.border import make_readable
from client.kernels.device_statistics import DeviceMoments, DeviceStatistics
from client.kernels.layout import alike, dense
from client.ops.triton import available
from client.ops.triton.running import Running
from client.transports import device_rows
from client.transports.device_rows import DeviceAggregate, DeviceRows
from client.transports.process_group import ProcessGroupPipe
from client.transports.transport import Transport
from statsd_bn.errors import StatsdBNError
from statsd_bn.round_key import BACKWARD, RoundKey

if TYPE_CHECKING:
    from client.ops.triton.launch import Backward, Forward


def serves(slices: Sequence[Slice], capacity: int) -> bool:
    """Whether the kernels serve a call with these slices, to whose rounds each rank brings so many rows."""
    mine = slices[0]
    return capacity == len(slices) == 1 and is_plain(mine) and available.serves(mine.input, mine.weight, mine.bias)


def is_plain(mine: Slice) -> bool:
    """Whether a slice has nothing that the kernels cannot do, and no parameter of another length: they do not look."""
    channels = mine.input.shape[1:2]
    return (
        mine.mask is None
        and mine.holder is None
        and mine.stream is None
        and all(each is None or each.shape == channels for each in (mine.weight, mine.bias))
        and not torch._C._are_functorch_transforms_active()  # noqa: SLF001 - has no public name
    )


@dataclass(slots=True, eq=False)
class TritonExchange(DeviceExchange):
    """One layer's call, see `DeviceExchange`.

    Attributes:
        running: the running statistics that the forward round moves; None where it leaves that to the layer.
        shape: of the input.
        first: the forward pass.
    """

    running: Running | None = None
    shape: tuple[int, ...] = field(init=False)
    first: "Forward" = field(init=False)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Returns the output for the input, after the forward round if there was none."""
        from client.ops.triton import launch  # noqa: PLC0415 - needs Triton

        x = dense(x)
        with launch.on_device_of(x):
            if not self.is_done:
                self._forward_round(launch.Forward, x, weight, bias)
            return self.first.normalise(x)

    def _forward_round(self, made: type["Forward"], x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        verdicts.look(x.device)
        self.shape = tuple(x.shape)
        self.first = first = made(x, device_rows.nr_ranks(self.transport), gathers=self._gathers)

        def write(digest: int) -> tuple[Tensor, Tensor]:
            first.write_row(x, digest)
            return first.row, first.rows

        key = device_rows.run_row(self.transport, write, phase=self.phase)
        at_once = non_finite.raises(self.transport, key)
        running = None if at_once else self.running  # what is refused moves nothing
        first.finish(
            _contiguous(weight), _contiguous(bias), running or Running(), self.eps, clamp=self.eps_mode == "clamp"
        )
        self.has_moved = running is not None
        self._hand_in(first, key, Few(first.flags, self.layer, self.shape), at_once=at_once)
        if not self.has_moved:
            _, (sums, squares) = _total(first.rows, first.ranks)
            self.moments = DeviceMoments(first.work[0], sums, squares)
        first.let_go()
        self.key = key

    @property
    def _gathers(self) -> bool:
        return isinstance(self.transport, ProcessGroupPipe)

    def _hand_in(self, of: "Forward | Backward", key: RoundKey, few: Few | None = None, *, at_once: bool) -> None:
        # Without `self`: a call that is kept as long as its flags would look to checkpoints as if its graph lived.
        others = of.flags if self._gathers else None
        findings = partial(_findings, self.transport, key, of.row, of.rows, others, few)
        hand_in_of_rows(of.flags, of.blocks, findings, at_once=at_once)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of input, weight and bias, as far as they are needed."""
        from client.ops.triton import launch  # noqa: PLC0415 - as above

        x = dense(x)
        if grad.dtype != x.dtype or grad.stride() != x.stride():
            grad, x = alike(grad, x)
        with launch.on_device_of(x):
            return self._gradients(launch.Backward, grad, x, weight, needs)

    def _gradients(
        self, made: type["Backward"], grad: Tensor, x: Tensor, weight: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        verdicts.look(x.device)
        needs_input, needs_weight, needs_bias = needs
        this = made(self.first, x, gathers=self._gathers)

        def write(digest: int) -> tuple[Tensor, Tensor]:
            this.write_row(grad, x, digest)
            return this.row, this.rows

        key = None
        if needs_input:
            key = device_rows.run_row(self.transport, write, self._next_key(BACKWARD))
        else:  # parameters keep their local sums, as under DDP
            write(0)
        of_weight = torch.empty_like(weight) if needs_weight and weight is not None else None
        of_bias = torch.empty(x.shape[1], dtype=torch.float32, device=x.device) if needs_bias else None
        this.finish(_contiguous(weight), of_weight, of_bias, has_round=needs_input)
        if key is None:
            return None, of_weight, of_bias
        self._hand_in(this, key, at_once=False)
        return this.input_gradient(grad, x), of_weight, of_bias

    def __getattr__(self, name: str) -> Any:
        """Returns what the operators of torch and checkpoints ask for, which few calls need: made now, and kept."""
        if name not in _MADE_WHEN_ASKED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = _MADE_WHEN_ASKED[name](self)
        setattr(self, name, value)
        return value


def _findings(
    transport: Transport, key: RoundKey, row: Tensor, rows: Tensor, others: Tensor | None, few: Few | None
) -> Findings:
    ranks = device_rows.ranks_of(transport)
    count, values = _total(rows, len(ranks))
    aggregate = DeviceAggregate(key, count, values, rows.view(len(ranks), -1)[:, 1:], ranks, others)
    return Findings(transport, _rows(row), aggregate, few)


def _total(rows: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    return device_rows.total(rows.view(ranks, -1)[:, 1:], (2, -1))


def _local(exchange: TritonExchange) -> list[DeviceMoments]:
    (count,), ((sums, squares),) = exchange.rows.counts, exchange.rows.values
    return [DeviceMoments(count, sums, squares, exchange.first.count, exchange.shape)]


def _statistics(exchange: TritonExchange) -> DeviceStatistics:
    return DeviceStatistics(exchange.first.work[0].clamp(min=1), *exchange.first.vectors(0, 1, 2))


_MADE_WHEN_ASKED: dict[str, Callable[[TritonExchange], Any]] = {
    "rows": lambda exchange: _rows(exchange.first.row),
    "local": _local,
    "statistics": _statistics,
}


def _rows(row: Tensor) -> DeviceRows:
    return DeviceRows(row[1:2], row[2:].view(1, 2, -1))


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def batch_norm(mine: Slice, exchange: TritonExchange) -> Tensor:
    """Normalises a slice, as `functional.batch_norm` does."""
    output: Tensor = apply_function(_BatchNorm, exchange, mine.input, mine.weight, mine.bias)
    return output


class _BatchNorm(Exchanging):
    @staticmethod
    def forward(ctx: Any, exchange: TritonExchange, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.exchange = exchange
        ctx.save_for_backward(x, weight)
        return exchange.normalise(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, *needs = ctx.needs_input_grad
        compute = backward_by_operators if torch.is_grad_enabled() else _by_kernels
        try:
            return None, *compute(ctx.exchange, needs, grad, x, weight)
        except StatsdBNError as error:
            make_readable(error)
            raise


def _by_kernels(
    exchange: TritonExchange, needs: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, ...]:
    return exchange.gradients(grad, x, weight, needs)
