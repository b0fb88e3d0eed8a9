"""Rounds of a layer's call: over the host, or on the devices of its inputs."""

import threading
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from client.ops import non_finite
from client.ops.findings import Few, Findings, verdicts
from client.transports import device_rows
from client.transports.device_rows import LocalRows, from_host
from client.transports.transport import Transport
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import FORWARD, RoundKey


def over_host(
    transport: Transport, rows: LocalRows, key: RoundKey | None = None, phase: str = FORWARD
) -> tuple[Aggregate, Tensor]:
    """Takes part in a round over the host; arguments as for `Transport.run_slave`.

    Returns:
        The aggregate, and its values, shape (vectors, C), where the rows are.
    """
    brought = rows.on_host()
    aggregate = transport.run_slave(brought, key, phase=phase)
    non_finite.check(transport, brought, aggregate)
    return aggregate, from_host(aggregate.values, rows.values.device)


def forward_on_devices(
    transport: Transport, rows: LocalRows, capacity: int, phase: str, few: Callable[[Tensor], Few | None]
) -> tuple[RoundKey, Tensor, Tensor]:
    """Takes part in a forward round on devices.

    Args:
        transport: the way to the others.
        rows: of the local replicas.
        capacity: of each rank.
        phase: of the round.
        few: says for the count of the whole batch whether that is too few.

    Returns:
        The round's key, the count, shape (), and the values, shape (vectors, C). Where the round has failed the count
        is NaN, and a later call raises.
    """
    verdicts.look(rows.values.device)
    aggregate = device_rows.run(transport, rows, capacity, phase=phase)
    findings = Findings(transport, rows, aggregate, few(aggregate.count))
    findings.hand_in()
    return aggregate.key, _unless_failed(findings, aggregate.count), aggregate.values


def backward(transport: Transport, rows: LocalRows, capacity: int, key: RoundKey) -> Tensor:
    """Returns the sums of a backward round, shape (vectors, C); NaN where it has failed on devices."""
    if not capacity:
        return over_host(transport, rows, key)[1]
    verdicts.look(rows.values.device)
    aggregate = device_rows.run(transport, rows, capacity, key)
    findings = Findings(transport, rows, aggregate)
    findings.hand_in()
    return _unless_failed(findings, aggregate.values)


def _unless_failed(findings: Findings, values: Tensor) -> Tensor:
    failed = findings.failed()
    return values if failed is None else torch.where(failed, torch.full_like(values, torch.nan), values)


# Few calls have a second backward pass, and only while their graph lives: up to a hundred layers of a few dozen
# micro-batches, and of some mini-batches before.
KEPT_CALLS = 2**14


def phase_of(phase: str, number: int) -> str:
    """Returns the phase of backward pass `number`, counted from 1: "backward", "backward 2", ..."""
    return phase if number == 1 else f"{phase} {number}"


class BackwardPasses:
    """Counts the backward passes of the latest calls, for calls that leave no object behind that could count them."""

    def __init__(self) -> None:
        self._passes: OrderedDict[int, int] = OrderedDict()  # the call with the latest pass is last
        self._lock = threading.Lock()

    def count(self, call: int) -> int:
        """Counts a backward pass that begins, and returns its number, from 1; `call` is the `Exchange`'s number."""
        with self._lock:
            number = self._passes[call] = self._passes.pop(call, 0) + 1
            if len(self._passes) > KEPT_CALLS:
                self._passes.popitem(last=False)
        return number
