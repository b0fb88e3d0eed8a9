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

from statsd_bn import limits
from statsd_bn.checks import shown
from statsd_bn.errors import ProtocolError
from statsd_bn.members import NOBODY, Members
from statsd_bn.messages import Aggregate, Contribution, sound_aggregate, sound_contribution
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows, sound_rows
from statsd_bn.wire.frame import PRELUDE, frame_of, values_of
from statsd_bn.wire.headers import RUN, packed_runs

_CONTRIBUTION = struct.Struct("<BBH8sIQQQQ")
_AGGREGATE = struct.Struct("<BBHIIIQQQQ")
_START = PRELUDE.size
_END = _START + _CONTRIBUTION.size
_COUNT_BYTES = 8


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


def decode_contribution(frame: bytes, end: int) -> Contribution:
    """Contribution that a frame carries whose header ends at `end`.

    Raises:
        ProtocolError: the frame is not sound.
    """
    _check_header(end, _END)
    _, vectors, replicas, session, channels, epoch, step, call, attempt = _CONTRIBUTION.unpack_from(frame, _START)
    texts = _END + _COUNT_BYTES * replicas
    _check_header(end, texts)
    counts = struct.unpack_from(f"<{replicas}Q", frame, _END)
    key = _key(frame[texts:end], epoch, step, call)
    values = values_of(frame, end, (replicas, vectors, channels))
    if (
        replicas <= limits.MAX_REPLICAS
        and vectors <= limits.MAX_VECTORS
        and channels <= limits.MAX_CHANNELS
        and attempt <= limits.MAX_COUNTER
        and max(counts) <= limits.MAX_COUNT
    ):
        return sound_contribution(session, key, attempt, sound_rows(counts, values))
    return Contribution(session, key, attempt, Rows(counts, values))  # says which of them it is


def decode_aggregate(frame: bytes, end: int) -> Aggregate:
    """Aggregate that a frame carries whose header ends at `end`.

    Raises:
        ProtocolError: the frame is not sound.
    """
    _check_header(end, _END)
    _, vectors, members, non_finite, channels, replicas, count, epoch, step, call = _AGGREGATE.unpack_from(
        frame, _START
    )
    second = _END + RUN.size * members
    texts = second + RUN.size * non_finite
    _check_header(end, texts)
    key = _key(frame[texts:end], epoch, step, call)
    values = values_of(frame, end, (vectors, channels))
    who = Members(tuple(RUN.iter_unpack(frame[_END:second])))
    bearers = Members(tuple(RUN.iter_unpack(frame[second:texts]))) if non_finite else NOBODY
    if (
        0 < replicas <= limits.MAX_REPLICAS * limits.MAX_MEMBERS
        and vectors <= limits.MAX_VECTORS
        and channels <= limits.MAX_CHANNELS
        and count <= limits.MAX_COUNT
    ):
        return sound_aggregate(key, replicas, count, who, values, bearers)
    return Aggregate(key, replicas, count, who, values, non_finite=bearers)  # says which of them it is


def _key(packed: bytes, epoch: int, step: int, call: int) -> RoundKey:
    try:
        return RoundKey.of_frame(packed.decode(), epoch, step, call)
    except ValueError as error:
        raise ProtocolError(f"round key: expected job, group, layer and phase in UTF-8, got {shown(packed)}") from error


def _check_header(end: int, least: int) -> None:
    if end < least:
        raise ProtocolError(f"header: expected more than {least - _START} bytes, got {end - _START}")
