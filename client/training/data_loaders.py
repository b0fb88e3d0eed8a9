"""Loaders whose samples are split among the members, and a callback that tells their samplers the epoch."""

import inspect
import sys
from collections.abc import Callable
from typing import Any, Self

from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from statsd_bn.errors import ConfigurationError

Loader = DataLoader[Any]
Sampler = DistributedSampler[Any]

# All arguments of a loader except its sampler, in this version of torch; a loader has attributes of the same names.
KEPT = sorted({*inspect.signature(DataLoader).parameters} - {"dataset", "shuffle", "sampler", "batch_sampler"})


def split(data_loader: Loader, shuffle: bool, world_size: int, rank: int) -> tuple[Loader, Sampler]:
    """Returns a loader like `data_loader` that gives the samples of one of `world_size` members, and its sampler.

    Raises:
        ConfigurationError: `rank` is outside [0, world_size), or the samples cannot be split.
    """
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank: expected at least 0 and less than world_size, {world_size}, got {rank}")
    _check_can_be_split(data_loader)
    sampler: Sampler = DistributedSampler(data_loader.dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
    kept = {name: getattr(data_loader, name) for name in KEPT}
    return DataLoader(data_loader.dataset, sampler=sampler, **kept), sampler


def _check_can_be_split(data_loader: Loader) -> None:
    dataset = data_loader.dataset
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise ConfigurationError(
            f"data_loader: expected a dataset with indices, which a sampler can split among the members, got the "
            f"IterableDataset {name}, which chooses its samples itself; let it give each member a part of its own"
        )
    if not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"data_loader: expected a dataset with a length, which is what a sampler splits among the members, got "
            f"{name} without __len__"
        )
    if data_loader.batch_size is None and data_loader.batch_sampler is not None:
        raise ConfigurationError(
            f"data_loader: expected batches made by batch_size, which can be made from one member's samples too, got "
            f"those of the batch_sampler {type(data_loader.batch_sampler).__name__}, which chooses their "
            "samples itself; let it give each member batches of its own"
        )


def is_shuffled(data_loader: Loader) -> bool:
    """Returns whether the samples come in random order; works for a loader that is already split too."""
    sampler = data_loader.sampler
    return isinstance(sampler, RandomSampler) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)


class EpochCallback:
    """Tells the samplers at the beginning of each epoch which it is, as a callback of a training loop."""

    callback_name = "epoch of the distributed samplers"
    # First, because the others may read from the loaders.
    execution_order = -100
    # On all devices.
    device_idx_execution = None

    def __init__(self, set_epoch: Callable[[int], None]) -> None:
        self.set_epoch = set_epoch
        self.train_loop_obj: Any = None
        self.message_service: Any = None

    def register_train_loop_object(self, train_loop_obj: Any) -> Self:
        """Sets the training loop whose epochs count."""
        self.train_loop_obj = train_loop_obj
        self.message_service = getattr(train_loop_obj, "message_service", None)
        return self

    def on_epoch_begin(self) -> None:
        """Passes the epoch on."""
        self.set_epoch(self.train_loop_obj.epoch)


def epoch_callback(callbacks_handler: Any, set_epoch: Callable[[int], None]) -> EpochCallback:
    """Returns a callback that `callbacks_handler` accepts.

    aitoolbox's accepts only subclasses of the `AbstractCallback` in its module. Ours becomes one, without an import of
    a package that may be missing.
    """
    module = sys.modules.get(callbacks_handler.register_callbacks.__module__)
    base: type = getattr(module, "AbstractCallback", object)
    kind: type[EpochCallback] = type(EpochCallback.__name__, (EpochCallback, base), {})
    return kind(set_epoch)
