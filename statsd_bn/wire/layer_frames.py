"""Frames of layers that have had a round before: what a member sends and is sent, where only the round's key is new.

From one step to the next the headers of a layer's contributions are the same but for the key, and so are those of its
aggregates. So a contribution is put together of what was packed before and the key; and an aggregate's header is not
unpacked, but compared with the one that is expected. `repeated` is what the server has for contributions.
"""

from typing import TypeAlias, TypeVar

import numpy as np

from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Contribution, sound_aggregate
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.wire.encoding import encode
from statsd_bn.wire.frame import FLOAT, PRELUDE, SHORT_ARRAY_SESSION
from statsd_bn.wire.kept import packed_key

# Where a key begins that has less than 256 bytes: in a contribution behind the session, and two bytes for its own
# length; in an aggregate behind the array's beginning, the type, and the same two bytes.
_KEY_OF_CONTRIBUTION = SHORT_ARRAY_SESSION.stop + 2
_KEY_OF_AGGREGATE = PRELUDE.size + 4

_MOST_LAYERS = 4096

# Of a layer's contributions: the key's length, counts and shape of the rows, and the frame before and behind the key,
# up to the values. Plain tuples, which are quicker to take apart.
_Sent: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], bytes, bytes]

# Of a layer's aggregates: the frame before and behind the key, up to the values; where these end; and what the header
# says: replicas, count, members, the values' shape, and who brought what is not finite.
_Received: TypeAlias = tuple[bytes, bytes, int, int, int, Members, tuple[int, ...], Members]

_Known = TypeVar("_Known", _Sent, _Received)


class LayerFrames:
    """What one member sends and is sent, by layer and phase.

    Args:
        session: who speaks.
    """

    __slots__ = ("_received", "_sent", "_session")

    def __init__(self, session: bytes) -> None:
        self._session = session
        self._sent: dict[tuple[str, str], _Sent] = {}
        self._received: dict[tuple[str, str], _Received] = {}

    def contribution(self, key: RoundKey, rows: Rows) -> bytes:
        """Frame of a contribution that is sent for the first time."""
        packed, counts, values = packed_key(key), rows.counts, rows.values
        known = self._sent.get((key.layer, key.phase))
        if known is not None:
            length, counts_before, shape, head, tail = known
            if length == len(packed) and counts_before == counts and shape == values.shape:
                return b"".join((head, packed, tail, np.ascontiguousarray(values, FLOAT).data))
        frame = encode(Contribution(self._session, key, 0, rows))
        if around := _around(frame, _KEY_OF_CONTRIBUTION, packed, len(frame) - values.nbytes):
            _keep(self._sent, key, (len(packed), counts, values.shape, *around))
        return frame

    def aggregate(self, key: RoundKey, frame: bytes) -> Aggregate | None:
        """Aggregate of the round `key` that a frame carries, if the header is otherwise the one that was kept."""
        known = self._received.get((key.layer, key.phase))
        if known is None:
            return None
        head, tail, end, replicas, count, members, shape, non_finite = known
        header = b"".join((head, packed_key(key), tail))
        if len(frame) != end or not frame.startswith(header):
            return None
        # All that decoding checks was checked when the header came first.
        values = np.ndarray(shape, FLOAT, frame, len(header))
        return sound_aggregate(key, replicas, count, members, values, non_finite)

    def keep(self, frame: bytes, aggregate: Aggregate) -> None:
        """Keeps the header of an aggregate's frame, which has been decoded."""
        key, values = aggregate.key, aggregate.values
        packed, end = packed_key(key), len(frame)
        if around := _around(frame, _KEY_OF_AGGREGATE, packed, end - values.nbytes):
            what = aggregate.replicas, aggregate.count, aggregate.members, values.shape, aggregate.non_finite
            _keep(self._received, key, (*around, end, *what))


def _around(frame: bytes, at: int, packed: bytes, values: int) -> tuple[bytes, bytes] | None:
    """A frame before its key, which should begin there, and behind it up to the values; None if it begins elsewhere."""
    behind = at + len(packed)
    return (frame[:at], frame[behind:values]) if frame[at:behind] == packed else None


def _keep(kept: dict[tuple[str, str], _Known], key: RoundKey, known: _Known) -> None:
    if len(kept) >= _MOST_LAYERS:
        kept.clear()
    kept[key.layer, key.phase] = known
