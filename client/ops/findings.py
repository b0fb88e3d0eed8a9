"""Findings: what is wrong with a round whose rows have stayed on their device.

Over the host a round that fails raises there. Here the device computes whether it has failed, and its count becomes
NaN: all that is made of it is NaN, and moves no running statistics, until a later call raises what was wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from client.ops import non_finite
from client.ops.triton import FEW, NOT_FINITE, OTHER_ROUND
from client.ops.verdicts import Flags, Verdicts
from client.transports import process_group
from client.transports.device_rows import DeviceAggregate, LocalRows
from client.transports.process_group import ProcessGroupPipe
from client.transports.transport import Transport
from statsd_bn.error_text import MOST_ROWS, Place, Row, broken, error_text
from statsd_bn.errors import ConfigurationError, RoundMismatch
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate
from statsd_bn.round_key import ADVICE

verdicts = Verdicts()


@dataclass(frozen=True, slots=True, eq=False)
class Few:
    """That the whole batch may have too few values per channel.

    Attributes:
        flag: whether it has, shape (), bool.
        layer: the layer's name.
        shape: of this replica's input.
    """

    flag: Tensor
    layer: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """What may be wrong with one round.

    Attributes:
        transport: it came over.
        brought: this process's rows in it.
        aggregate: its result.
        few: None where the whole batch is known to have enough values.
    """

    transport: Transport
    brought: LocalRows
    aggregate: DeviceAggregate
    few: Few | None = None

    def failed(self) -> Tensor | None:
        """Returns whether the round has failed, shape (), bool; None where it cannot have."""
        others, few = self.aggregate.others, self.few
        if others is None:
            return None if few is None else few.flag
        return others.any() if few is None else others.any() | few.flag

    def hand_in(self) -> None:
        """Has what is wrong said as soon as the device has found it out."""
        flags = [] if self.aggregate.others is None else [self.aggregate.others]
        if self.few is not None:
            flags.append(self.few.flag.unsqueeze(0))
        if non_finite.is_awaited(self.transport):
            flags.append((self.aggregate.rows * 0).sum(1) != 0)  # NaN where anything is not finite, in few operators
        if flags:
            at_once = non_finite.raises(self.transport, self.aggregate.key)
            verdicts.hand_in(torch.cat(flags) if len(flags) > 1 else flags[0], self._tell, at_once=at_once)

    def tell_of_rows(self, found: Flags) -> None:
        """Says what is wrong, given the flags of each row, and then those of the whole batch where `few` is there."""
        nr_ranks = len(self.aggregate.ranks)
        rows, whole = found[:nr_ranks], found[nr_ranks:]
        others = rows[: 0 if self.aggregate.others is None else nr_ranks] & OTHER_ROUND
        not_finite = rows & (NOT_FINITE if non_finite.is_awaited(self.transport) else 0)
        self._tell(np.concatenate((others, whole & FEW, not_finite)) != 0)

    def _tell(self, flags: Flags) -> None:
        nr_ranks = 0 if self.aggregate.others is None else len(self.aggregate.ranks)
        others, rest = flags[:nr_ranks], flags[nr_ranks:]
        if others.any():
            raise self._mismatch(others)
        if self.few is not None:
            is_few, rest = rest[0], rest[1:]
            if is_few:
                raise too_few(self.few.layer, int(self.aggregate.count), self.few.shape)
        if rest.any():
            self._tell_non_finite(rest)

    def _mismatch(self, others: Flags) -> RoundMismatch:
        ranks, key = self.aggregate.ranks, self.aggregate.key
        here = [rank for rank, is_other in zip(ranks, others, strict=True) if not is_other]
        there = [rank for rank, is_other in zip(ranks, others, strict=True) if is_other]
        table = [_place(here, f"in {key.in_words()}"), _place(there, "in another round")]
        what = "the ranks have come to different rounds, so nobody can go on"
        where = "torch's process group, on devices: what the ranks have computed since is NaN"
        return RoundMismatch(error_text(what, table=table, where=where, advice=ADVICE), **key.fields)

    def _tell_non_finite(self, rows: Flags) -> None:
        """Brings to the host what is to be told; there is no hurry any more."""
        found = self.aggregate
        whose = np.repeat(found.ranks, len(rows) // len(found.ranks))[rows]
        count = found.count.nan_to_num(0.0)
        aggregate = Aggregate(
            found.key,
            len(rows),
            int(count),
            Members.of(found.ranks),
            found.values.cpu().numpy(),
            non_finite=Members.of(map(int, whose)),
        )
        if isinstance(self.transport, ProcessGroupPipe):
            process_group.tell(self.transport, aggregate)
        non_finite.check(self.transport, self.brought.on_host(), aggregate)


def hand_in_of_rows(flags: Tensor, blocks: int, findings: Callable[[], Findings], *, at_once: bool) -> None:
    """Has what Triton's kernels found wrong with a round reported as soon as the device has found it out.

    Args:
        flags: shape (rows * blocks,), or of one row more for the whole batch; see `client.ops.triton`. Each block of
            channels has flags of its own.
        blocks: how many there are.
        findings: of the same round, made where something is wrong.
        at_once: wait here for the flags.
    """

    def tell(found: Flags) -> None:
        findings().tell_of_rows(np.bitwise_or.reduce(found.astype(np.int64).reshape(-1, blocks), axis=1))

    verdicts.hand_in(flags, tell, at_once=at_once)


def check_computed_again(layer: str, first: Tensor, again: Tensor, tolerance: float) -> None:
    """Has an error raised later if the input of a call is not the one that it is taken for.

    Args:
        layer: the layer's name.
        first: what the first run brought, shape (2, C).
        again: what the second run computed, likewise.
        tolerance: how far apart they may be, relative to the largest of each vector.
    """
    first, again = first.nan_to_num(), again.to(first.device, non_blocking=True).nan_to_num()
    differs = (first - again).abs().amax(1) > tolerance * first.abs().amax(1)

    def tell(_: Flags) -> None:
        raise ConfigurationError(
            f"layer {layer!r}: expected a call during a backward pass to have the input of an earlier call again, as "
            "checkpoints do, got another one; call it outside of the backward pass"
        )

    verdicts.hand_in(differs, tell)


def _place(ranks: Sequence[int], where: str) -> Place:
    return Place([Row((f"rank {rank}", where)) for rank in ranks[:MOST_ROWS]], len(ranks), where)


def too_few(layer: str, count: int, shape: tuple[int, ...]) -> ValueError:
    """Returns the error for a whole batch with so few values per channel."""
    return ValueError(
        broken(
            f"layer {layer!r}: expected more than 1 value per channel over all replicas when training, got {count} "
            f"(this replica's input has shape {shape})"
        )
    )
