"""What member processes do in `test_parallelism.py`: training with sharded parameters, over gloo and on the CPU."""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import client
from programs.ddp_programs import Mode, network, process_group, train_share
from programs.member_programs import Buffers
from support.sentences import error_of

MODE = Mode()
STEPS = 20


def by_fully_shard(model: nn.Module) -> nn.Module:
    """One shard per layer, batch norms included, freed between forward and backward."""
    mesh = init_device_mesh("cpu", (len(MODE.shares),))
    for layer in model.modules():
        if next(layer.parameters(recurse=False), None) is not None:
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_fully_shard_as_one(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (len(MODE.shares),)))


def by_fully_sharded_data_parallel(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard": by_fully_shard,
    "fully_shard, as one": by_fully_shard_as_one,
    "FullyShardedDataParallel": by_fully_sharded_data_parallel,
}


def train(connection: client.Connection, store: str, way: str) -> Buffers:
    model = client.convert_model(network(MODE))
    with process_group(store, connection):
        sharded = WAYS[way](model)
        train_share(sharded, sharded, MODE, connection.rank, STEPS)
        state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    return {name: value.numpy() for name, value in state.items()}


def convert_what_is_sharded(connection: client.Connection, store: str, way: str) -> list[tuple[bool, list[str]]]:
    """For conversion and reversion: whether each layer stayed the same, and the warnings."""
    found = []
    with process_group(store, connection):
        for model, change in ((network(MODE), client.convert_model), (_converted(), client.revert_model)):
            sharded = WAYS[way](model)
            before = list(sharded.modules())
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                change(sharded)
            same = [new is old for new, old in zip(sharded.modules(), before, strict=True)]
            found.append((all(same), [str(warning.message) for warning in caught]))
    return found


def convert_a_part(connection: client.Connection, store: str) -> tuple[bool, list[str]]:
    """For a part of a model sharded as a whole: whether its layer was left unconverted, and the warnings."""
    with process_group(store, connection):
        part = by_fully_shard_as_one(network(MODE)).stem
        before = part[1]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            client.convert_model(part)
        return part[1] is before, [str(warning.message) for warning in caught]


def give_a_dtensor(connection: client.Connection, store: str) -> tuple[str, torch.Tensor]:
    """The error for a distributed input, and the output for its local part."""
    layer = client.convert_model(nn.BatchNorm1d(2))
    with process_group(store, connection):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        return error_of(layer, x), layer(x.to_local()).detach()


def _converted() -> nn.Module:
    return client.convert_model(network(MODE))
