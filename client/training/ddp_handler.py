"""DDPHandler: splits a training loop's loaders among the members, and gathers its measurements.

It has the interface of aitoolbox's handler, which needs a process group on GPUs. This handler uses the server: it works
on any devices, and with values of different lengths on the members.

A member that fails to make its tensors sends the cause in the same all_gather, because the other members wait for it.
All members check the same gathered data, so they raise together, and their rounds stay in step.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from itertools import chain, islice
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from client.serialization import NUMPY_DTYPES, pack, unpack
from client.session.connection import Connection, current_connection
from client.session.protocol.registration import cause_of
from client.tracebacks import api_boundary, warn
from client.transports import process_group
from client.transports.choose import Communicator, communicator_for
from client.transports.process_group import NamedProcessGroup
from statsd_bn.checks import short_repr
from statsd_bn.errors import ConfigurationError, ProtocolError, RoundFailed, RoundMismatch
from statsd_bn.members import Members, format_ranks
from statsd_bn.text import wire_text, wrap

LOADERS = ("train_loader", "validation_loader", "test_loader")

Loader = DataLoader[Any]
Sampler = DistributedSampler[Any]
Tensors = dict[str | int, Tensor]

# The arguments of a loader, except its sampler, in this version of torch; a loader has attributes of the same names.
COPIED = sorted({*inspect.signature(DataLoader).parameters} - {"dataset", "shuffle", "sampler", "batch_sampler"})

ROUND_NAME = "mp_sync()"  # name of the rounds; no layer's name contains brackets
MAX_LISTED_KEYS = 8  # in an error's text; a member may send any number of keys

_NUMBERS = (bool, int, float, np.integer, np.floating, np.bool_)


class DDPHandler:
    """Splits the loaders of a training loop, and gathers its measurements.

    Args:
        train_loop_obj: has `train_loader`, `validation_loader` and `test_loader`, each a DataLoader or None. If it has
            a `callbacks_handler`, a callback sets the samplers' epoch to `train_loop_obj.epoch`.
        connection: the connection to the other members; default: this process's current connection at each call;
            without a connection, torch's default process group; without either, this process is the only member.
    """

    def __init__(self, train_loop_obj: Any, *, connection: Connection | None = None) -> None:
        self.train_loop_obj = train_loop_obj
        self._connection = connection
        self._samplers: dict[str, Sampler] = {}
        self._is_registered = False

    @api_boundary
    def add_distributed_samplers(self, world_size: int | None = None, rank: int | None = None) -> None:
        """Replaces each loader by one for this member's samples.

        Shuffled loaders stay shuffled, in a new order each epoch. In an elastic job, call it again after a change of
        members.

        Args:
            world_size: the number of members; default: from `Connection.rank_and_size`, or the process group's.
            rank: this member's index; default: from the same source.

        Raises:
            ConfigurationError: `rank` is outside [0, world_size), or a loader cannot be split. No loader is replaced
                then.

        Warns:
            UserWarning: a sequential sampler replaces a loader's custom sampler.
        """
        own_rank, size = self._rank_and_size()
        world_size = size if world_size is None else world_size
        rank = own_rank if rank is None else rank
        loaders = {name: loader for name in LOADERS if (loader := getattr(self.train_loop_obj, name)) is not None}
        split = [self.build_loader_sampler(each, _is_shuffled(each), world_size, rank) for each in loaders.values()]
        for (name, before), (loader, sampler) in zip(loaders.items(), split, strict=True):
            if not isinstance(before.sampler, SequentialSampler | RandomSampler | DistributedSampler):
                got = f"{type(before.sampler).__name__}; the members' samples are in sequential order"
                warn(f"{name}: expected a sequential or random sampler, got {got}")
            setattr(self.train_loop_obj, name, loader)
            self._samplers[name] = sampler
        handler: Any = getattr(self.train_loop_obj, "callbacks_handler", None)
        if hasattr(handler, "register_callbacks") and not self._is_registered:
            # aitoolbox's handler accepts only subclasses of the `AbstractCallback` in its module.
            base: type = getattr(sys.modules.get(handler.register_callbacks.__module__), "AbstractCallback", object)
            kind: type[EpochCallback] = type(EpochCallback.__name__, (EpochCallback, base), {})
            handler.register_callbacks([kind(self.set_epoch)])
            self._is_registered = True

    def set_epoch(self, epoch: int) -> None:
        """Sets the samplers' epoch; call it at each epoch if the training loop has no `callbacks_handler`."""
        for sampler in self._samplers.values():
            sampler.set_epoch(epoch)

    @staticmethod
    @api_boundary
    def build_loader_sampler(data_loader: Loader, shuffle: bool, world_size: int, rank: int) -> tuple[Loader, Sampler]:
        """Returns a loader like `data_loader` for the samples of `rank` among `world_size`, and its sampler.

        The loader keeps all other settings.

        Raises:
            ConfigurationError: `rank` is outside [0, world_size); or the loader cannot be split, because of an
                IterableDataset, a dataset without a length, or a custom batch_sampler.
        """
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"rank: expected at least 0 and less than world_size, {world_size}, got {rank}")
        dataset = data_loader.dataset
        name = type(dataset).__name__
        if isinstance(dataset, IterableDataset):
            raise ConfigurationError(
                f"data_loader: expected a dataset with indices, got the IterableDataset {name}, which no sampler can "
                "split; make it yield different samples on each rank"
            )
        if not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                f"data_loader: expected a dataset with a length, which a sampler can split, got {name} without __len__"
            )
        if data_loader.batch_size is None and (batches := data_loader.batch_sampler) is not None:
            raise ConfigurationError(
                f"data_loader: expected a batch_size, got the batch_sampler {type(batches).__name__}; pass batch_size, "
                "or make it yield different batches on each rank"
            )
        sampler: Sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        arguments = {name: getattr(data_loader, name) for name in COPIED}
        return DataLoader(dataset, sampler=sampler, **arguments), sampler

    @api_boundary
    def mp_sync(
        self, data: Any, double_precision: bool = False, concat_mp_data: bool = True, return_tensor: bool = True
    ) -> Any:
        """Returns the values of all members. All members call it, at the same place in the order of their rounds.

        After a pass in `client.join` it waits until all members have finished the pass.

        Args:
            data: a tensor, array, number, or list of numbers. Its length, the size of dimension 0, may differ between
                members; a number has length 1. Python's numbers become bool, int64 or torch's default dtype.
            double_precision: convert everything but tensors to float64.
            concat_mp_data: concatenate the values along dimension 0, in the order of the ranks; else the result is a
                list with the values of each member.
            return_tensor: return a tensor, on the device of `data`; else an array for an array, and a list for other
                types.

        Raises:
            TypeError: `data` has another type, such as str, None or dict. The other members raise RoundFailed.
            ValueError: a list's elements differ in shape. The other members raise RoundFailed.
            RoundMismatch: on all members that concatenate: the values differ in dtype, or in dimensions other than 0.
            RoundFailed: another member raised; the error names it and its cause.
            StatsdBNError: the exchange failed, with the reason.
        """
        gathered = all_gather_tensors(self._communicator, lambda: {"data": as_tensor(data, double_precision)})
        tensors = {member: named["data"] for member, named in gathered.items()}
        if concat_mp_data:
            return from_tensor(concatenate(ROUND_NAME, tensors), data, return_tensor)
        return [from_tensor(tensor, data, return_tensor) for tensor in tensors.values()]

    @api_boundary
    def mp_sync_dict(self, dict_data: Mapping[str | int, Any]) -> dict[str | int, Tensor]:
        """Returns `mp_sync` of each value, by its key, in one exchange.

        Raises:
            RoundMismatch: on all members: their keys differ, or values differ in dtype or in dimensions other than 0.
            TypeError, ValueError, RoundFailed, StatsdBNError: as in `mp_sync`.
        """
        gathered = all_gather_tensors(self._communicator, lambda: _tensors(dict_data))
        results = {}
        for key, data in dict_data.items():
            tensors = {member: named[key] for member, named in gathered.items()}
            results[key] = from_tensor(concatenate(f"{ROUND_NAME}, {key!r}", tensors), data, return_tensor=True)
        return results

    @property
    def _communicator(self) -> Communicator | None:
        if self._connection is not None:
            return self._connection
        return communicator_for(None) or current_connection()

    def _rank_and_size(self) -> tuple[int, int]:
        communicator = self._communicator
        if isinstance(communicator, NamedProcessGroup):
            return communicator.find().rank(), communicator.size
        return communicator.rank_and_size if communicator else (0, 1)


def _tensors(dict_data: Any) -> dict[Any, Tensor]:
    if not isinstance(dict_data, Mapping):
        raise TypeError(f"expected a dict, got {type(dict_data).__name__}")
    tensors = {}
    for key, data in dict_data.items():
        if not isinstance(key, str | int):
            raise TypeError(f"expected keys of type str or int, got {key!r}")
        try:
            tensors[key] = as_tensor(data, double_precision=False)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{key!r}: {error}") from error
    return tensors


def _is_shuffled(data_loader: Loader) -> bool:
    """Returns whether the samples are in random order, also for a loader that is already split."""
    sampler = data_loader.sampler
    return isinstance(sampler, RandomSampler) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)


class EpochCallback:
    """Callback of a training loop that sets the samplers' epoch when an epoch begins."""

    callback_name = "epoch of the distributed samplers"
    execution_order = -100  # before callbacks that may read from the loaders
    device_idx_execution = None  # on all devices
    train_loop_obj: Any = None
    message_service: Any = None

    def __init__(self, set_epoch: Callable[[int], None]) -> None:
        self.set_epoch = set_epoch

    def register_train_loop_object(self, train_loop_obj: Any) -> Self:
        """Sets the training loop that counts the epochs."""
        self.train_loop_obj = train_loop_obj
        self.message_service = getattr(train_loop_obj, "message_service", None)
        return self

    def on_epoch_begin(self) -> None:
        """Sets the samplers' epoch."""
        self.set_epoch(self.train_loop_obj.epoch)


def all_gather_tensors(
    communicator: Communicator | None, make: Callable[[], Mapping[Any, Tensor]]
) -> dict[int, Tensors]:
    """Returns all members' tensors on the CPU, by rank, in order; without a communicator only this process's.

    `make` returns this member's tensors, under names that all members share. If it raises, the other members raise
    RoundFailed.
    """
    try:
        message = pack([make(), ""])
    except Exception as error:
        _all_gather(communicator, pack([{}, wire_text(cause_of(error))]))
        raise
    received = {member: _unpack(member, data) for member, data in _all_gather(communicator, message).items()}
    if causes := {member: cause for member, (_, cause) in received.items() if cause}:
        member, cause = next(iter(causes.items()))
        text = f"expected values from all ranks, got none from {Members.of(causes)}; rank {member}: {cause}"
        raise RoundFailed(f"{ROUND_NAME}: {text}", member=member, cause=cause)
    gathered = {member: tensors for member, (tensors, _) in received.items()}
    _check_names(gathered)
    return gathered


def _all_gather(communicator: Communicator | None, message: bytes) -> dict[int, bytes]:
    if communicator is None:
        return {0: message}
    if isinstance(communicator, NamedProcessGroup):
        return process_group.all_gather(communicator, ROUND_NAME, message)
    return communicator.all_gather(ROUND_NAME, message)


def _unpack(member: int, data: bytes) -> tuple[Tensors, str]:
    """Returns a member's tensors, and the cause if it has none."""
    where = f"{ROUND_NAME}: the values of rank {member}"
    try:
        state = unpack(data)
    except ProtocolError as error:
        raise ProtocolError(f"{where}: {error.message}") from error
    match state:
        case [dict(tensors), str(cause)] if all(
            isinstance(name, str | int) and isinstance(each, Tensor) and each.ndim for name, each in tensors.items()
        ):
            return tensors, wire_text(cause)
        case other:
            raise ProtocolError(f"{where}: expected tensors by name and a text, got {short_repr(other)}")


def _check_names(gathered: dict[int, Tensors]) -> None:
    partial = {
        name: Members.of(member for member, tensors in gathered.items() if name in tensors)
        for name in chain.from_iterable(gathered.values())
        if not all(name in tensors for tensors in gathered.values())
    }
    if partial:
        some = islice(partial.items(), MAX_LISTED_KEYS)
        got = "; ".join(f"{short_repr(name)} only from {members}" for name, members in some)
        more = f" and {len(partial) - MAX_LISTED_KEYS} keys more" if len(partial) > MAX_LISTED_KEYS else ""
        raise RoundMismatch(f"{ROUND_NAME}: expected the same keys from ranks {Members.of(gathered)}, got {got}{more}")


def as_tensor(data: Any, double_precision: bool) -> Tensor:
    """Converts a tensor, an array, a number, or a list or tuple of these to a tensor of at least one dimension.

    Other types than a tensor are converted to float64 (complex128) if `double_precision`.
    """
    tensor = _tensor(data, double_precision and not isinstance(data, Tensor))
    return tensor if tensor.ndim else tensor.reshape(1)


def concatenate(name: str, tensors: dict[int, Tensor]) -> Tensor:
    """Returns the members' tensors, concatenated along dimension 0; only its length may differ between them."""
    # An empty list, or any tensor of shape (0,), is compatible with every dtype and shape.
    parts = {member: tensor for member, tensor in tensors.items() if tensor.shape != (0,)} or tensors
    layouts: dict[str, list[int]] = {}
    for member, tensor in parts.items():
        shape = ", ".join(["*", *map(str, tensor.shape[1:])])
        layouts.setdefault(f"{str(tensor.dtype).removeprefix('torch.')} of shape ({shape})", []).append(member)
    if len(layouts) > 1:
        got = "; ".join(f"{layout} from {format_ranks(Members.of(members))}" for layout, members in layouts.items())
        raise RoundMismatch(f"{name}: expected one dtype, and one shape but for dimension 0, from all ranks, got {got}")
    return torch.cat(list(parts.values()))


def from_tensor(tensor: Tensor, data: Any, return_tensor: bool) -> Any:
    """Returns a tensor on the device of `data`; without `return_tensor` an array if `data` is one, else a list."""
    if return_tensor:
        return tensor.to(data.device) if isinstance(data, Tensor) else tensor
    return tensor.numpy() if isinstance(data, np.ndarray) else tensor.tolist()


def _tensor(data: Any, is_double: bool) -> Tensor:
    """Returns a tensor of the same shape, which may have no dimensions."""
    if isinstance(data, list | tuple):
        return _from_list(data, is_double)
    if isinstance(data, _NUMBERS):
        return _from_numbers(data, is_double)
    if isinstance(data, Tensor):
        if data.layout is not torch.strided:
            raise TypeError(f"expected a dense tensor, got one with layout {data.layout}")
        tensor = data.cpu()
    elif isinstance(data, np.ndarray):
        if data.dtype.name not in NUMPY_DTYPES:
            raise TypeError(f"expected an array of numbers or bool, got dtype {data.dtype}")
        tensor = torch.tensor(data.astype(data.dtype.newbyteorder("=")))
    else:
        raise TypeError(f"expected a tensor, an array, a number, or a list of these, got {type(data).__name__}")
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) if is_double else tensor


def _from_numbers(data: Any, is_double: bool) -> Tensor:
    try:
        # Without an intermediate float32, which would lose digits.
        return torch.tensor(data, dtype=torch.float64 if is_double else None)
    except (OverflowError, RuntimeError, ValueError) as error:  # the type depends on the version of torch
        if isinstance(error, OverflowError) or "Overflow" in str(error):
            kind = "float64" if is_double else "int64"
            raise ValueError(f"expected numbers that fit into {kind}, got {short_repr(data)}") from error
        raise


def _from_list(data: list[Any] | tuple[Any, ...], is_double: bool) -> Tensor:
    kinds = _types_within(data)
    for kind in kinds:
        if not issubclass(kind, (Tensor, np.ndarray, *_NUMBERS)):
            text = f"expected a list of numbers, arrays, tensors or such lists, got {kind.__name__} in it"
            raise TypeError(wrap(text))
    # torch converts plain numbers fast, arrays slowly, and tensors with a warning.
    if not any(issubclass(kind, Tensor | np.ndarray) for kind in kinds):
        return _from_numbers(data, is_double)
    elements = [_tensor(element, is_double) for element in data]
    shapes = {tuple(element.shape) for element in elements}
    if len(shapes) > 1:
        raise ValueError(f"expected a list of elements of one shape, got {sorted(shapes)}")
    return torch.stack(elements)


def _types_within(data: list[Any] | tuple[Any, ...]) -> set[type]:
    kinds = {type(element) for element in data}
    nested = (element for element in data if isinstance(element, list | tuple))
    return {kind for kind in kinds if not issubclass(kind, list | tuple)}.union(*map(_types_within, nested))
