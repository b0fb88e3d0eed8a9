"""join(): uneven inputs, where some members have fewer batches than others.

Inside the block a member takes part in the rounds of its groups. After the block it is away, and the others go on
without it, as with a member whose slice is empty. When it enters the block again it waits until all others have left
theirs too, so every pass over the data begins together.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from client.nn.batchnorm import SynchronizedBatchNorm
from client.session.connection import Connection
from client.session.current import current_connection
from client.session.groups import Group
from client.session.protocol.member import OVER_PROCESS_GROUP
from client.tracebacks import hide_internal_frames
from client.transports.choose import communicator_for
from client.transports.named_process_group import NamedProcessGroup
from statsd_bn.error_text import error_text
from statsd_bn.errors import ConfigurationError, StatsdBNError

# The name of the round before the first pass. No layer has such a name: the name of a module contains no brackets.
ENTRANCE = "client.join()"


@contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Lets the members of a job have different numbers of batches in one pass over their data.

    Every member puts its pass into this block, `with client.join(model): for batch in loader: ...`. A member that has
    finished leaves the block and does not wait; the rounds of the others go on without it. Entering waits until all
    members of the groups that the model's layers use have entered, for up to `round_timeout`. So does whatever all
    members do between two passes, as `DDPHandler.mp_sync`, `client.recalibrate` or a step of training.

    With `convert_model(model, chunks=k)` the end of a pass also ends the mini-batch, see
    `client.commit_running_statistics`.

    A model under DistributedDataParallel needs torch's own `Join` as well, for the gradients: `with Join([ddp]),
    client.join(ddp):`, ours inside.

    Args:
        model: contains all synchronised layers that this process uses in the pass.

    Raises:
        GroupIncomplete, RoundTimeout: not all members entered in time.
        RoundMismatch: one of them waits for this one in a layer, or in a collective of torch, instead.
        ReplicaLost: one of them has left the job, so no further pass is possible.
        ConfigurationError: layers synchronise over a process group of torch's, which waits for all its ranks. Where
            `connect(transport="auto")` has chosen the default one, they use the server from here on instead.
    """
    connection = current_connection()
    _check_transports(model, connection)
    if connection is None:
        yield
        commit_running_statistics(model)
        return
    try:
        groups = _begin(model, connection)
    except StatsdBNError as error:
        hide_internal_frames(error)
        raise
    try:
        yield
    except GeneratorExit:
        # The block is in a generator that nobody reads to the end: the pass ends here.
        _end(model, connection, groups)
        raise
    # Not after another exception: that ends this member, and the others get its cause.
    try:
        _end(model, connection, groups)
    except StatsdBNError as error:
        hide_internal_frames(error)
        raise


def _layers(model: nn.Module) -> Iterator[SynchronizedBatchNorm]:
    return (module for module in model.modules() if isinstance(module, SynchronizedBatchNorm))


def _check_transports(model: nn.Module, connection: Connection | None) -> None:
    """Nobody can be away from a collective of torch's, so the others would wait there for ever."""
    is_agreed = connection is not None and connection.of_all.process_group is not None
    is_meant = connection is not None and connection.member.transport == OVER_PROCESS_GROUP
    for layer in _layers(model):
        group, is_default = communicator_for(layer.group), layer.group is None
        if (is_meant and is_default) or (isinstance(group, NamedProcessGroup) and not (is_agreed and is_default)):
            raise ConfigurationError(
                error_text(
                    "client.join() needs a connection: a process group waits for all its ranks\n"
                    f"layer {layer.layer_name!r} synchronises over torch's "
                    f"{group if isinstance(group, NamedProcessGroup) else 'default process group'}",
                    advice=f"Call client.connect() before it, with another transport than {OVER_PROCESS_GROUP!r}, or "
                    "give every rank as many batches.",
                )
            )


def _begin(model: nn.Module, connection: Connection) -> list[Group]:
    groups = _groups_of(model, connection)
    for group in groups:
        _meet_others(connection, group)
        connection.come_back(group)
    return groups


def _meet_others(connection: Connection, group: Group) -> None:
    """Before the first pass nobody has been away, so a rank that is still in a round would end it without this one."""
    if not (connection.member.is_elastic or connection.session(group).is_uneven):
        connection.gather_in(group, ENTRANCE, b"")


def _end(model: nn.Module, connection: Connection, groups: list[Group]) -> None:
    # Pending micro-batches would count for the next pass, and this member would be out of step with the others.
    commit_running_statistics(model)
    for group in groups:
        connection.stay_away(group)


def _groups_of(model: nn.Module, connection: Connection) -> list[Group]:
    """The groups of the model, in the same order on all members, so that no two wait for each other."""
    named = (layer.group for layer in _layers(model) if not isinstance(layer.group, NamedProcessGroup))
    groups = {group.name: group for group in map(connection.group, named)}
    return [group for _, group in sorted(groups.items()) if not connection.is_alone(group)]


def commit_running_statistics(model: nn.Module) -> None:
    """Updates the running statistics with the micro-batches that are still pending; call it after each optimizer step.

    With `convert_model(model, chunks=k)` a mini-batch of k micro-batches updates them by itself, and this does nothing.
    Shorter mini-batches need it: the last of an epoch, or 9 samples in 4 chunks, which are 3 micro-batches. All members
    call it; nothing is sent, since all have the same numbers.

    Pending micro-batches are not part of a layer's state: copies, pickles and checkpoints leave them out, and loading a
    state drops them.

    Args:
        model: its synchronised layers, at any depth, end their mini-batch.
    """
    for module in model.modules():
        if isinstance(module, SynchronizedBatchNorm):
            module.commit_running_statistics()
