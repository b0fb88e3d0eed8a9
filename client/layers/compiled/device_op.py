"""`custom_op` once more, for rows that stay on their device: what goes from forward to backward stays there too.

Only what the host knows by itself, the ticket, is on the host. Where the rows have to go over the host all the same,
as with a process group of gloo's, the operators do what those of `custom_op` do, and copy.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.autograd.device_exchange import DeviceExchange, backward_round
from client.autograd.exchange import Exchange, phase_of_forward
from client.border import make_readable
from client.kernels import on_device
from client.kernels.device_statistics import DeviceMoments, DeviceStatistics
from client.kernels.statistics import Statistics
from client.layers import running_stats
from client.layers.custom_op import (
    NOT_DEFERRED,
    THIS_PROCESS,
    backward_key,
    due_after,
    exchanged,
    gradients,
    keep_whole,
    named,
    transport_of,
)
from client.layers.micro_batches import Deferred
from client.transports import device_rows
from client.transports.choose import company_in
from client.transports.device_rows import DeviceRows
from client.transports.named_process_group import NamedProcessGroup
from statsd_bn.errors import StatsdBNError
from statsd_bn.moments import Moments
from statsd_bn.round_key import FORWARD

# Rows of the statistics: those of `DeviceStatistics`, what the running statistics move towards, and if they do. A
# single number fills its row.
COUNT, MEAN, INVSTD, SLOPE, NEWEST_COUNT, NEWEST_MEAN, NEWEST_VARIANCE, IS_DUE = range(8)
ROWS = 8

# Entries of the ticket: the round's step and call, and the exchange's number.
TICKET = 3


def suits(layer: Any, x: Tensor) -> bool:
    """Whether these operators are the ones for a layer: whether its rows may stay on the device of `x`."""
    if x.device.type not in device_rows.TYPES:
        return False
    company = company_in(layer.group) if layer.training else None
    return company is None or isinstance(company, NamedProcessGroup)


def forward(layer: Any, x: Tensor, mask: Tensor | None, deferred: Deferred | None) -> Tensor:
    """Normalises `x` by the operator, and moves the running statistics by what it returns; see `custom_op.forward`."""
    output: Tensor
    transport = named(layer.group) if layer.training else THIS_PROCESS
    number = NOT_DEFERRED if deferred is None else deferred.number
    output, statistics, _ = batch_norm_on_device(
        x,
        layer.weight,
        layer.bias,
        mask,
        layer.layer_name,
        *transport,
        layer.eps,
        layer.eps_mode,
        number,
        phase_of_forward(needs_gradient=x.requires_grad),
    )
    if layer.training:
        statistics = statistics.detach()
        running_stats.move(
            layer,
            statistics[NEWEST_MEAN],
            statistics[NEWEST_VARIANCE],
            is_due=statistics[IS_DUE, 0].long(),
            has_values=statistics[NEWEST_COUNT, 0] > 0,
        )
    return output


@torch.library.custom_op("statsd_bn::batch_norm_on_device", mutates_args=())
def batch_norm_on_device(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    layer: str,
    group: str,
    size: int,
    eps: float,
    eps_mode: str,
    deferred: int = NOT_DEFERRED,
    phase: str = FORWARD,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises this process's slice with the statistics of the whole batch; arguments as for `custom_op.batch_norm`.

    Returns:
        The output; the statistics, shape (8, C), float64, on the device of `x`; the ticket, shape (3,), int64, on the
        host; their rows and entries are named above.
    """
    transport = transport_of(layer, group, size)
    capacity = device_rows.capacity_of(transport, [x], phase)
    fresh = Exchange(transport, layer, eps, eps_mode, phase)
    if capacity:
        fresh = DeviceExchange(transport, layer, eps, eps_mode, phase, capacity=capacity)
    try:
        exchange = exchanged(x, mask, fresh)
    except StatsdBNError as error:
        make_readable(error)
        raise
    assert exchange.key is not None  # noqa: S101 - the forward round has set it
    due = due_after(exchange.moments, deferred) if exchange is fresh else None
    output: Tensor = exchange.kernels.normalise(x, exchange.statistics, weight, bias)
    statistics = _on_device(exchange, due) if capacity else _copied(exchange, due, x)
    return output, statistics, torch.tensor((exchange.key.step, exchange.key.call, exchange.number))


def _on_device(exchange: Exchange, due: DeviceMoments | None) -> Tensor:
    found: DeviceStatistics = exchange.statistics
    mean = found.mean
    if due is None:
        newest = [torch.zeros_like(mean)] * 4
    else:
        has_ended_well = (~due.count.isnan()).double()
        newest = [*_rows(mean, due.count), due.mean(), due.variance(unbiased=True), *_rows(mean, has_ended_well)]
    return torch.stack((*_rows(mean, found.count), mean, found.invstd, found.slope, *newest))


def _rows(like: Tensor, *numbers: Tensor) -> list[Tensor]:
    return [number.expand_as(like) for number in numbers]


def _copied(exchange: Exchange, due: Moments | None, x: Tensor) -> Tensor:
    found: Statistics = exchange.statistics
    statistics = np.zeros((ROWS, x.shape[1]))
    statistics[COUNT:NEWEST_COUNT] = np.stack(
        (np.full_like(found.mean, found.count), found.mean, found.invstd, found.slope)
    )
    if due is not None:
        statistics[NEWEST_COUNT] = due.count
        statistics[NEWEST_MEAN], statistics[NEWEST_VARIANCE] = running_stats.newest(due)
        statistics[IS_DUE] = 1
    return torch.from_numpy(statistics).to(x.device)


@torch.library.custom_op("statsd_bn::batch_norm_backward_on_device", mutates_args=())
def batch_norm_backward_on_device(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    statistics: Tensor,
    ticket: Tensor,
    layer: str,
    group: str,
    size: int,
    needs_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of input (empty if it needs none), weight and bias; the arguments are the forward's."""
    transport = transport_of(layer, group, size)
    key = backward_key(transport, *ticket.tolist()) if needs_input else None
    if not device_rows.stay(transport, [x]):
        count, *rest = statistics[:NEWEST_COUNT].cpu().numpy()
        return gradients(grad, x, weight, mask, Statistics(int(count[0]), *rest), transport, key)
    found = DeviceStatistics(statistics[COUNT, 0], statistics[MEAN], statistics[INVSTD], statistics[SLOPE])
    grad, x = on_device.for_backward(grad, x, found, mask)
    local = on_device.backward_sums(grad, x, found, mask)
    by_input = x.new_empty(0)
    if key is not None:
        rows = DeviceRows.of([on_device.count(x, mask)], [local])
        total = backward_round(transport, rows, device_rows.capacity_of(transport, [x]), key)
        by_input = on_device.input_gradient(grad, x, found, total, weight, mask)
    return by_input, on_device.vector(on_device.by_weight(local, found), x), on_device.vector(local[0], x)


def _fake(x: Tensor) -> tuple[Tensor, Tensor]:
    statistics = torch.empty(ROWS, x.shape[1], dtype=torch.float64, device=x.device)
    return statistics, torch.empty(TICKET, dtype=torch.int64, device="cpu")


keep_whole(batch_norm_on_device, batch_norm_backward_on_device, _fake)
