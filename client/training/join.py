"""Uneven inputs: members whose data ends before that of others.

Inside the block a member takes part in the rounds of its groups; after it, it is away, and the others go on without it,
as with a member whose slice is empty. Entering the block again it waits until all others have left theirs too, so that
every pass over the data begins together.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from client.connection.connection import Connection
from client.connection.current import current_connection
from client.connection.groups import Group
from client.layers.batchnorm import SynchronizedBatchNorm
from client.training.running_statistics import commit_running_statistics


@contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Lets the members of a job have different numbers of batches in one pass over their data.

    Every member puts its pass into this block, `with client.join(model): for batch in loader: ...`. Whoever is through
    leaves the block and does not wait; the others' rounds go on, and cover those who are left. Entering waits until all
    members of the groups that the model's layers use have entered, `deadline` seconds at most. Between two passes
    members may gather and recalibrate: `DDPHandler.mp_sync`, `client.recalibrate`.

    With `convert_model(model, chunks=k)` the end of a pass ends the mini-batch, see `client.commit_running_statistics`.

    A model under DistributedDataParallel needs torch's own `Join` as well, for the gradients: `with Join([ddp]),
    client.join(ddp):`, ours inside.

    Args:
        model: whose synchronised layers are used in the pass, all those of the process.

    Raises:
        GroupIncomplete: not all members entered in time.
        ReplicaLost: one of them has left the job, and there can be no further pass.
    """
    connection = current_connection()
    if connection is None:
        yield
        commit_running_statistics(model)
        return
    groups = _groups_of(model, connection)
    for group in groups:
        connection.come_back(group)
    try:
        yield
    except GeneratorExit:
        # The block is in a generator that is read no further: as good an end of the pass as any.
        _end(model, connection, groups)
        raise
    # Not after another exception: it ends this member, and the others are told its cause.
    _end(model, connection, groups)


def _end(model: nn.Module, connection: Connection, groups: list[Group]) -> None:
    # What is pending would be counted into the next pass, in which this member would be out of step with the others.
    commit_running_statistics(model)
    for group in groups:
        connection.stay_away(group)


def _groups_of(model: nn.Module, connection: Connection) -> list[Group]:
    """In an order that is the same on all members, so that nobody waits for two groups crosswise."""
    layers = (module for module in model.modules() if isinstance(module, SynchronizedBatchNorm))
    groups = {group.name: group for group in (connection.group(layer.group) for layer in layers)}
    return [group for _, group in sorted(groups.items()) if not connection.is_alone(group)]
