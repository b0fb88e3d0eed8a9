"""Frames of a round: Contribution and Aggregate, whose headers are fixed fields and not msgpack.

Every round sends one of each per member, so their cost is what a round costs on the wire. One `struct` call reads all
numbers; the texts of the round key follow, then the values. A frame depends on no earlier one: a server that was
restarted reads it like any other.

    offset  size   Contribution                     Aggregate
    8       1      type, 3                          type, 4
    9       1      vectors                          vectors
    10      2      replicas                         runs of members
    12      8      session                          runs of non-finite members (4), channels (4)
    20      4      channels                         replicas
    24      8      epoch                            count
    32      8      step                             epoch
    40      8      call                             step
    48      8      attempt                          call
    56             counts, 8 bytes each             runs, 4 bytes each: of members, of non-finite ones
                   job, group, layer, phase: UTF-8, a zero byte between two
                   zero bytes up to a multiple of 8; values, float64
"""

import struct

import numpy as np

from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.members import NOBODY, Members
from statsd_bn.messages import Aggregate, Contribution, sound_aggregate, sound_contribution
from statsd_bn.reduction import Rows, sound_rows
from statsd_bn.round_key import key_of_frame
from statsd_bn.wire.frame import BEGINNING, FLOAT, PADDING, PRELUDE, RUN, frame_of, header_end, packed_runs, values_in

_CONTRIBUTION = struct.Struct("<BBH8sIQQQQ")
_AGGREGATE = struct.Struct("<BBHIIIQQQQ")

# The same with what is before them, and with the first count, since a member mostly has one replica: read in one go.
_CONTRIBUTION_FRAME = struct.Struct(f"{PRELUDE.format}{_CONTRIBUTION.format[1:]}Q")
_AGGREGATE_FRAME = struct.Struct(f"{PRELUDE.format}{_AGGREGATE.format[1:]}")
_COUNT_BYTES = _VALUE_BYTES = 8
_COUNTS = _CONTRIBUTION_FRAME.size - _COUNT_BYTES


def encode_contribution(message: Contribution) -> bytes:
    """Frame that carries a contribution."""
    job, group, epoch, step, layer, call, phase = message.key
    counts, values = message.rows.counts, message.rows.values
    replicas, vectors, channels = values.shape
    fixed = _CONTRIBUTION.pack(
        Contribution.type, vectors, replicas, message.session, channels, epoch, step, call, message.attempt
    )
    texts = f"{job}\0{group}\0{layer}\0{phase}".encode()
    header = b"".join((fixed, struct.pack(f"<{replicas}Q", *counts), texts))
    return frame_of(header, values, limits.MAX_REQUEST_HEADER_BYTES)


def encode_aggregate(message: Aggregate) -> bytes:
    """Frame that carries an aggregate."""
    job, group, epoch, step, layer, call, phase = message.key
    members, non_finite, values = message.members.runs, message.non_finite.runs, message.values
    vectors, channels = values.shape
    fixed = _AGGREGATE.pack(
        Aggregate.type,
        vectors,
        len(members),
        len(non_finite),
        channels,
        message.replicas,
        message.count,
        epoch,
        step,
        call,
    )
    texts = f"{job}\0{group}\0{layer}\0{phase}".encode()
    header = b"".join((fixed, packed_runs(members + non_finite), texts))
    return frame_of(header, values, limits.MAX_HEADER_BYTES)


def decode_contribution(frame: bytes, most: int) -> Contribution:
    """Contribution that a frame carries whose header may have `most` bytes.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        ProtocolError: it is not sound.
    """
    size = len(frame)
    if size < _CONTRIBUTION_FRAME.size:
        raise _cut_short(frame, most, _CONTRIBUTION_FRAME.size)
    beginning, length, _, vectors, replicas, session, channels, epoch, step, call, attempt, count = (
        _CONTRIBUTION_FRAME.unpack_from(frame)
    )
    end = PRELUDE.size + length
    start = (end + 7) & -8
    texts = _COUNTS + _COUNT_BYTES * replicas
    if not (beginning == BEGINNING and length <= most and texts <= end <= size <= limits.MAX_FRAME_BYTES):
        raise _cut_short(frame, most, texts)
    counts = (count,) if replicas == 1 else struct.unpack_from(f"<{replicas}Q", frame, _COUNTS)
    key = key_of_frame(frame[texts:end], epoch, step, call)
    shape = (replicas, vectors, channels)
    if (
        size == start + _VALUE_BYTES * replicas * vectors * channels
        and frame[end:start] == PADDING[start - end]
        and 0 < replicas <= limits.MAX_REPLICAS
        and 0 < vectors <= limits.MAX_VECTORS
        and 0 < channels <= limits.MAX_CHANNELS
        and attempt <= limits.MAX_COUNTER
        and max(counts) <= limits.MAX_COUNT
    ):
        return sound_contribution(session, key, attempt, sound_rows(counts, np.ndarray(shape, FLOAT, frame, start)))
    return Contribution(session, key, attempt, Rows(counts, values_in(frame, end, shape)))  # says which of them it is


def decode_aggregate(frame: bytes, most: int) -> Aggregate:
    """Aggregate that a frame carries whose header may have `most` bytes.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        ProtocolError: it is not sound.
    """
    size = len(frame)
    if size < _AGGREGATE_FRAME.size:
        raise _cut_short(frame, most, _AGGREGATE_FRAME.size)
    beginning, length, _, vectors, members, non_finite, channels, replicas, count, epoch, step, call = (
        _AGGREGATE_FRAME.unpack_from(frame)
    )
    end = PRELUDE.size + length
    second = _AGGREGATE_FRAME.size + RUN.size * members
    texts = second + RUN.size * non_finite
    if not (beginning == BEGINNING and length <= most and texts <= end <= size <= limits.MAX_FRAME_BYTES):
        raise _cut_short(frame, most, texts)
    key = key_of_frame(frame[texts:end], epoch, step, call)
    values = values_in(frame, end, (vectors, channels))
    # Mostly nobody is missing.
    who = Members(
        (RUN.unpack_from(frame, _AGGREGATE_FRAME.size),)
        if members == 1
        else tuple(RUN.iter_unpack(frame[_AGGREGATE_FRAME.size : second]))
    )
    bearers = Members(tuple(RUN.iter_unpack(frame[second:texts]))) if non_finite else NOBODY
    if (
        0 < replicas <= limits.MAX_REPLICAS * limits.MAX_MEMBERS
        and vectors <= limits.MAX_VECTORS
        and channels <= limits.MAX_CHANNELS
        and count <= limits.MAX_COUNT
    ):
        return sound_aggregate(key, replicas, count, who, values, bearers)
    return Aggregate(key, replicas, count, who, values, non_finite=bearers)  # says which of them it is


def _cut_short(frame: bytes, most: int, least: int) -> ProtocolError:
    """Error of a frame whose header is not whole, or shorter than its numbers say; it should have `least` bytes."""
    end = header_end(frame, most)
    return ProtocolError(f"header: expected more than {least - PRELUDE.size} bytes, got {end - PRELUDE.size}")
