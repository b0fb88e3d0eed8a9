"""Gathering: every member's bytes to every member, in rounds of a limited size.

A gather's rounds carry float64 values whose bits are bytes; the server puts what the members bring one behind the other
and looks into none of it. The first round says how many bytes each member has, and brings the first of them; what is
left follows in further rounds, whose sizes all members compute alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.members import Members, ranks_in_words
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import FloatArray

WORD_BYTES = 8

# What one member may announce, a tebibyte: two million rounds. What has come is all that is kept.
MAX_BYTES = 2**40

# What a member brings to the first round: two words, how many bytes it has and how many words of them follow, and so
# many words at most. A number from every member, or a small array, needs no second round.
HEAD_WORDS = 2
FIRST_WORDS = 1024

_WORD = np.dtype("<f8")
_LENGTH = np.dtype("<i8")


@dataclass(slots=True)
class _Parcel:
    """What has come of one member's bytes: `size` counts bytes, `left` the words that are to come."""

    size: int
    parts: list[FloatArray]
    left: int

    @property
    def data(self) -> bytes:
        return b"".join(part.tobytes() for part in self.parts)[: self.size]


def gather(join: Callable[[FloatArray], Aggregate], data: bytes, member: int, nr_members: int) -> dict[int, bytes]:
    """Returns the bytes of all members.

    Args:
        join: takes part in one round with values of shape (n,), and returns what all brought, one behind the other.
        data: this member's bytes.
        member: its number.
        nr_members: about how many members there are.

    Returns:
        Each member's bytes, by member; of those who were there to the end.

    Raises:
        ProtocolError: what came is no gather's.
    """
    words = np.frombuffer(data + bytes(-len(data) % WORD_BYTES), _WORD)
    first = words[: min(FIRST_WORDS, limits.MAX_CHANNELS // (2 * nr_members) - HEAD_WORDS)]
    head = np.array([len(data), len(first)], _LENGTH).view(_WORD)
    parcels = _begun(join(np.concatenate([head, first])))
    while any(parcel.left for parcel in parcels.values()):
        widths = _widths(parcels)
        mine = words[len(words) - parcels[member].left :][: widths[member]]
        # Whoever has nothing left brings a word all the same: the round waits for everybody.
        aggregate = join(mine if len(mine) else np.zeros(1))
        parcels = _of(aggregate, parcels)
        _take(parcels, _split(aggregate, [widths[other] for other in aggregate.members]))
    return {other: parcel.data for other, parcel in parcels.items()}


def _begun(aggregate: Aggregate) -> dict[int, _Parcel]:
    """Returns the parcels as the first round leaves them."""
    values = aggregate.values[0]
    parcels = {}
    for member in aggregate.members:
        size, here = (int(word) for word in values[:HEAD_WORDS].view(_LENGTH))
        first, values = values[HEAD_WORDS : HEAD_WORDS + here], values[HEAD_WORDS + here :]
        if not 0 <= size <= MAX_BYTES:
            raise ProtocolError(f"{aggregate.key}: expected 0 to {MAX_BYTES} bytes from rank {member}, got {size}")
        total = -(-size // WORD_BYTES)
        if not len(first) == here <= total:
            raise ProtocolError(
                f"{aggregate.key}: expected {here} of {total} words from rank {member}, got {len(first)}"
            )
        parcels[member] = _Parcel(size, [first], total - here)
    if len(values):
        raise ProtocolError(f"{aggregate.key}: expected no more after the last rank's words, got {len(values)}")
    return parcels


def _widths(parcels: dict[int, _Parcel]) -> dict[int, int]:
    """Returns how many words each member brings to the next round: those with something left share what there is."""
    busy = sum(parcel.left > 0 for parcel in parcels.values())
    share = (limits.MAX_CHANNELS - (len(parcels) - busy)) // busy
    return {member: max(1, min(parcel.left, share)) for member, parcel in parcels.items()}


def _of(aggregate: Aggregate, parcels: dict[int, _Parcel]) -> dict[int, _Parcel]:
    """Returns the parcels of those who are still there."""
    if strangers := [member for member in aggregate.members if member not in parcels]:
        known, others = (ranks_in_words(Members.of(ranks)) for ranks in (parcels, strangers))
        raise ProtocolError(f"{aggregate.key}: expected no others than {known}, got {others} as well")
    return {member: parcels[member] for member in aggregate.members}


def _split(aggregate: Aggregate, widths: list[int]) -> list[FloatArray]:
    values = aggregate.values[0]
    if len(values) != sum(widths):
        raise ProtocolError(f"{aggregate.key}: expected {sum(widths)} words of all members, got {len(values)}")
    return np.split(values, np.cumsum(widths)[:-1])


def _take(parcels: dict[int, _Parcel], parts: list[FloatArray]) -> None:
    for parcel, part in zip(parcels.values(), parts, strict=True):
        if parcel.left:
            parcel.parts.append(part)
            parcel.left -= len(part)
