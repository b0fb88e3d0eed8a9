"""DeviceExchange: one call of one layer whose rows stay on their devices."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from client.autograd.exchange import Exchange
from client.autograd.findings import Few, Findings, verdicts
from client.kernels import on_device
from client.kernels.device_statistics import DeviceMoments, DeviceStatistics
from client.transports import device_rows
from client.transports.device_rows import DeviceRows
from client.transports.transport import Transport
from statsd_bn.round_key import RoundKey


@dataclass(slots=True, eq=False)
class DeviceExchange(Exchange):
    """One layer's call, see `Exchange`; what it knows are tensors on the device of the first local replica.

    Attributes:
        capacity: how many rows each rank brings, see `device_rows.capacity_of`.
        local: what the local replicas contributed to the forward round.
    """

    kernels: ClassVar[Any] = on_device

    capacity: int = 0
    local: list[DeviceMoments] = field(init=False)

    def forward(self, local: list[DeviceMoments]) -> None:
        """Exchanges the local replicas' moments for those of the whole batch.

        Raises:
            StatsdBNError: an earlier round has failed; or ValueError, if its whole batch had too few values.
        """
        self.local = local
        self.rows = rows = DeviceRows.of([moments.count for moments in local], [moments.vectors for moments in local])
        verdicts.look(rows.counts.device)
        aggregate = device_rows.run(self.transport, rows, self.capacity, phase=self.phase)
        findings = Findings(self.transport, rows, aggregate, self._few(aggregate.count))
        findings.hand_in()
        self.key = aggregate.key
        count, values = _unless_failed(findings, aggregate.count), aggregate.values
        self.moments = DeviceMoments(count, values[0], values[1])
        self.statistics = DeviceStatistics.of(self.moments, self.eps, self.eps_mode)

    def _few(self, count: Tensor) -> Few | None:
        """Returns whether the whole batch has too few values, as `check_count` has it; None where it has enough.

        Mostly the shapes say that there are enough.
        """
        if sum(moments.known or 0 for moments in self.local) > 1:
            return None
        with_positions = [moments.shape for moments in self.local if 0 not in moments.shape]
        if with_positions:
            return Few(count <= 1, self.layer, with_positions[0])
        return Few(count == 1, self.layer, self.local[0].shape)

    def backward(self, phase: str, local: list[Tensor]) -> Tensor:
        """Returns the sums over all replicas, see `Exchange.backward`."""
        key = self.next_key(phase, len(local))
        rows = DeviceRows.of([moments.count for moments in self.local], local)
        return backward_round(self.transport, rows, self.capacity, key)

    def check_count(self, x: Tensor) -> None:
        """Nothing: `forward` has seen to it."""


def backward_round(transport: Transport, rows: DeviceRows, capacity: int, key: RoundKey) -> Tensor:
    """Returns the sums of a backward round; NaN where it has failed."""
    verdicts.look(rows.counts.device)
    aggregate = device_rows.run(transport, rows, capacity, key)
    findings = Findings(transport, rows, aggregate)
    findings.hand_in()
    return _unless_failed(findings, aggregate.values)


def _unless_failed(findings: Findings, values: Tensor) -> Tensor:
    failed = findings.failed()
    return values if failed is None else torch.where(failed, torch.full_like(values, torch.nan), values)
