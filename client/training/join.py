"""join(): uneven inputs, when some members have fewer batches than others."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from client.nn.batchnorm import SynchronizedBatchNorm
from client.session.connection import Connection, current_connection
from client.session.groups import Group
from client.session.protocol.member import OVER_PROCESS_GROUP
from client.tracebacks import hide_internal_frames
from client.transports.choose import communicator_for
from client.transports.process_group import NamedProcessGroup
from statsd_bn.errors import ConfigurationError, StatsdBNError
from statsd_bn.text import error_text

ROUND_NAME = "client.join()"  # name of the rounds; no layer's name contains brackets


@contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Allows different numbers of batches on the members in one pass over their data.

    All members put their pass into this block, `with client.join(model): for batch in loader: ...`. A member that has
    finished leaves the block without waiting; the other members' rounds continue without it. Entering waits until all
    members of the groups of the model's layers have entered, for up to `round_timeout`. Between two passes a call of
    `DDPHandler.mp_sync` or `client.recalibrate`, or a training step, also waits for all members.

    With `convert_model(model, chunks=k)` the end of a pass also ends the mini-batch, see
    `client.commit_running_statistics`.

    A DistributedDataParallel model also needs torch's `Join`, for the gradients, outside of this block: `with
    Join([ddp]), client.join(ddp):`.

    Args:
        model: contains all synchronised layers that this process uses in the pass.

    Raises:
        GroupIncomplete, RoundTimeout: not all members entered in time.
        RoundMismatch: instead of entering, a member waits for this one in a layer or in a collective of torch.
        ReplicaLost: a member has left the job, so no further pass is possible.
        ConfigurationError: layers synchronise over a process group of torch, which waits for all its ranks. No error if
            `connect(transport="auto")` has chosen the default group: the layers use the server from here on.
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
        # The block is in a generator that is closed before its end: the pass ends here.
        _end(model, connection, groups)
        raise
    # Any other exception skips this: it ends the member and reaches the other members as the cause.
    try:
        _end(model, connection, groups)
    except StatsdBNError as error:
        hide_internal_frames(error)
        raise


def _layers(model: nn.Module) -> Iterator[SynchronizedBatchNorm]:
    return (module for module in model.modules() if isinstance(module, SynchronizedBatchNorm))


def _check_transports(model: nn.Module, connection: Connection | None) -> None:
    """Raises ConfigurationError for a process group: its other ranks would wait for a paused rank for ever."""
    is_agreed = connection is not None and connection.world_transport.process_group is not None
    is_requested = connection is not None and connection.member.transport == OVER_PROCESS_GROUP
    for layer in _layers(model):
        group, is_default = communicator_for(layer.group), layer.group is None
        if (is_requested and is_default) or (isinstance(group, NamedProcessGroup) and not (is_agreed and is_default)):
            name = group if isinstance(group, NamedProcessGroup) else "default process group"
            raise ConfigurationError(
                error_text(
                    "client.join() cannot use a process group, which waits for all its ranks\n"
                    f"layer {layer.layer_name!r} synchronises over torch's {name}",
                    advice=f"Call client.connect() before it, with another transport than {OVER_PROCESS_GROUP!r}, or "
                    "use equal numbers of batches on all ranks.",
                )
            )


def _begin(model: nn.Module, connection: Connection) -> list[Group]:
    named = (layer.group for layer in _layers(model) if not isinstance(layer.group, NamedProcessGroup))
    by_name = {group.name: group for group in map(connection.group, named)}
    # In the same order on all members: different orders would deadlock.
    groups = [group for _, group in sorted(by_name.items()) if not connection.is_alone(group)]
    for group in groups:
        if not (connection.member.is_elastic or connection.session(group).has_uneven_inputs):
            # Wait for open rounds first: `rejoin` would withdraw this rank from them, and they would end without it.
            connection.gather_in_group(group, ROUND_NAME, b"")
        connection.rejoin(group)
    return groups


def _end(model: nn.Module, connection: Connection, groups: list[Group]) -> None:
    # Pending micro-batches would count towards the next pass, out of step with the other members.
    commit_running_statistics(model)
    for group in groups:
        connection.pause(group)


def commit_running_statistics(model: nn.Module) -> None:
    """Updates the running statistics with pending micro-batches; call it after each optimizer step.

    With `convert_model(model, chunks=k)`, a complete mini-batch of k micro-batches updates the statistics without
    this call. Shorter mini-batches need it: the last of an epoch, or 9 samples in 4 chunks, which are 3
    micro-batches. All members call it; nothing is sent, since all have the same numbers.

    Pending micro-batches are not part of a layer's state: copies, pickles and checkpoints leave them out, and loading a
    state drops them.

    Args:
        model: contains the synchronised layers, at any depth.
    """
    for layer in _layers(model):
        layer.commit_running_statistics()
