"""average_gradients(): the gradients of the whole batch, without a process group.

The membership of a process group is fixed, so an elastic job cannot average gradients over one. The aggregation server
adds gradients like statistics: in replica order, in float64, with the same bits for all members.
"""

import logging
import operator
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from client.session.connection import Connection, current_connection
from client.tracebacks import api_boundary
from client.transports.choose import communicator_for, transport_over
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError
from statsd_bn.members import Members, format_ranks
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import FloatArray, Rows

ROUND_NAME = "average_gradients()"  # name of the rounds; no layer's name contains brackets

logger = logging.getLogger("statsd_bn.client")

_warned: "WeakSet[Connection]" = WeakSet()


@api_boundary
def average_gradients(parameters: nn.Module | Iterable[Tensor], count: int = 1) -> int:
    """Replaces each gradient by the sum of all members' gradients, divided by the sum of their counts.

    All members call it after `backward`, in each step. With `count=len(batch)` and a loss that is a sum over the batch
    (`reduction="sum"`), the result is the gradient of the mean over the whole batch, also with unequal shares; a member
    without samples in the loss passes 0. With equal shares, a mean loss and the default `count` give the same result.
    With unequal shares the loss must be a sum: in `backward` a synchronised layer adds the members' gradients, so each
    sample must have the same weight in them.

    It takes one round per 65,536 elements of the gradients. A process that trains alone divides its own gradients.

    Args:
        parameters: the model, or its `parameters()`, with the same shapes on all members. A missing gradient counts as
            zero; if no member has the gradient it stays None, so that the optimizer skips the parameter.
        count: the number of samples over which this member's loss is a sum; 1 for a mean over as many samples as on the
            other members.

    Returns:
        The sum of the counts.

    Raises:
        ConfigurationError: `count` is no int of at least 0, no parameter requires a gradient, or a gradient is sparse.
        StatsdBNError: a round failed, with the reason; RoundMismatch if the members' models differ in size.
    """
    count = _checked(count)
    communicator = communicator_for(None) or current_connection()
    trained = _trained(parameters)
    if communicator is None:
        _divide(trained, count)
        return count
    transport = transport_over(communicator, ROUND_NAME, None)
    parts = [transport.run_slave(rows) for rows in split_rows(count, _flat(trained)[np.newaxis])]
    if isinstance(communicator, Connection):
        _warn_of_absent(communicator, parts[0])
    # A member may be lost between two parts, so each part is averaged over its own members.
    averages = np.concatenate([part.values[0] / max(1, part.count) for part in parts])
    if parts[0].count:
        _write(trained, averages)
    return parts[0].count


def _warn_of_absent(connection: Connection, part: Aggregate) -> None:
    """Warns once if ranks of a strict job have ended their pass in `client.join` while others train on."""
    member = connection.member
    absent = sorted(set(range(member.world_size)).difference(part.members))
    if absent and not member.is_elastic and connection not in _warned:
        _warned.add(connection)
        logger.warning(
            "job %r: %s ended their pass in client.join and get no gradients: their weights differ from the other "
            "ranks' from now on",
            member.job,
            format_ranks(Members.of(absent)),
        )


def _checked(count: Any) -> int:
    with suppress(TypeError):
        if (number := operator.index(count)) >= 0:
            return number
    expected = "expected the number of samples in the loss, an int of at least 0"
    raise ConfigurationError(f"count: {expected}, got {count!r:.80}")


@torch.no_grad()
def _divide(trained: list[Tensor], count: int) -> None:
    if count > 1:
        # A parameter may be listed twice.
        for gradient in {id(each.grad): each.grad for each in trained if each.grad is not None}.values():
            gradient.div_(count)


def _trained(parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    candidates = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    trained = [parameter for parameter in candidates if parameter.requires_grad]
    if not any(parameter.numel() for parameter in trained):
        raise ConfigurationError("parameters: expected at least one that requires a gradient, got none")
    if sparse := [each for each in trained if each.grad is not None and each.grad.is_sparse]:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in sparse)
        raise ConfigurationError(
            f"parameters: expected dense gradients, got sparse ones of parameters of shape {shapes}; make the layers "
            "with sparse=False"
        )
    return trained


def _flat(trained: list[Tensor]) -> FloatArray:
    """Returns all gradients in one vector, then a number per parameter: 1 if it has a gradient, else 0."""
    has_gradient = torch.tensor([parameter.grad is not None for parameter in trained]).double()
    gradients = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in trained)
    return torch.cat([*(_numbers(gradient.detach().cpu()) for gradient in gradients), has_gradient]).numpy()


def _numbers(gradient: Tensor) -> Tensor:
    """Returns a gradient as real numbers in float64, two for each complex element."""
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return real.double().flatten()


def split_rows(count: int, vectors: FloatArray) -> list[Rows]:
    """Splits vectors, shape (V, N), into the rows of as few rounds as possible."""
    parts = np.split(vectors, range(limits.MAX_CHANNELS, vectors.shape[1], limits.MAX_CHANNELS), axis=1)
    return [Rows((count,), part[np.newaxis]) for part in parts]


@torch.no_grad()
def _write(trained: list[Tensor], averages: FloatArray) -> None:
    sizes = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in trained]
    *parts, has_gradient = torch.split(torch.from_numpy(averages), [*sizes, len(trained)])
    for parameter, part, is_used in zip(trained, parts, has_gradient.tolist(), strict=True):
        if not is_used:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        average = torch.view_as_complex(part.view(-1, 2)) if parameter.is_complex() else part
        parameter.grad.copy_(average.view_as(parameter))
