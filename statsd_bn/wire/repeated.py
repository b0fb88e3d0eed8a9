"""Contributions whose header has come before, in this round or in an earlier step.

The headers of one round differ in their sessions only. So one is unpacked and checked for the round's first member, and
compared byte by byte for the others. From one step to the next a layer's headers differ in the numbers of step and call
only. So the first member's is compared with an earlier one, and nothing but these two numbers is read.
"""

from dataclasses import fields
from typing import TypeAlias

import numpy as np

from statsd_bn import limits
from statsd_bn.messages import Contribution
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import sound_rows
from statsd_bn.wire.frame import FLOAT, PRELUDE, SHORT_ARRAY_SESSION, padded
from statsd_bn.wire.kept import keep_packed, packed_key

# Open rounds of many jobs, and the layers of their models, forward and backward. A header has some 50 bytes, and a
# longer one than this is not kept.
_MOST_KEPT, _MOST_LAYERS, _MOST_BYTES = 1024, 4096, 256

_BEFORE, _BEHIND = SHORT_ARRAY_SESSION.start, SHORT_ARRAY_SESSION.stop

# An array of seven fields, the type, and a session, as msgpack begins a contribution.
_BEGINS = bytes((0x97, Contribution.type, 0xC4, limits.TOKEN_BYTES))

# What follows in a header without its session: the round's key, as binary of less than 256 bytes. It is an array, whose
# first field is the job's name.
_BINARY = 0xC4
_KEY = _BEFORE + 2
_JOB = _KEY + 1

# How many bytes msgpack takes for a text of less than 32, by its first byte; for a longer one that fits here the length
# is in the second byte.
_SHORT_TEXT_BYTES = {0xA0 + length: 1 + length for length in range(32)}

# How many bytes msgpack takes for a number, by its first byte, which is the number itself or announces it; and the
# least number for which it takes so many.
_NUMBER_BYTES = {**dict.fromkeys(range(128), 1), 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
_LEAST = {1: 0, 2: 2**7, 3: 2**8, 5: 2**16, 9: 2**32}

# What a header says: key, attempt, counts and the values' shape; and where the values begin and end. A plain tuple,
# because each round makes one.
_Known: TypeAlias = tuple[RoundKey, int, tuple[int, ...], tuple[int, ...], int, int]

# What sets the fields of a frozen dataclass.
_new = object.__new__
_set_session, _set_key, _set_attempt, _set_rows = (
    getattr(Contribution, field.name).__set__ for field in fields(Contribution)
)

# By the frame's bytes before its values, without the session; and without step and call as well.
_kept: dict[bytes, _Known] = {}
_layers: dict[bytes, _Known] = {}


def repeated_contribution(frame: bytes) -> Contribution | None:
    """Contribution that a frame carries, if one with the same header has been decoded before; else None.

    That one may have been of another step, or of another call of the layer.
    """
    start = padded(PRELUDE.size + int.from_bytes(frame[4 : PRELUDE.size], "little"))
    if start > _MOST_BYTES:
        return None
    header = frame[:_BEFORE] + frame[_BEHIND:start]
    known = _kept.get(header) or _of_other_step(header)
    if known is None:
        return None
    key, attempt, counts, shape, start, stop = known
    if len(frame) != stop:
        return None
    # All that the two classes check was checked when the header came first.
    rows, contribution = sound_rows(counts, np.ndarray(shape, FLOAT, frame, start)), _new(Contribution)
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
    header = frame[:_BEFORE] + frame[_BEHIND:start]
    rows = contribution.rows
    known = (contribution.key, contribution.attempt, rows.counts, rows.values.shape, start, len(frame))
    _keep(header, known)
    packed = packed_key(contribution.key)
    # Only as we pack it: what is kept for the answer must not depend on who asked.
    if header[_BEFORE : _KEY + len(packed)] == bytes((_BINARY, len(packed))) + packed and (found := _counters(header)):
        step, behind_step, call, behind_call = found
        if len(_layers) >= _MOST_LAYERS:
            _layers.clear()
        _layers[header[:step] + header[behind_step:call] + header[behind_call:]] = known


def _of_other_step(header: bytes) -> _Known | None:
    """What a header says that is known but for its step and its call; None if it is not.

    What stands before each number decides where it is, and its own first byte how long. So a header that is equal but
    for these bytes is as sound, if the numbers are.
    """
    if (found := _counters(header)) is None:
        return None
    at, behind_step, call_at, behind_call = found
    known = _layers.get(header[:at] + header[behind_step:call_at] + header[behind_call:])
    if known is None:
        return None
    step, call = _number(header, at, behind_step), _number(header, call_at, behind_call)
    if step is None or call is None:
        return None
    earlier, attempt, counts, shape, start, stop = known
    key = earlier.at(step, call)
    keep_packed(key, header[_KEY : _KEY + header[_KEY - 1]])
    known = (key, attempt, counts, shape, start, stop)
    _keep(header, known)
    return known


def _keep(header: bytes, known: _Known) -> None:
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[header] = known


def _counters(header: bytes) -> tuple[int, int, int, int] | None:
    """From where to where the step stands in a header, and then the call; None if it is not as we pack it.

    The key's fields are job, group, epoch, step, layer, call and phase.
    """
    try:
        group = _JOB + (_SHORT_TEXT_BYTES.get(header[_JOB]) or 2 + header[_JOB + 1])
        epoch = group + (_SHORT_TEXT_BYTES.get(header[group]) or 2 + header[group + 1])
        step = epoch + _NUMBER_BYTES[header[epoch]]
        layer = step + _NUMBER_BYTES[header[step]]
        call = layer + (_SHORT_TEXT_BYTES.get(header[layer]) or 2 + header[layer + 1])
        return step, layer, call, call + _NUMBER_BYTES[header[call]]
    except LookupError:
        return None


def _number(header: bytes, at: int, behind: int) -> int | None:
    """Counter that stands there, if it is one, and takes no more bytes than it has to."""
    number = header[at] if behind == at + 1 else int.from_bytes(header[at + 1 : behind], "big")
    return number if _LEAST[behind - at] <= number <= limits.MAX_COUNTER else None
