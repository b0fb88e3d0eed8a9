"""ElasticSampler: every sample of an epoch once, however often the members change meanwhile.

Samples that are recorded as processed are taken out, and the rest is split again whenever the members change. Nothing
is padded, so no sample is seen twice; the shares of the members may differ by one.
"""

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from client.session.current import current_connection
from statsd_bn.error_text import broken


class ElasticSampler(Sampler[int]):
    """Gives each member its share of the samples that are not processed yet.

    For a `DataLoader(dataset, batch_size, sampler=sampler)`. Members with the same state have disjoint shares, which
    together are all remaining samples. Do not use `drop_last`: it leaves samples over in each epoch, and gives members
    different numbers of batches when they commit; `ElasticState` reports that.

    Args:
        dataset: only its length is used; the same on every member.
        shuffle: draw a new order for each epoch; else the order of the dataset.
        seed: of the order, the same on every member.

    Attributes:
        epoch: the current epoch.
        rank: this member's index among those who share.
        world_size: how many share.
        indices: this member's share, in order.
        recorded: its own batches recorded since the share was split, or since `ElasticState` reported them to the
            others.

    Raises:
        TypeError: the dataset has no length.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(
                f"dataset: expected one with a length, so that it can be split, got {type(dataset).__name__}"
            )
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
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
        """Begins an epoch; does nothing in the current one, so that a restored epoch goes on."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self._processed[:] = False
        self.reset(self.rank, self.world_size)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that a batch of this member's share has been processed.

        Args:
            batch_idx: which one, as a loader with this sampler counts them, from 0 after each `reset`.
            batch_size: the loader's; the last batch may be shorter.

        Raises:
            IndexError: the share has no such batch.
        """
        batch = self.indices[batch_idx * batch_size :][:batch_size]
        if batch_idx < 0 or not batch:
            raise IndexError(
                broken(
                    f"batch_idx: expected one of the {-(-len(self.indices) // batch_size)} batches of {batch_size} of "
                    f"{len(self.indices)} samples, got {batch_idx}"
                )
            )
        self.recorded.append(batch)
        self.record_indices(batch)

    def record_indices(self, indices: Sequence[int]) -> None:
        """Records that these samples have been processed, by any member."""
        self._processed[list(indices)] = True

    @property
    def processed_indices(self) -> list[int]:
        """The processed samples of this epoch, as far as this member knows, in ascending order."""
        indices: list[int] = np.flatnonzero(self._processed).tolist()
        return indices

    @property
    def is_exhausted(self) -> bool:
        """Whether no sample of the epoch is left."""
        return bool(self._processed.all())

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and its processed samples; not who has which share."""
        # A tensor: a list of a million numbers takes more than a second to be copied at each commit.
        return {"epoch": self.epoch, "processed_indices": torch.from_numpy(np.flatnonzero(self._processed))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, and splits the remaining samples again; `processed_indices` may be a list as well.

        Raises:
            ValueError: the state names a sample that the dataset does not have.
        """
        processed = torch.as_tensor(state_dict["processed_indices"], dtype=torch.int64, device="cpu").numpy()
        if processed.size and not 0 <= processed.min() <= processed.max() < self._size:
            raise ValueError(
                broken(
                    f"processed_indices: expected samples of a dataset of {self._size}, got {processed.min()} to "
                    f"{processed.max()}"
                )
            )
        self.epoch = state_dict["epoch"]
        self._processed[:] = False
        self._processed[processed] = True
        self.reset(self.rank, self.world_size)

    def reset(self, rank: int | None = None, world_size: int | None = None) -> None:
        """Splits the remaining samples of the epoch; after it, start a new iteration of a loader with this sampler.

        Args:
            rank: this member's index among those who share; None: from the current connection.
            world_size: how many share; None: from the current connection.
        """
        if rank is None or world_size is None:
            connection = current_connection()
            rank, world_size = connection.rank_and_size if connection else (0, 1)
        self.rank, self.world_size = rank, world_size
        self.recorded = []
        order = self._order()
        self.indices = order[~self._processed[order]][rank::world_size].tolist()

    def _order(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        if not self.shuffle:
            return np.arange(self._size)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self._size, generator=generator).numpy()
