"""Contributions whose header has come before: those of one round differ in their sessions and values only.

So the header is unpacked and checked for the first member of a round, and compared byte by byte for the others, in
a third of the time.
"""

from dataclasses import fields
from typing import TypeAlias

import numpy as np

from statsd_bn import limits
from statsd_bn.messages import Contribution
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.wire.frame import FLOAT, PRELUDE, SHORT_ARRAY_SESSION, padded

# Open rounds of many jobs; a header has some 50 bytes, and a longer one than this is not kept.
_MOST_KEPT, _MOST_BYTES = 1024, 256

_BEFORE, _BEHIND = SHORT_ARRAY_SESSION.start, SHORT_ARRAY_SESSION.stop

# An array of seven fields, the type, and a session, as msgpack begins a contribution.
_BEGINS = bytes((0x97, Contribution.type, 0xC4, limits.TOKEN_BYTES))


# What a header says: key, attempt, counts and the values' shape; and where the values begin and end. A plain tuple,
# because each round makes one.
_Known: TypeAlias = tuple[RoundKey, int, tuple[int, ...], tuple[int, ...], int, int]

# What sets the fields of a frozen dataclass.
_new = object.__new__
_set_counts, _set_values = (getattr(Rows, field.name).__set__ for field in fields(Rows))
_set_session, _set_key, _set_attempt, _set_rows = (
    getattr(Contribution, field.name).__set__ for field in fields(Contribution)
)

# By the frame's bytes before its values, without the session.
_kept: dict[bytes, _Known] = {}


def repeated_contribution(frame: bytes) -> Contribution | None:
    """Contribution that a frame carries, if one with the same header has been decoded before; else None."""
    start = padded(PRELUDE.size + int.from_bytes(frame[4 : PRELUDE.size], "little"))
    if start > _MOST_BYTES:
        return None
    known = _kept.get(frame[:_BEFORE] + frame[_BEHIND:start])
    if known is None:
        return None
    key, attempt, counts, shape, start, stop = known
    if len(frame) != stop:
        return None
    # All that the two classes check was checked when the header came first.
    rows, contribution = _new(Rows), _new(Contribution)
    _set_counts(rows, counts)
    _set_values(rows, np.ndarray(shape, FLOAT, frame, start))
    _set_session(contribution, frame[SHORT_ARRAY_SESSION])
    _set_key(contribution, key)
    _set_attempt(contribution, attempt)
    _set_rows(contribution, rows)
    return contribution


def keep_header(frame: bytes, end: int, contribution: Contribution) -> None:
    """Keep the header of a sound frame, which ends at `end`, for those that come with the same."""
    start = padded(end)
    if start > _MOST_BYTES or frame[PRELUDE.size : _BEFORE] != _BEGINS:
        return
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    rows = contribution.rows
    values = rows.values
    known = (contribution.key, contribution.attempt, rows.counts, values.shape, start, len(frame))
    _kept[frame[:_BEFORE] + frame[_BEHIND:start]] = known
