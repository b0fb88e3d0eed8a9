"""average_gradients(): the gradients of the whole batch, without a process group.

A process group has a fixed membership, so members that come and go cannot average through one. The aggregation server
adds gradients as it adds statistics: in replica order, in float64, the same bits for everybody.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from client.connection import Connection, current_connection
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError
from statsd_bn.messages import Aggregate, Rows
from statsd_bn.reduction import FloatArray

# The name of its rounds; no layer of a model is called so, since a place in a model has no brackets.
LANE = "average_gradients()"


def average_gradients(parameters: nn.Module | Iterable[Tensor], count: int = 1) -> int:
    """Replaces each gradient by its average over the members, weighted by how many samples each one's loss averages.

    All members call it after `backward`, in each step. With `count=len(batch)` and a loss that is a mean, the result is
    the gradient of the mean over the whole batch, however unequal the members' shares; a member without a batch calls
    it with 0. It takes a round for each 65,536 elements; without a connection it leaves the gradients as they are.

    Args:
        parameters: the model, or what `model.parameters()` gives; the same shapes on every member. Where there is no
            gradient it counts as zero.
        count: the samples in this member's loss.

    Returns:
        The sum of the counts.

    Raises:
        ConfigurationError: `count` is negative.
        StatsdBNError: a round failed, with the reason; RoundMismatch where the members' models differ in size.
    """
    if count < 0:
        raise ConfigurationError(f"count: expected the number of samples in the loss, at least 0, got {count}")
    connection = current_connection()
    if connection is None:
        return count
    trained = _trained(parameters)
    parts = _sum(connection, _flat(trained) * count if count else np.zeros(_size(trained)), count)
    # Of several parts a later one may lack a member that is lost meanwhile, and is an average all the same.
    averages = np.concatenate([part.values[0] / max(1, part.count) for part in parts])
    if parts[0].count:
        _write(trained, averages)
    return parts[0].count


def _trained(parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    trained = [parameter for parameter in given if parameter.requires_grad]
    if not _size(trained):
        raise ConfigurationError("parameters: expected at least one that requires a gradient, got none")
    return trained


def _size(trained: list[Tensor]) -> int:
    return sum(parameter.numel() for parameter in trained)


def _flat(trained: list[Tensor]) -> FloatArray:
    """Returns all gradients one behind the other, shape (elements,)."""
    gradients = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in trained)
    return torch.cat([gradient.detach().cpu().double().flatten() for gradient in gradients]).numpy()


def _sum(connection: Connection, values: FloatArray, count: int) -> list[Aggregate]:
    parts = np.split(values, range(limits.MAX_CHANNELS, len(values), limits.MAX_CHANNELS))
    return [connection.exchange(LANE, Rows((count,), part[np.newaxis, np.newaxis])) for part in parts]


@torch.no_grad()
def _write(trained: list[Tensor], averages: FloatArray) -> None:
    parts = torch.split(torch.from_numpy(averages), [parameter.numel() for parameter in trained])
    for parameter, part in zip(trained, parts, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(part.view_as(parameter))
