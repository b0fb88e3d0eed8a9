"""DDPHandler: a training loop's loaders split among the members, and its measurements gathered from all of them.

The name, the calls and their results are those of aitoolbox's handler, which needs a process group on GPUs. This one
goes over the service: on any devices, and with values of another length on each member.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from client.session.connection import Connection
from client.session.current import current_connection
from client.tracebacks import api_boundary
from client.training import data_loaders
from client.training.all_gather_tensors import TRANSPORT, share
from client.training.data_loaders import Loader, Sampler
from client.training.measurements import as_tensor, joined, like
from client.transports.choose import Communicator, communicator_for
from client.transports.named_process_group import NamedProcessGroup

LOADERS = ("train_loader", "validation_loader", "test_loader")


class DDPHandler:
    """What a training loop needs among several members.

    Args:
        train_loop_obj: has `train_loader`, `validation_loader` and `test_loader`, each a DataLoader or None. If it has
            a `callbacks_handler`, that tells the samplers each epoch, and `train_loop_obj.epoch` is its number.
        connection: to the other members; default: this process's current one at the time of each call; without any,
            torch's default process group; without that too, this process is the only member.
    """

    def __init__(self, train_loop_obj: Any, *, connection: Connection | None = None) -> None:
        self.train_loop_obj = train_loop_obj
        self._given = connection
        self._samplers: dict[str, Sampler] = {}
        self._is_registered = False

    @api_boundary
    def add_distributed_samplers(self, world_size: int | None = None, rank: int | None = None) -> None:
        """Replaces each loader by one that gives this member's samples.

        They come in random order, another one each epoch, where those of the loader do. In an elastic job it can be
        called again when the members have changed.

        Args:
            world_size: how many members there are; default: from `Connection.rank_and_size`, or the process group's.
            rank: this member's index among them; default: likewise.

        Raises:
            ConfigurationError: `rank` is outside [0, world_size), or a loader cannot be split. All loaders are then
                as they were.

        Warns:
            UserWarning: a loader's own sampler, neither sequential nor random, is replaced by a sequential one.
        """
        own_rank, size = self._rank_and_size()
        world_size = size if world_size is None else world_size
        rank = own_rank if rank is None else rank
        loaders = {name: getattr(self.train_loop_obj, name) for name in LOADERS}
        split = {
            name: data_loaders.split(loader, data_loaders.is_shuffled(loader), world_size, rank)
            for name, loader in loaders.items()
            if loader is not None
        }
        for name, (loader, sampler) in split.items():
            _warn_of_lost_sampler(name, loaders[name].sampler)
            setattr(self.train_loop_obj, name, loader)
            self._samplers[name] = sampler
        self._register()

    def set_epoch(self, epoch: int) -> None:
        """Tells the samplers which epoch begins; call it if the training loop has no `callbacks_handler`."""
        for sampler in self._samplers.values():
            sampler.set_epoch(epoch)

    @staticmethod
    @api_boundary
    def build_loader_sampler(data_loader: Loader, shuffle: bool, world_size: int, rank: int) -> tuple[Loader, Sampler]:
        """Returns a loader like `data_loader` for the samples of `rank` among `world_size`, and its sampler.

        Except for the sampler it has all settings of the given loader.

        Raises:
            ConfigurationError: `rank` is outside [0, world_size); or the samples cannot be split: of an
                IterableDataset, of a dataset without a length, of a loader with a batch_sampler of its own.
        """
        return data_loaders.split(data_loader, shuffle, world_size, rank)

    @api_boundary
    def mp_sync(
        self, data: Any, double_precision: bool = False, concat_mp_data: bool = True, return_tensor: bool = True
    ) -> Any:
        """Returns the values of all members. All of them call it, in the same order among their rounds.

        A member that has finished a pass in `client.join` waits until the others have finished too.

        Args:
            data: a tensor, array, number, or list of numbers. Its length, the size of dimension 0, may differ between
                members; a number has length 1. Python's numbers become bool, int64 or torch's default dtype.
            double_precision: whether anything but a tensor becomes float64.
            concat_mp_data: whether the values are joined along dimension 0, in the order of the ranks; else the result
                is a list with the values of each member.
            return_tensor: whether the result is a tensor, on the device of `data`; else an array for an array, and a
                list for anything else.

        Raises:
            TypeError: `data` is something else, such as a str, None or dict. The other members raise RoundFailed.
            ValueError: a list's elements differ in shape. The other members raise RoundFailed.
            RoundMismatch: on all members: the values differ in dtype, or in more than the length, so they cannot be
                joined.
            RoundFailed: another member raised; the error names it and its cause.
            StatsdBNError: the exchange failed, with the reason.
        """
        shared = share(self._communicator, lambda: {"data": as_tensor(data, double_precision)})
        tensors = {member: given["data"] for member, given in shared.items()}
        if concat_mp_data:
            return like(joined(TRANSPORT, tensors), data, return_tensor)
        return [like(tensor, data, return_tensor) for tensor in tensors.values()]

    @api_boundary
    def mp_sync_dict(self, dict_data: Mapping[str | int, Any]) -> dict[str | int, Tensor]:
        """Returns `mp_sync` of each value, by its key, in one exchange.

        Raises:
            RoundMismatch: on all members: their keys differ, or values do as in `mp_sync`.
            TypeError, ValueError, RoundFailed, StatsdBNError: as in `mp_sync`.
        """
        shared = share(self._communicator, lambda: _tensors(dict_data))
        results = {}
        for key, data in dict_data.items():
            tensors = {member: given[key] for member, given in shared.items()}
            results[key] = like(joined(f"{TRANSPORT}, {key!r}", tensors), data, return_tensor=True)
        return results

    @property
    def _communicator(self) -> Communicator | None:
        if self._given is not None:
            return self._given
        return communicator_for(None) or current_connection()

    def _rank_and_size(self) -> tuple[int, int]:
        communicator = self._communicator
        if isinstance(communicator, NamedProcessGroup):
            return communicator.find().rank(), communicator.size
        return communicator.rank_and_size if communicator else (0, 1)

    def _register(self) -> None:
        callbacks_handler: Any = getattr(self.train_loop_obj, "callbacks_handler", None)
        if hasattr(callbacks_handler, "register_callbacks") and not self._is_registered:
            callbacks_handler.register_callbacks([data_loaders.epoch_callback(callbacks_handler, self.set_epoch)])
            self._is_registered = True


def _tensors(dict_data: Any) -> dict[Any, Tensor]:
    if not isinstance(dict_data, Mapping):
        raise TypeError(f"expected a dict, got {type(dict_data).__name__}")
    return {key: _named(key, data) for key, data in dict_data.items()}


def _named(key: Any, data: Any) -> Tensor:
    try:
        return as_tensor(data, double_precision=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key!r}: {error}") from error


def _warn_of_lost_sampler(name: str, sampler: Any) -> None:
    if not isinstance(sampler, SequentialSampler | RandomSampler | DistributedSampler):
        warnings.warn(
            f"{name}: expected a sequential or random sampler, got {type(sampler).__name__}; the members' samples come "
            "in sequential order",
            stacklevel=4,  # the border's frame is between
        )
