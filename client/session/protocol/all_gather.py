"""All-gather of bytes, as float64 values. The server concatenates them in rounds of limited size.

In the first round each member announces its number of bytes, and sends its first bytes. The rest follows in further
rounds; from the announced numbers all members compute how many values each member sends in a round.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.members import Members, format_ranks
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import FloatArray

VALUE_BYTES = 8
MAX_BYTES = 2**40  # of one member, in two million rounds; memory is allocated as bytes arrive

# A member's values in the first round: its number of bytes, the number of data values in this round, then at most
# FIRST_VALUES data values. Small data needs no second round.
HEAD_VALUES = 2
FIRST_VALUES = 1024

_VALUE = np.dtype("<f8")
_LENGTH = np.dtype("<i8")


@dataclass(slots=True)
class _Parcel:
    """One member's data: `size` in bytes, the received `parts`, and the number of values `left` to receive."""

    size: int
    parts: list[FloatArray]
    left: int

    @property
    def data(self) -> bytes:
        return b"".join(part.tobytes() for part in self.parts)[: self.size]


def gather(
    concatenate: Callable[[FloatArray], Aggregate], data: bytes, member: int, nr_members: int
) -> dict[int, bytes]:
    """Gather the bytes of the members that stay to the end; `nr_members` is an estimate."""
    # `concatenate` runs one round with values of shape (n,), and returns the concatenated values of all members.
    values = np.frombuffer(data + bytes(-len(data) % VALUE_BYTES), _VALUE)
    first = values[: min(FIRST_VALUES, limits.MAX_CHANNELS // (2 * nr_members) - HEAD_VALUES)]
    head = np.array([len(data), len(first)], _LENGTH).view(_VALUE)
    parcels = _first_parcels(concatenate(np.concatenate([head, first])))
    while any(parcel.left for parcel in parcels.values()):
        widths = _widths(parcels)
        part = values[len(values) - parcels[member].left :][: widths[member]]
        # A member without further data sends one value, since the round waits for all members.
        aggregate = concatenate(part if len(part) else np.zeros(1))
        parcels = _present(aggregate, parcels)
        gathered = aggregate.values[0]
        *starts, end = np.cumsum([widths[other] for other in parcels])
        if len(gathered) != end:
            raise ProtocolError(f"{aggregate.key}: expected {end} values of all members, got {len(gathered)}")
        for parcel, part in zip(parcels.values(), np.split(gathered, starts), strict=True):
            if parcel.left:
                parcel.parts.append(part)
                parcel.left -= len(part)
    return {other: parcel.data for other, parcel in parcels.items()}


def _first_parcels(aggregate: Aggregate) -> dict[int, _Parcel]:
    """Parcels after the first round."""
    values = aggregate.values[0]
    parcels = {}
    for member in aggregate.members:
        size, here = (int(word) for word in values[:HEAD_VALUES].view(_LENGTH))
        first, values = values[HEAD_VALUES : HEAD_VALUES + here], values[HEAD_VALUES + here :]
        if not 0 <= size <= MAX_BYTES:
            raise ProtocolError(f"{aggregate.key}: expected 0 to {MAX_BYTES} bytes from rank {member}, got {size}")
        total = -(-size // VALUE_BYTES)
        if not len(first) == here <= total:
            raise ProtocolError(
                f"{aggregate.key}: expected {here} of {total} values from rank {member}, got {len(first)}"
            )
        parcels[member] = _Parcel(size, [first], total - here)
    if len(values):
        raise ProtocolError(f"{aggregate.key}: expected no values after the last rank's, got {len(values)}")
    return parcels


def _widths(parcels: dict[int, _Parcel]) -> dict[int, int]:
    """Number of values of each member in the next round: members with values left share the round evenly."""
    busy = sum(parcel.left > 0 for parcel in parcels.values())
    share = (limits.MAX_CHANNELS - (len(parcels) - busy)) // busy
    return {member: max(1, min(parcel.left, share)) for member, parcel in parcels.items()}


def _present(aggregate: Aggregate, parcels: dict[int, _Parcel]) -> dict[int, _Parcel]:
    """Parcels of the members that are still present."""
    if strangers := [member for member in aggregate.members if member not in parcels]:
        known, others = (format_ranks(Members.of(ranks)) for ranks in (parcels, strangers))
        raise ProtocolError(f"{aggregate.key}: expected no others than {known}, got {others} as well")
    return {member: parcels[member] for member in aggregate.members}
