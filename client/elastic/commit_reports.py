"""Votes: what the members of a meeting say of themselves, and what follows from it.

All have the same votes, the same bytes for all, so each finds for itself what all find.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from client.serialization.packing import pack, unpack
from statsd_bn import limits
from statsd_bn.checks import shown
from statsd_bn.errors import ProtocolError, ReplicaLost, RoundMismatch


@dataclass(frozen=True, slots=True)
class Vote:
    """What a member says of itself at a meeting.

    Attributes:
        generation: how many meetings its state has seen.
        epoch: of its sampler.
        members: whom it has met at the last meeting; nobody if it is new.
        is_latecomer: whether the job was under way already when it connected.
        batches: how many it has recorded since.
        indices: their samples.
    """

    generation: int
    epoch: int
    members: list[int]
    is_latecomer: bool
    batches: int
    indices: list[int]

    def packed(self) -> bytes:
        """Returns what travels."""
        plain = self.generation, self.epoch, self.members, self.is_latecomer, self.batches
        return pack([*plain, np.array(self.indices, np.int64)])

    @classmethod
    def unpacked(cls, data: bytes) -> "Vote":
        """Returns the vote that was packed.

        Raises:
            ProtocolError: it is none.
        """
        match unpack(data):
            case [int(generation), int(epoch), list(met), bool(is_late), int(batches), np.ndarray() as samples] if (
                max(generation, batches) <= limits.MAX_COUNTER and _are_members(met) and _are_indices(samples)
            ):
                return cls(generation, epoch, met, is_late, batches, samples.tolist())
            case other:
                raise ProtocolError(f"expected a vote of a member, got {shown(other)}")

    @property
    def is_new(self) -> bool:
        """Whether it has met nobody yet. Its number does not tell: a new process may have that of a lost one."""
        return not self.members


def _are_indices(samples: np.ndarray[Any, Any]) -> bool:
    return samples.dtype == np.int64 and samples.ndim == 1 and bool((samples >= 0).all())


def _are_members(numbers: list[Any]) -> bool:
    return all(type(number) is int and 0 <= number < limits.MAX_MEMBERS for number in numbers)


Votes = dict[int, Vote]
"""What the members of a meeting say, by member."""


def new(votes: Votes) -> set[int]:
    """Returns who has come."""
    return {member for member, vote in votes.items() if vote.is_new}


def lost(votes: Votes) -> set[int]:
    """Returns who is not there whom somebody has met at the last meeting."""
    met = {member for vote in votes.values() for member in vote.members}
    return met.difference(votes) | met & new(votes)


def leader(votes: Votes) -> int:
    """Returns whose state all take over: the lowest of those who are furthest, and were there if anybody was."""
    return max(
        votes, key=lambda member: (not votes[member].is_new, votes[member].generation, votes[member].batches, -member)
    )


def is_uneven(votes: Votes) -> bool:
    """Whether some members lack what others have: they had a batch less."""
    return len({vote.batches for vote in votes.values()}) > 1


def check_not_too_late(votes: Votes, job: str, member: int) -> None:
    """Raises ReplicaLost where all have come to a job under way, and nobody is left of those who had its state."""
    if all(vote.is_new and vote.is_latecomer for vote in votes.values()):
        raise ReplicaLost(
            f"job {job!r}: all that had its state have left, or are lost, before members {list(votes)} could take it "
            "over; if the job is not at its end, begin a new one from a checkpoint",
            job=job,
            member=member,
            cause="came too late",
        )


def check_agreement(votes: Votes) -> None:
    """Raises RoundMismatch where members that were there before have come from different places."""
    places = {member: (vote.epoch, vote.generation) for member, vote in votes.items() if not vote.is_new}
    if len(set(places.values())) > 1:
        told = ", ".join(
            f"member {member} in epoch {epoch} after {generation} meetings"
            for member, (epoch, generation) in places.items()
        )
        raise RoundMismatch(f"ElasticState.commit(): expected all members at one place, got {told}")
