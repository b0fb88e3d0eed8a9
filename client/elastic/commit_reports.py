"""Reports: what each member says of itself at a commit, and what all conclude from that.

All members have the same reports, byte for byte, so each one draws the same conclusions for itself.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from client.serialization import pack, unpack
from statsd_bn import limits
from statsd_bn.checks import shown
from statsd_bn.errors import ProtocolError, ReplicaLost, RoundMismatch
from statsd_bn.members import Members, ranks_in_words


@dataclass(frozen=True, slots=True)
class Report:
    """What a member says of itself at a commit.

    Attributes:
        generation: how many commits its state has seen.
        members: who took part in its previous commit; empty if it is new.
        is_latecomer: whether the job was already running when it connected.
        batches: how many batches it has recorded since.
    """

    generation: int
    epoch: int
    members: list[int]
    is_latecomer: bool
    batches: int
    indices: list[int]

    def packed(self) -> bytes:
        """Returns the report as bytes."""
        plain = self.generation, self.epoch, self.members, self.is_latecomer, self.batches
        return pack([*plain, np.array(self.indices, np.int64)])

    @classmethod
    def unpacked(cls, data: bytes) -> "Report":
        """Reads a report.

        Raises:
            ProtocolError: the bytes are not a report.
        """
        match unpack(data):
            case [int(generation), int(epoch), list(met), bool(is_late), int(batches), np.ndarray() as samples] if (
                max(generation, batches) <= limits.MAX_COUNTER and _are_members(met) and _are_indices(samples)
            ):
                return cls(generation, epoch, met, is_late, batches, samples.tolist())
            case other:
                raise ProtocolError(f"expected a report of a member, got {shown(other)}")

    @property
    def is_new(self) -> bool:
        """Whether this is its first commit. Its rank does not tell: a new process may have the rank of a lost one."""
        return not self.members


def _are_indices(samples: np.ndarray[Any, Any]) -> bool:
    return samples.dtype == np.int64 and samples.ndim == 1 and bool((samples >= 0).all())


def _are_members(numbers: list[Any]) -> bool:
    return all(type(number) is int and 0 <= number < limits.MAX_MEMBERS for number in numbers)


Reports = dict[int, Report]
"""The reports of all members at a commit, by rank."""


def new(reports: Reports) -> set[int]:
    """Members at their first commit."""
    return {member for member, report in reports.items() if report.is_new}


def lost(reports: Reports) -> set[int]:
    """Members seen at the previous commit but absent now."""
    seen = {member for report in reports.values() for member in report.members}
    return seen.difference(reports) | seen & new(reports)


def leader(reports: Reports) -> int:
    """Member whose state everyone loads: existing before new, then the most advanced, then the lowest rank."""
    return max(
        reports,
        key=lambda member: (not reports[member].is_new, reports[member].generation, reports[member].batches, -member),
    )


def is_uneven(reports: Reports) -> bool:
    """Whether some members had one batch less than others."""
    return len({report.batches for report in reports.values()}) > 1


def check_not_too_late(reports: Reports, job: str, member: int) -> None:
    """Raises ReplicaLost if all members are new to a running job, so that nobody has its state any more."""
    if all(report.is_new and report.is_latecomer for report in reports.values()):
        raise ReplicaLost(
            f"job {job!r}: all members that had its state have left or are lost, before "
            f"{ranks_in_words(Members.of(reports))} could load it; if the job is not at its end, begin a new one from "
            "a checkpoint",
            job=job,
            member=member,
            cause="came too late",
        )


def check_agreement(reports: Reports) -> None:
    """Raises RoundMismatch if existing members commit at different points of the training."""
    points = {member: (report.epoch, report.generation) for member, report in reports.items() if not report.is_new}
    if len(set(points.values())) > 1:
        told = ", ".join(
            f"rank {member} in epoch {epoch} after {generation} commits"
            for member, (epoch, generation) in points.items()
        )
        raise RoundMismatch(f"ElasticState.commit(): expected all ranks at the same point, got {told}")
