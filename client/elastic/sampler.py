"""ElasticSampler: each sample of an epoch counts once, however often the members change.

After a change of members the unprocessed samples are split again. After a loss they include the samples of all batches
since the last commit, whose updates are undone. There is no padding, so the members' shares may differ by one.
"""

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from client.session.connection import current_connection
from statsd_bn.text import wrap


class ElasticSampler(Sampler[int]):
    """Splits the unprocessed samples of an epoch among the members.

    For a `DataLoader(dataset, batch_size, sampler=sampler)`. Members with the same state have disjoint shares, which
    together are all remaining samples. Do not use `drop_last`: it leaves samples of each epoch unprocessed, and then a
    member with one batch more may commit once more than the others, which raises RoundMismatch.

    Args:
        dataset: only its length is used, which must be equal on all members.
        shuffle: draw a new order for each epoch; else the order of the dataset.
        seed: of the order, equal on all members.

    Attributes:
        epoch: the current epoch.
        rank: the index of this member's share.
        world_size: the number of shares.
        indices: this member's share, in order.
        recorded: the batches that this member has recorded since the last split or commit, as lists of indices.

    Raises:
        TypeError: the dataset has no length.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        if not isinstance(dataset, Sized):
            expected = "expected one with a length, so that it can be split"
            raise TypeError(f"dataset: {expected}, got {type(dataset).__name__}")
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.indices: list[int] = []
        self.recorded: list[list[int]] = []
        self._size = len(dataset)
        self._processed = np.zeros(self._size, dtype=bool)
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch; without effect for the current one, so that a restored epoch continues."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self._processed[:] = False
        self.reset(self.rank, self.world_size)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that a batch of this member's share has been processed.

        Args:
            batch_idx: its index in a loader with this sampler, from 0 after each `reset`.
            batch_size: the loader's; the last batch may be shorter.

        Raises:
            IndexError: the share has no such batch.
        """
        batch = self.indices[batch_idx * batch_size :][:batch_size]
        if batch_idx < 0 or not batch:
            size = len(self.indices)
            expected = f"expected one of the {-(-size // batch_size)} batches of {batch_size} of {size} samples"
            raise IndexError(wrap(f"batch_idx: {expected}, got {batch_idx}"))
        self.recorded.append(batch)
        self.record_indices(batch)

    def record_indices(self, indices: Sequence[int]) -> None:
        """Records samples as processed, by any member."""
        self._processed[list(indices)] = True

    @property
    def processed_indices(self) -> list[int]:
        """The processed samples of this epoch that this member knows, in ascending order."""
        indices: list[int] = np.flatnonzero(self._processed).tolist()
        return indices

    @property
    def is_exhausted(self) -> bool:
        """Whether no sample of the epoch is left."""
        return bool(self._processed.all())

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and its processed samples, without the shares."""
        # A tensor: copying a list of a million numbers at each commit would take more than a second.
        return {"epoch": self.epoch, "processed_indices": torch.from_numpy(np.flatnonzero(self._processed))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, and splits the remaining samples again; `processed_indices` may also be a list.

        Raises:
            ValueError: the state contains a sample outside of the dataset.
        """
        processed = torch.as_tensor(state_dict["processed_indices"], dtype=torch.int64, device="cpu").numpy()
        if processed.size and not 0 <= processed.min() <= processed.max() < self._size:
            got = f"got {processed.min()} to {processed.max()}"
            raise ValueError(wrap(f"processed_indices: expected samples of a dataset of {self._size}, {got}"))
        self.epoch = state_dict["epoch"]
        self._processed[:] = False
        self._processed[processed] = True
        self.reset(self.rank, self.world_size)

    def reset(self, rank: int | None = None, world_size: int | None = None) -> None:
        """Splits the remaining samples of the epoch; afterwards start a new iteration of a loader with this sampler.

        Args:
            rank: the index of this member's share; None: from the current connection.
            world_size: the number of shares; None: from the current connection.
        """
        if rank is None or world_size is None:
            connection = current_connection()
            rank, world_size = connection.rank_and_size if connection else (0, 1)
        self.rank, self.world_size = rank, world_size
        self.recorded = []
        order = np.arange(self._size)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._size, generator=generator).numpy()
        self.indices = order[~self._processed[order]][rank::world_size].tolist()
