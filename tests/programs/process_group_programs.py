"""What ranks do in `test_process_group.py`: torch's process group instead of a connection."""

import copy
import itertools
import math
import os
import pickle
import time
import warnings
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import client
from client.ops import non_finite
from client.transports import process_group, process_group_monitor
from programs import ddp_programs
from programs.ddp_programs import keep
from programs.member_programs import Buffers, state
from server.cli.status import ask
from statsd_bn import skew
from statsd_bn import skew_samples as samples
from statsd_bn.errors import NonFinite, StatsdBNError
from support import whole_batch
from support.sentences import client_log, error_of


def train_under_ddp(rank: Any, mode: ddp_programs.Mode, steps: int, backend: str) -> Buffers:
    """Nothing but `convert_model` and the wrapper; returns the state."""
    model = client.convert_model(ddp_programs.network(mode))
    run = torch.compile(keep(DistributedDataParallel(model)), backend=backend)
    ddp_programs.train_share(run, model, mode, rank.rank, steps)
    return state(model)


def in_pairs(rank: Any, case: whole_batch.Case, how: str) -> whole_batch.Result:
    """Ranks 0 and 1 synchronise, and so do ranks 2 and 3; `how` names a way to select the process group."""
    pairs = [keep(distributed.new_group(ranks)) for ranks in ([0, 1], [2, 3])]
    mine = pairs[rank.rank // 2]
    layer = _in_process_group(case.layer(synchronised=False), mine, how)
    assert layer.group.size == 2
    return whole_batch.run_shard(case, layer, rank.rank % 2)


def _in_process_group(layer: nn.Module, group: Any, how: str) -> Any:
    match how:
        case "convert_model":
            return client.convert_model(layer, process_group=group)
        case "convert_sync_batchnorm":
            return client.SynchronizedBatchNorm.convert_sync_batchnorm(layer, group)
        case "nn.SyncBatchNorm":
            return client.convert_model(nn.SyncBatchNorm.convert_sync_batchnorm(layer, group))
        case "copy":
            return copy.deepcopy(client.convert_model(layer, process_group=group))
        case "pickle":
            return pickle.loads(pickle.dumps(client.convert_model(layer, process_group=group)))  # noqa: S301 - our own
    raise AssertionError(how)


def revert(_rank: Any) -> bool:
    group = keep(distributed.new_group([0, 1]))
    converted = client.convert_model(nn.Sequential(nn.SyncBatchNorm(3, process_group=group)))
    return client.revert_model(converted)[0].process_group is group


def come_to_different_layers(rank: Any, layers: list[str]) -> str:
    return _error_of(layers[rank.rank], 3)


def spoil_in_a_pair(rank: Any) -> tuple[list[int], str]:
    """Rank 2 of the pair 1, 2 sends NaN; returns the ranks in the error, and its text."""
    pair = keep(distributed.new_group([1, 2]))
    if rank.rank == 0:
        return [], ""
    layer = client.convert_model(nn.BatchNorm1d(2), process_group=pair)
    with mock.patch.dict(os.environ, {"STATSD_BN_ON_NONFINITE": "raise"}):
        try:
            layer(torch.full((4, 2), math.nan if rank.rank == 2 else 1.0))
        except NonFinite as error:
            return error.fields["members"], str(error)
    return [], "no error"


def spoil_alone(rank: Any) -> str:
    """Rank 1 is alone in its process group, and its second replica has infinity; returns the error."""
    alone = [keep(distributed.new_group([each])) for each in range(2)][rank.rank]
    model = client.convert_model(nn.BatchNorm1d(2), process_group=alone)
    replicas = client.DataParallelWithCallback(model, device_ids=["cpu"] * 2)
    x = torch.ones(4, 2)
    x[3] = math.inf if rank.rank == 1 else 1.0
    with mock.patch.dict(os.environ, {"STATSD_BN_ON_NONFINITE": "raise"}):
        try:
            replicas(x)
        except NonFinite as error:
            return str(error)
    return "no error"


def lie_in_a_pair(rank: Any) -> str:
    """Rank 2 of the pair 1, 2 announces more rows than there can be; returns the error."""
    pair = keep(distributed.new_group([1, 2]))
    if rank.rank == 0:
        return ""
    layer = client.convert_model(nn.BatchNorm1d(2), process_group=pair)
    with _forged_number(2, rank, process_group.ROWS, 1000):
        return error_of(layer, torch.randn(4, 2))


def come_with_channels(rank: Any, channels: list[int]) -> str:
    return _error_of("bn", channels[rank.rank])


def lie(rank: Any, what: str, place: int, number: int) -> str:
    """Rank 1 changes a number in its second message; returns each rank's error."""
    with _forged_number(1, rank, place, number):
        if what == "layer":
            return _error_of("bn", 3)
        return error_of(client.DDPHandler(object()).mp_sync, [1.0])


def _forged_number(liar: int, rank: Any, place: int, number: int) -> Any:
    """Make one rank change a number in its second message; the first message announces the ranks' hosts."""
    messages, gathered = itertools.count(), process_group._gather

    def changed(group: Any, words: Any) -> Any:
        if rank.rank == liar and next(messages) == 1:
            words = words.copy()
            words[place] = number
        return gathered(group, words)

    return mock.patch.object(process_group, "_gather", changed)


def _error_of(name: str, channels: int) -> str:
    layer = client.SynchronizedBatchNorm1d(channels)
    layer.layer_name = name
    return error_of(layer, torch.randn(4, channels, requires_grad=True))


def gather_values(rank: Any) -> tuple[list[Any], int, int]:
    handler = client.DDPHandler(object())
    with warnings.catch_warnings(action="error"):  # torch warns of read-only arrays
        values = handler.mp_sync(torch.arange(rank.rank + 1), return_tensor=False)
    return values, *handler._rank_and_size()


def gather_beside_a_layer(rank: Any) -> str:
    if rank.rank == 0:
        return _error_of("bn", 3)
    return error_of(client.DDPHandler(object()).mp_sync, torch.ones(2))


def average(rank: Any) -> tuple[list[float], int]:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, 2.0]) * (rank.rank + 1)
    count = client.average_gradients([parameter], 1 + 2 * rank.rank)
    return parameter.grad.tolist(), count


def join(_rank: Any) -> str:
    try:
        with client.join(client.convert_model(nn.Sequential(nn.BatchNorm1d(3)))):
            return "entered"
    except StatsdBNError as error:
        return str(error)


def compile_before_there_are_ranks(store: str, rank: int) -> list[np.ndarray]:
    """A compiled layer that was alone at first; returns its outputs alone and with the other rank."""
    layer = client.SynchronizedBatchNorm1d(2, affine=False).double()
    layer.layer_name = "compiled early"
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.tensor([[1.0, 2.0], [3.5, 5.0]], dtype=torch.float64) * (1 + rank)
    alone = run(x)
    with ddp_programs.process_group_of(store, rank, 2):
        return [alone.numpy(), run(x).numpy()]


def destroyed(_rank: Any) -> str:
    group = keep(distributed.new_group([0, 1]))
    layer = client.convert_model(nn.BatchNorm1d(3), process_group=group)
    distributed.destroy_process_group(group)
    return error_of(layer, torch.randn(4, 3))


def outside(rank: Any) -> str:
    group = keep(distributed.new_group([0]))
    if rank.rank == 0:
        return ""
    layer = client.convert_model(nn.BatchNorm1d(3), process_group=group)
    layer.eval()(torch.randn(4, 3))
    return error_of(layer.train(), torch.randn(4, 3))


# For a test that compares samples more often than once a second.
LOOK_SECONDS = 0.02


def differ(rank: Any, seconds: float, endpoint: str = "", job: str = "") -> tuple[list[str], list[Any]]:
    """The last rank's data are 25 times as large, and rank 1 ends with infinity; returns warnings and findings."""
    torch.manual_seed(rank.rank)  # with torch's default seed all ranks would have the same data, which is a finding
    size = distributed.get_world_size()
    with ExitStack() as stack:
        warned = stack.enter_context(client_log())
        for module, name in ((samples, "SECONDS"), (samples, "SETTLE_SECONDS"), (process_group_monitor, "SECONDS")):
            stack.enter_context(mock.patch.object(module, name, LOOK_SECONDS))
        stack.enter_context(mock.patch.object(skew, "MIN_SECONDS", 0.0))
        # An earlier test may have left reports in this process.
        stack.enter_context(mock.patch.object(non_finite, "_local_reports", {}))
        where = {"endpoint": endpoint, "rank": rank.rank, "world_size": size, "job": job}
        connection = stack.enter_context(client.connect(**where)) if endpoint else None
        layer = client.convert_model(nn.BatchNorm1d(4), process_group=distributed.group.WORLD)
        stop = torch.zeros(1)
        until = time.monotonic() + seconds
        while not stop:
            layer(torch.randn(16, 4) * (25.0 if rank.rank == size - 1 else 1.0))
            time.sleep(LOOK_SECONDS)
            has_found = any("skew" in text for _, text in warned) or bool(_of_job(connection, "findings"))
            stop[0] = float(rank.rank == 0 and (has_found or time.monotonic() > until))
            distributed.broadcast(stop, 0)
        layer(torch.full((16, 4), math.inf if rank.rank == 1 else 1.0))
        while connection and rank.rank == 0 and not _of_job(connection, "non_finite") and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        found = _of_job(connection, "findings", "non_finite") if rank.rank == 0 else []
        distributed.barrier()
    return [text for _, text in warned], found


def spoil_beside_a_connection(rank: Any, endpoint: str, job: str) -> list[str]:
    """Rank 1 sends infinity; returns the server's report of it, on rank 0."""
    where = {"endpoint": endpoint, "rank": rank.rank, "world_size": distributed.get_world_size(), "job": job}
    with mock.patch.object(non_finite, "_local_reports", {}), client.connect(**where) as connection:
        layer = client.convert_model(nn.BatchNorm1d(4), process_group=distributed.group.WORLD)
        layer(torch.full((16, 4), math.inf if rank.rank == 1 else 1.0))
        until = time.monotonic() + 10.0
        while rank.rank == 0 and not (found := _of_job(connection, "non_finite")) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        distributed.barrier()
    return found if rank.rank == 0 else []


def _of_job(connection: client.Connection | None, *fields: str) -> list[Any]:
    if connection is None:
        return []
    (group,) = (group for group in ask(connection.endpoint)["groups"] if group["job"] == connection.member.job)
    return [entry for field in fields for entry in group.get(field, ())]
