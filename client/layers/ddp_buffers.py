"""Turns off DistributedDataParallel's broadcast of buffers where all buffers are those of synchronised layers.

By default it sends rank 0's buffers to the others before each forward pass. Synchronised layers move theirs by the same
numbers on all ranks, so for them this is one collective per pass for nothing, it hides it where they differ, and a rank
that waits in it is in no round of ours.

Each rank turns it off in the first synchronised round that it takes part in inside of the wrapper's forward pass. All
ranks must do so in the same pass, or one would broadcast alone. A round has all ranks in it, and they are in the same
layer and the same call, so they are in the same pass. What else decides is the same on all ranks: the model, its
groups, the variable.

torch's Join is different: a rank without data left shadows the others' broadcasts, perhaps without any forward pass of
its own, and at the end it takes over the last one's buffers if the broadcast is on. So nothing is turned off there, and
`client.join`, which all ranks enter together, turns it on again. So does the end of the connection.
"""

import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from client.autograd.exchange import Exchange
from client.connection.connection import Connection
from client.connection.current import current_connection
from client.lanes.choose import With, company_in
from client.lanes.in_process import LocalPipe
from client.lanes.named_process_group import NamedProcessGroup
from client.lanes.zeromq import SlavePipe
from client.layers.synchronized import Synchronized
from client.whereabouts import collectives
from statsd_bn.environment import boolean

logger = logging.getLogger("statsd_bn.client")

# The buffers of torch's batch norms, which ours move alike on all ranks; a subclass may have others.
OURS = ("running_mean", "running_var", "num_batches_tracked")

# Names of buffers in the warning.
NAMED = 3

# Wrappers for which nothing is left to decide, and those among them whose broadcast was turned off here.
_settled: WeakSet[nn.Module] = WeakSet()
_turned_off: WeakSet[nn.Module] = WeakSet()

# Wrappers whose other buffers were told of, and those whose broadcast a connection turns on when it ends.
_warned: WeakSet[nn.Module] = WeakSet()
_ending: WeakKeyDictionary[Connection, WeakSet[nn.Module]] = WeakKeyDictionary()


def settle(exchange: Exchange) -> None:
    """Decides on the broadcast of the wrapper whose forward pass is under way, after a round in it."""
    wrapper: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or wrapper in _settled or isinstance(exchange.lane, LocalPipe):
        return
    collectives.remember(wrapper)
    if wrapper._join_config.enable or not _is_inside(exchange.layer, wrapper):  # noqa: SLF001 - has no public name
        return
    connection = exchange.lane.connection if isinstance(exchange.lane, SlavePipe) else None
    if connection and _is_short(exchange, connection):
        return
    _settled.add(wrapper)
    if wrapper.broadcast_buffers and _may_turn_off(wrapper):
        _turn_off(wrapper)
    if wrapper in _turned_off and connection:
        _turn_on_at_end(connection, wrapper)


def turn_off(wrapper: DistributedDataParallel) -> None:
    """Turns the broadcast of a wrapper off that has just been made, if it need not be on.

    All ranks do so, and the layers synchronise over the whole job once it is connected.
    """
    # Without a connection yet, it may become an elastic one, or of another size.
    if current_connection() and _may_turn_off(wrapper):
        _turn_off(wrapper)


def turn_on_again(model: nn.Module) -> None:
    """Turns the broadcast on that was turned off here, of all wrappers around layers of the model."""
    layers = {module for module in model.modules() if isinstance(module, Synchronized)}
    for wrapper in list(_turned_off):
        if not layers.isdisjoint(wrapper.modules()):
            _turn_on(wrapper)


def _is_short(exchange: Exchange, connection: Connection) -> bool:
    """Whether members of the job were missing in a round that is for all of them."""
    assert isinstance(exchange.lane, SlavePipe)  # noqa: S101 - where there is a connection
    return len(exchange.members) < connection.member.world_size and connection.is_everybody(exchange.lane.group)


def _turn_off(wrapper: Any) -> None:
    wrapper.broadcast_buffers = False
    _turned_off.add(wrapper)
    if distributed.get_rank() != 0:
        return
    logger.info(
        "DistributedDataParallel no longer broadcasts buffers before each forward pass: all are those of synchronised "
        "layers, which are the same on all ranks anyway; STATSD_BN_BROADCAST_BUFFERS=1 keeps the broadcast"
    )


def _turn_on(wrapper: Any) -> None:
    _turned_off.discard(wrapper)
    _settled.discard(wrapper)
    wrapper.broadcast_buffers = True


def _turn_on_at_end(connection: Connection, wrapper: nn.Module) -> None:
    """Has the end of a connection turn the broadcast on; once, however often a wrapper is settled anew."""
    known = _ending.setdefault(connection, WeakSet())
    if wrapper not in known:
        known.add(wrapper)
        connection.at_end.append(partial(_turn_on_wrapper, ref(wrapper)))


def _turn_on_wrapper(found: "ref[nn.Module]") -> None:
    if (wrapper := found()) in _turned_off:
        _turn_on(wrapper)


def _may_turn_off(wrapper: Any) -> bool:
    """Whether all buffers that it broadcasts are the same on all its ranks anyway."""
    if boolean(os.environ, "STATSD_BN_BROADCAST_BUFFERS") or hasattr(wrapper, "buffer_hook"):
        return False
    layers = [layer for layer in wrapper.module.modules() if isinstance(layer, Synchronized) and _has_buffers(layer)]
    if not layers or not all(_is_over_all(layer.group, wrapper) for layer in layers):
        return False
    others = list(_others(wrapper, layers))
    if others and distributed.get_rank() == 0 and wrapper not in _warned:
        _warned.add(wrapper)
        _warn(others)
    return not others


def _has_buffers(layer: Any) -> bool:
    return layer.running_mean is not None or layer.running_var is not None


def _is_over_all(group: With, wrapper: Any) -> bool:
    """Whether a group has all ranks of the wrapper, in every round."""
    company = company_in(group)
    if company is None:
        return False
    if isinstance(company, NamedProcessGroup):
        ranks = distributed.get_process_group_ranks
        return set(ranks(wrapper.process_group)) <= set(ranks(company.find()))
    assert not isinstance(group, NamedProcessGroup)  # noqa: S101 - it would be the company
    is_all = company.member.world_size == distributed.get_world_size() and not company.member.is_elastic
    return is_all and company.is_everybody(group)


def _others(wrapper: Any, layers: list[Any]) -> Iterator[str]:
    """The names of the buffers that it broadcasts and that are not our layers'."""
    ours = {getattr(layer, name) for layer in layers for name in OURS}
    for name, buffer in wrapper.module.named_buffers():
        if buffer not in ours and name not in wrapper.parameters_to_ignore:
            yield name


def _is_inside(name: str, wrapper: Any) -> bool:
    """By name, since replicas in one process are copies of the wrapper's layers."""
    return any(isinstance(layer, Synchronized) and layer.layer_name == name for layer in wrapper.modules())


def _warn(others: list[str]) -> None:
    more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
    logger.warning(
        "DistributedDataParallel goes on to broadcast rank 0's buffers before each forward pass, which takes time, and "
        "hides it where buffers of synchronised layers differ: the model has other buffers, %s%s. If those are the "
        "same on all ranks, pass broadcast_buffers=False (forward_sync_buffers=False in newer versions of torch)",
        ", ".join(others[:NAMED]),
        more,
    )
