"""average_gradients(): the gradients of the whole batch, without a process group.

A process group has a fixed membership, so members that come and go cannot average through one. The aggregation server
adds gradients as it adds statistics: in replica order, in float64, the same bits for everybody.
"""

import logging
import operator
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from client.session.connection import Connection
from client.session.current import current_connection
from client.tracebacks import api_boundary
from client.transports.choose import communicator_for, transport_over
from client.transports.transport import Transport
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError
from statsd_bn.members import Members, ranks_in_words
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import FloatArray, Rows

# The name of its rounds. No layer has such a name: the name of a module contains no brackets.
TRANSPORT = "average_gradients()"

logger = logging.getLogger("statsd_bn.client")

_told: "WeakSet[Connection]" = WeakSet()


@api_boundary
def average_gradients(parameters: nn.Module | Iterable[Tensor], count: int = 1) -> int:
    """Replaces each gradient by the sum of all members' gradients, divided by the sum of their counts.

    All members call it after `backward`, in each step. With `count=len(batch)` and a loss that is a sum over the batch
    (`reduction="sum"`), the result is the gradient of the mean over the whole batch, however unequal the members'
    shares; a member without samples in the loss calls it with 0. Where all shares are equal, a loss that is a mean and
    no `count` give the same. With unequal shares and means nobody could: a synchronised layer adds up the members'
    gradients in `backward`, and has to know by then what each weighs.

    It takes one round for each 65,536 elements. A process that trains alone divides its own gradients.

    Args:
        parameters: the model, or what `model.parameters()` gives; the same shapes on every member. Where a member has
            no gradient it counts as zero; where nobody has one it stays None, so that no optimizer moves the parameter.
        count: the samples over which this member's loss is a sum; 1 for a mean over as many samples as the others'.

    Returns:
        The sum of the counts.

    Raises:
        ConfigurationError: `count` is no int or negative, no parameter is trained, or a gradient is sparse.
        StatsdBNError: a round failed, with the reason; RoundMismatch where the members' models differ in size.
    """
    count = _checked(count)
    communicator = communicator_for(None) or current_connection()
    trained = _trained(parameters)
    _check_dense(trained)
    if communicator is None:
        _divide(trained, count)
        return count
    parts = _sum(transport_over(communicator, TRANSPORT, None), _flat(trained), count)
    if isinstance(communicator, Connection):
        _tell_of_absent(communicator, parts[0])
    # A member may be lost between two parts; each part is an average over its own members.
    averages = np.concatenate([part.values[0] / max(1, part.count) for part in parts])
    if parts[0].count:
        _write(trained, averages)
    return parts[0].count


def _tell_of_absent(connection: Connection, part: Aggregate) -> None:
    """Warns once where ranks of a strict job have ended their pass in `client.join`, and others train on."""
    who = connection.member
    absent = sorted(set(range(who.world_size)).difference(part.members))
    if absent and not who.is_elastic and connection not in _told:
        _told.add(connection)
        logger.warning(
            "job %r: %s ended their pass in client.join and get no gradients: their weights stay as they are, "
            "while those of the others move",
            who.job,
            ranks_in_words(Members.of(absent)),
        )


def _checked(count: Any) -> int:
    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigurationError(
            f"count: expected the number of samples in the loss, an int of at least 0, got {count!r:.80}"
        )
    return number


@torch.no_grad()
def _divide(trained: list[Tensor], count: int) -> None:
    # Each once, though a parameter may be given twice.
    gradients = {id(parameter.grad): parameter.grad for parameter in trained}
    for gradient in gradients.values():
        if gradient is not None and count > 1:
            gradient.div_(count)


def _trained(parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    trained = [parameter for parameter in given if parameter.requires_grad]
    if not any(parameter.numel() for parameter in trained):
        raise ConfigurationError("parameters: expected at least one that requires a gradient, got none")
    return trained


def _check_dense(trained: list[Tensor]) -> None:
    sparse = [parameter for parameter in trained if parameter.grad is not None and parameter.grad.is_sparse]
    if sparse:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in sparse)
        raise ConfigurationError(
            f"parameters: expected dense gradients, got sparse ones of parameters of shape {shapes}; make the layers "
            "with sparse=False"
        )


def _sizes(trained: list[Tensor]) -> list[int]:
    """Returns how many numbers each gradient has; a complex one has two for each element."""
    return [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in trained]


def _flat(trained: list[Tensor]) -> FloatArray:
    """Returns all gradients in a row, followed by 1 for each parameter that has one, else 0."""
    has_gradient = torch.tensor([parameter.grad is not None for parameter in trained]).double()
    gradients = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in trained)
    return torch.cat([*(_numbers(gradient.detach().cpu()) for gradient in gradients), has_gradient]).numpy()


def _numbers(gradient: Tensor) -> Tensor:
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return real.double().flatten()


def _sum(transport: Transport, values: FloatArray, count: int) -> list[Aggregate]:
    parts = np.split(values, range(limits.MAX_CHANNELS, len(values), limits.MAX_CHANNELS))
    return [transport.run_slave(Rows((count,), part[np.newaxis, np.newaxis])) for part in parts]


@torch.no_grad()
def _write(trained: list[Tensor], averages: FloatArray) -> None:
    *parts, had_gradient = torch.split(torch.from_numpy(averages), [*_sizes(trained), len(trained)])
    for parameter, part, anybody in zip(trained, parts, had_gradient.tolist(), strict=True):
        if not anybody:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        average = torch.view_as_complex(part.view(-1, 2)) if parameter.is_complex() else part
        parameter.grad.copy_(average.view_as(parameter))
