import dataclasses
import itertools
import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statsd_bn import limits
from statsd_bn.errors import ProtocolError, VersionMismatch
from statsd_bn.members import NOBODY, Members
from statsd_bn.messages import (
    Aggregate,
    Contribution,
    Digest,
    Failure,
    Lateness,
    Leave,
    NonFiniteRound,
    Pending,
    Question,
    Register,
    Registered,
    Result,
    RoundTrips,
    Settled,
    Status,
    StatusRequest,
    Whereabouts,
)
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.wire import MAGIC, PROTOCOL_VERSION, decode, decode_request, encode, repeated
from support.strategies import MESSAGES, key, messages, register

relaxed = settings(deadline=None)

KEY = RoundKey("job", "world", 1, 2, "bn1", 3, "forward")
KEY_FIELDS = ["job", "world", 1, 2, "bn1", 3, "forward"]
PACKED_KEY = msgpack.packb(KEY_FIELDS)
CONTRIBUTION = Contribution(b"session0", KEY, 0, Rows((3, 0), np.array([[[1.5, -2.0]], [[0.0, 1e300]]])))
AGGREGATE = Aggregate(KEY, 2, 3, Members.of([0, 2]), np.array([[1.5, 1e300]]), Members.of([2]))

# One small frame of each type.
FRAMES = {
    type(message): encode(message)
    for message in (
        register(),
        Registered(b"session0", b"server00", 1, 2, 4, Members.of([3, 300])),
        CONTRIBUTION,
        AGGREGATE,
        Leave(b"session0", "boom"),
        Failure("mismatch", "no", {"member": 1, "got": [1, 2.5, None]}, KEY),
        StatusRequest(),
        Status({"groups": [{"job": "j"}]}),
        Pending(KEY, 12, "waiting"),
        Result(b"session0", AGGREGATE),
    )
}
every_frame = pytest.mark.parametrize("frame", FRAMES.values(), ids=[kind.__name__ for kind in FRAMES])


def hand_built(header: Any, values: bytes | None = None, *, padding: bytes | None = None) -> bytes:
    """A frame as docs/protocol.md lays it out, made without the code under test."""
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    frame = b"SBN" + bytes([PROTOCOL_VERSION]) + struct.pack("<I", len(packed)) + packed
    if values is None:
        return frame
    return frame + (bytes(-len(packed) % 8) if padding is None else padding) + values


def decoded_or_refused(frame: bytes) -> None:
    """Whatever comes in: a message that can be sent on, or a ProtocolError. Nothing else."""
    try:
        message = decode(frame)
    except ProtocolError:
        return
    encode(message)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@relaxed
@given(st.data())
def test_a_message_comes_back_from_its_frame_and_gives_the_same_frame_again(kind, data):
    message = data.draw(MESSAGES[kind])
    frame = encode(message)
    found = decode(frame)
    assert type(found) is kind
    assert encode(found) == frame


@relaxed
@given(MESSAGES[Contribution])
def test_a_contribution_loses_nothing_on_the_way(sent):
    found = decode(encode(sent))
    assert (found.session, found.key, found.attempt, found.rows.counts) == (
        sent.session,
        sent.key,
        sent.attempt,
        sent.rows.counts,
    )
    assert found.rows.values.shape == sent.rows.values.shape
    assert found.rows.values.tobytes() == sent.rows.values.tobytes()


@relaxed
@given(MESSAGES[Register] | MESSAGES[Registered] | MESSAGES[Leave])
def test_a_message_without_values_comes_back_equal(sent):
    assert decode(encode(sent)) == sent


def packed_runs(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}H", *numbers)


def test_the_golden_frame_of_a_contribution():
    header = [3, b"session0", PACKED_KEY, 0, [3, 0], 1, 2]
    assert encode(CONTRIBUTION) == hand_built(header, struct.pack("<4d", 1.5, -2.0, 0.0, 1e300))
    assert encode(CONTRIBUTION).hex() == (
        "53424e08 2e000000"  # "SBN", version 8, a header of 46 bytes
        "97 03 c408 73657373696f6e30"  # 7 fields: type 3, the session
        "c41a 97 a36a6f62 a5776f726c64 01 02 a3626e31 03 a7666f7277617264"  # the key
        "00 920300 01 02"  # attempt, counts, vectors, channels
        "0000"  # up to a multiple of 8
        "000000000000f83f 00000000000000c0 0000000000000000 9c7500883ce4377e"
    ).replace(" ", "")


def test_the_golden_frame_of_a_digest():
    values = np.arange(16.0).reshape(2, 2, 4) / 16
    frame = hand_built([15, b"session0", 7, "bn1\nbn2", 2], values.tobytes())
    assert encode(Digest(b"session0", 7, "bn1\nbn2", values)) == frame
    assert decode(frame).names == ["bn1", "bn2"]
    assert decode(frame).values.tolist() == values.tolist()


@pytest.mark.parametrize(("kind", "number"), [(RoundTrips, 18), (Lateness, 21)])
def test_the_golden_frame_of_times(kind, number):
    counts = (0, 3, *[0] * 21, 1)
    frame = hand_built([number, b"session0", 500, list(counts)])
    assert encode(kind(b"session0", 500, counts)) == frame
    assert decode(frame) == kind(b"session0", 500, counts)


def test_the_golden_frame_of_a_round_that_was_not_finite():
    told = NonFiniteRound(b"session0", KEY, Members.of([0, 1, 3]), "1 of 3 channels (inf)")
    frame = hand_built([19, b"session0", PACKED_KEY, packed_runs(0, 2, 3, 1), "1 of 3 channels (inf)"])
    assert encode(told) == frame
    assert decode(frame) == told


def test_a_round_that_was_not_finite_names_somebody():
    frame = hand_built([19, b"session0", PACKED_KEY, b"", "1 of 3 channels (inf)"])
    with pytest.raises(ProtocolError, match="members: expected who brought what is not finite, got nobody"):
        decode(frame)


def test_the_golden_frame_of_an_aggregate():
    assert encode(AGGREGATE) == hand_built(
        [4, PACKED_KEY, 2, 3, packed_runs(0, 1, 2, 1), packed_runs(2, 1), 1, 2], struct.pack("<2d", 1.5, 1e300)
    )
    assert encode(AGGREGATE).hex() == (
        "53424e08 32000000"  # "SBN", version 8, a header of 50 bytes
        "98 04"  # 8 fields: type 4
        "c41a 97 a36a6f62 a5776f726c64 01 02 a3626e31 03 a7666f7277617264"  # the key
        "02 03 c408 0000 0100 0200 0100"  # replicas, count, members 0 and 2
        "c404 0200 0100 01 02"  # member 2 for an example, vectors, channels
        "000000000000"  # up to a multiple of 8
        "000000000000f83f 9c7500883ce4377e"
    ).replace(" ", "")


def test_the_golden_frame_of_a_result_is_that_of_its_aggregate_with_the_session():
    header = [11, b"session0", PACKED_KEY, 2, 3, packed_runs(0, 1, 2, 1), packed_runs(2, 1), 1, 2]
    frame = encode(Result(b"session0", AGGREGATE))
    assert frame == hand_built(header, struct.pack("<2d", 1.5, 1e300))
    assert encode(decode(frame).aggregate) == encode(AGGREGATE)


@pytest.mark.parametrize(
    "flat",
    [
        [0],
        [0, 1, 2],
        [0, 0],
        [0, 65_535],
        [0, 2, 2, 1],
        [4, 1, 0, 1],
        [0, limits.MAX_MEMBERS + 1],
        [limits.MAX_MEMBERS, 1],
    ],
)
def test_members_that_are_no_runs_are_refused(flat):
    for header in (
        [2, b"session0", b"server00", 1, 2, 5, packed_runs(*flat)],
        [1, b"session0", "j", "g", 1, 2, 3, 0, 4.5, "here", 1, b"server00", 6, 5, 7, packed_runs(*flat)],
    ):
        assert decode(hand_built([*header[:-1], packed_runs(0, 1, 2, 1)])).type == header[0]
        with pytest.raises(ProtocolError, match="members: expected"):
            decode(hand_built(header))


def test_the_golden_frames_of_messages_without_values():
    golden = {
        Register(b"session0", "j", "g", 1, 2, 3, 0, 4.5, "here", 1, b"server00", 6, 5, 7, Members.of([0, 1, 4])): (
            [1, b"session0", "j", "g", 1, 2, 3, 0, 4.5, "here", 1, b"server00", 6, 5, 7, packed_runs(0, 2, 4, 1)]
        ),
        Registered(b"session0", b"server00", 1, 2, 5, Members.of([3, 4])): (
            [2, b"session0", b"server00", 1, 2, 5, packed_runs(3, 2)]
        ),
        Leave(b"session0", "boom"): [5, b"session0", "boom"],
        StatusRequest(): [7],
        Pending(KEY, 3, "late", "there"): [10, PACKED_KEY, 3, "late", "there"],
        Question(b"digest00", 3, "0"): [12, b"digest00", 3, "0"],
        Whereabouts(b"session0", 3, "here", 1, "0", Members.of([0, 1, 4]), 7, "barrier"): (
            [13, b"session0", 3, "here", 1, "0", packed_runs(0, 2, 4, 1), 7, "barrier"]
        ),
        Settled(b"session0", KEY): [14, b"session0", PACKED_KEY],
    }
    for message, header in golden.items():
        assert encode(message) == hand_built(header)
        assert decode(hand_built(header)) == message
    assert encode(Failure("c", "m", {"a": 1}, KEY)) == hand_built([6, "c", "m", {"a": 1}, PACKED_KEY])
    assert encode(Failure("c", "m", {})) == hand_built([6, "c", "m", {}, None])
    assert encode(Status({"a": [1]})) == hand_built([8, {"a": [1]}])


@pytest.mark.parametrize("kind", [Contribution, Aggregate], ids=lambda kind: kind.__name__)
def test_values_are_a_view_into_the_frame(kind):
    frame = FRAMES[kind]
    message = decode(frame)
    values = message.rows.values if kind is Contribution else message.values
    assert np.shares_memory(values, np.frombuffer(frame, np.uint8))
    assert not values.flags.writeable
    assert values.flags.aligned


def test_values_in_any_memory_order_travel_in_c_order():
    straight = np.arange(6.0).reshape(1, 2, 3)
    for values in (
        np.asfortranarray(straight),
        straight[:, ::-1, ::-1][:, ::-1, ::-1],
        np.repeat(straight, 2, 2)[..., ::2],
    ):
        assert encode(Contribution(b"session0", KEY, 0, Rows((1,), values))) == encode(
            Contribution(b"session0", KEY, 0, Rows((1,), straight))
        )


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage):
    with pytest.raises(ProtocolError):
        decode(garbage)


@relaxed
@given(st.binary(max_size=200))
def test_garbage_after_a_sound_prelude_is_refused_or_a_message(garbage):
    decoded_or_refused(MAGIC + bytes([PROTOCOL_VERSION]) + struct.pack("<I", len(garbage)) + garbage)


@every_frame
def test_a_frame_cut_short_anywhere_is_refused(frame):
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:length])


@every_frame
def test_a_frame_with_any_one_bit_flipped_is_refused_or_a_message(frame):
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        decoded_or_refused(bytes(flipped))


@settings(deadline=None, max_examples=300)
@given(messages, st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=5))
def test_a_frame_with_some_bytes_changed_is_refused_or_a_message(message, changes):
    frame = bytearray(encode(message))
    for place, value in changes:
        frame[place % len(frame)] = value
    decoded_or_refused(bytes(frame))


@every_frame
def test_trailing_bytes_are_refused(frame):
    for tail in (b"\0", bytes(8), b"x" * 100):
        with pytest.raises(ProtocolError):
            decode(frame + tail)


def test_padding_that_is_not_zero_is_refused():
    header = [3, b"session0", PACKED_KEY, 0, [3, 0], 1, 2]
    values = bytes(32)
    assert decode(hand_built(header, values, padding=bytes(2))).rows.counts == (3, 0)
    for padding in (b"\0\1", b"\1\0", bytes(1), b"", bytes(3), bytes(10)):
        with pytest.raises(ProtocolError, match="zero padding"):
            decode(hand_built(header, values, padding=padding))


@pytest.mark.parametrize("version", [0, 1, 255])
def test_another_protocol_version_is_named(version):
    for frame in FRAMES.values():
        other = frame[:3] + bytes([version]) + frame[4:]
        with pytest.raises(VersionMismatch, match=f"expected {PROTOCOL_VERSION}, got {version}") as caught:
            decode(other)
        assert caught.value.fields == {"expected": PROTOCOL_VERSION, "got": version}


def test_a_frame_of_another_version_is_named_even_if_all_else_about_it_is_unknown():
    with pytest.raises(VersionMismatch):
        decode(MAGIC + bytes([PROTOCOL_VERSION + 1]) + b"\xff" * 20)


def test_a_frame_beyond_the_limit_is_refused():
    with pytest.raises(ProtocolError, match=f"expected at most {limits.MAX_FRAME_BYTES} bytes"):
        decode(MAGIC + bytes([PROTOCOL_VERSION]) + bytes(limits.MAX_FRAME_BYTES))


def test_a_frame_beyond_the_limit_is_not_sent():
    values = np.zeros((limits.MAX_REPLICAS, 1, limits.MAX_CHANNELS))
    with pytest.raises(ProtocolError, match=f"expected at most {limits.MAX_FRAME_BYTES} bytes") as caught:
        encode(Contribution(b"session0", KEY, 0, Rows((1,) * limits.MAX_REPLICAS, values)))
    assert str(values.shape) in caught.value.message


def test_a_member_with_every_replica_at_16384_channels_fits():
    values = np.zeros((limits.MAX_REPLICAS, 2, 16_384))
    long_key = key("l" * 256, job="j" * 256, group="g" * 256)
    frame = encode(Contribution(b"session0", long_key, 0, Rows((limits.MAX_COUNT,) * limits.MAX_REPLICAS, values)))
    assert decode(frame).rows.values.shape == values.shape


def test_the_widest_aggregate_fits():
    values = np.zeros((limits.MAX_VECTORS, limits.MAX_CHANNELS))
    assert decode(encode(Aggregate(KEY, 1, 1, NOBODY, values))).values.shape == values.shape


def test_a_header_beyond_the_limit_is_neither_sent_nor_read():
    large = {"x": "a" * limits.MAX_HEADER_BYTES}
    with pytest.raises(ProtocolError, match=f"expected at most {limits.MAX_HEADER_BYTES} bytes"):
        encode(Status(large))
    with pytest.raises(ProtocolError, match="announced"):
        decode(hand_built([8, large]))


@pytest.mark.parametrize(
    "header",
    [
        [],
        {},
        None,
        3,
        "text",
        [0],
        [9],
        [True],
        [1.0],
        ["1"],
        [None],
        [[1]],
        [-1],
        [2**63],
        [7, None],
        [5],
        [5, b"session0"],
        [5, b"session0", "", 1],
        [5, "session0", ""],
        [5, b"session0", b"boom"],
        [1, b"session0", "j", "g", 0, 0, 2, 600.0],
        [1, b"session0", "j", "g", 0, 0, 2, 600.0, "here"],
        [1, b"session0", "j", "g", 0, 0, 2, 600.0, "here", b"server00"],
        [1, b"session0", "j", "g", 0, 0, 2, 600.0, "here", b"server00", 0, 0],
        [1, b"session0", "j", "g", 0, 0, 2, 600, "here", b"server00", 0],
        [1, b"session0", "j", "g", False, 0, 2, 600.0, "here", b"server00", 0],
        [1, b"session0", "j", "g", 0, 0, 2, 600.0, "here", b"server00", True],
        [2, b"session0", b"server00", 0, 0, 1],
        [2, b"session0", b"server00", 0, 0, None],
        [2, b"session0", b"server00", 0, 0, ["0"]],
        [6, "c", "m", {}],
        [6, "c", "m", {}, []],
        [6, "c", "m", {}, 1],
        [6, "c", "m", {}, msgpack.packb([*KEY_FIELDS, 1])],
        [6, "c", "m", {}, KEY_FIELDS],
        [6, "c", "m", {}, PACKED_KEY + b"\0"],
        [6, "c", "m", {}, msgpack.packb(KEY_FIELDS[:-1])],
        [6, "c", "m", {1: 2}, None],
        [6, "c", "m", None, None],
        [8],
        [8, []],
        [8, {1: 2}],
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_header_that_is_no_message_is_refused(header):
    with pytest.raises(ProtocolError):
        decode(hand_built(header))


@pytest.mark.parametrize(
    "header",
    [
        [3, b"session0", *KEY_FIELDS, 0, [1], 1],
        [3, b"session0", *KEY_FIELDS, 0, [1], 1, 2, 3],
        [3, b"session0", *KEY_FIELDS, 0, [], 1, 1],
        [3, b"session0", *KEY_FIELDS, 0, 1, 1, 1],
        [3, b"session0", *KEY_FIELDS, 0, None, 1, 1],
        [3, b"session0", *KEY_FIELDS, 0, "1", 1, 1],
        [3, b"session0", *KEY_FIELDS, 0, [1.0], 1, 1],
        [3, b"session0", *KEY_FIELDS, 0, [True], 1, 1],
        [3, b"session0", *KEY_FIELDS, 0, [-1], 1, 1],
        [3, b"session0", *KEY_FIELDS, 0, [1], 0, 1],
        [3, b"session0", *KEY_FIELDS, 0, [1], -1, -1],
        [3, b"session0", *KEY_FIELDS, 0, [1], 1, True],
        [3, b"session0", *KEY_FIELDS, 0, [1], 1, 1.0],
        [3, b"session0", *KEY_FIELDS, 0, [1], 1, "1"],
        [3, b"session0", *KEY_FIELDS, 0, [1], 1, 2**40],
        [3, b"session0", *KEY_FIELDS, 0, [1], 2, 1],
        [3, b"session0", *KEY_FIELDS, 0, [1] * 65, 1, 1],
        [3, b"session0", *KEY_FIELDS, True, [1], 1, 1],
        [3, b"session", *KEY_FIELDS, 0, [1], 1, 1],
        [4, *KEY_FIELDS, 1, 1, 1],
        [4, *KEY_FIELDS, 1, 1, 1, 1, 1],
        [4, *KEY_FIELDS, 0, 1, 1, 1],
        [4, *KEY_FIELDS, 1, -1, 1, 1],
        [4, *KEY_FIELDS, 1, 1, 9, 1],
        [4, *KEY_FIELDS, 1, 1, 1, None],
    ],
    ids=lambda header: str(header)[:100],
)
def test_a_header_that_does_not_describe_its_values_is_refused(header):
    one_number = struct.pack("<d", 1.0)
    with pytest.raises(ProtocolError):
        decode(hand_built(header, one_number))


@pytest.mark.parametrize("counts", [b"\1", {"a": 1}], ids=repr)
def test_counts_are_an_array_and_nothing_that_iterates_like_one(counts):
    for size in (1, len(counts)):
        with pytest.raises(ProtocolError):
            decode(hand_built([3, b"session0", *KEY_FIELDS, 0, counts, 1, 1], bytes(8 * size)))


@pytest.mark.parametrize("present", [b"\1", b"\0\0\1", "", {}, [], [0, 1], bytes(4 * limits.MAX_MEMBERS)], ids=repr)
def test_present_members_are_bytes_and_nothing_that_iterates_like_them(present):
    with pytest.raises(ProtocolError):
        decode(hand_built([2, b"session0", b"server00", 0, 0, 1, present]))


@pytest.mark.parametrize(
    "extension",
    [msgpack.ExtType(5, b"x"), msgpack.ExtType(5, bytes(300)), msgpack.Timestamp(1, 0), msgpack.Timestamp(2**33, 5)],
    ids=repr,
)
def test_msgpack_extensions_are_refused(extension):
    for header in (extension, [extension], [5, b"session0", extension], [8, {"a": extension}]):
        with pytest.raises(ProtocolError):
            decode(hand_built(header))


@pytest.mark.parametrize("extension", [b"\xc7\x00\x05", b"\xc7\x00\xff", b"\xd6\xff\0\0\0\1", b"\xc1"], ids=bytes.hex)
def test_odd_msgpack_never_escapes_as_another_error(extension):
    for before in (b"", b"\x91", b"\x93\x05\xc4\x08session0", b"\x92\x08\x81\xa1a"):
        decoded_or_refused(hand_built(before + extension))


# An array, a map's value, and nesting that msgpack's own stack takes (1,024 deep) or does not.
openers = pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
depths = pytest.mark.parametrize("depth", [2, 100, 500, 900, 1_000, 1_020, 1_030, 10_000, 300_000])


@openers
@depths
def test_deep_nesting_never_escapes_as_another_error(opener, depth):
    nested = opener * depth + b"\xc0"
    key_fields = b"".join(map(msgpack.packb, KEY_FIELDS))
    headers = {
        "the header": nested,
        "the type": b"\x91" + nested,
        "a token": b"\x93\x05" + nested + b"\xa0",
        "a text": b"\x93\x05\xc4\x08session0" + nested,
        "an integer": b"\x96\x02\xc4\x08session0\xc4\x08server00" + nested + b"\0\x90",
        "a key": b"\x95\x06\xa1c\xa1m\x80" + nested,
        "counts": b"\x9d\x03\xc4\x08session0" + key_fields + b"\0" + nested + b"\1\1",
        "a report": b"\x92\x08" + nested,
    }
    for place, header in headers.items():
        try:
            decode(hand_built(header))
        except ProtocolError:
            pass
        except RecursionError:
            pytest.fail(f"RecursionError at {place}")


def test_an_announced_length_is_not_believed():
    for length in (limits.MAX_HEADER_BYTES, limits.MAX_HEADER_BYTES + 1, 2**32 - 1):
        with pytest.raises(ProtocolError, match="announced"):
            decode(MAGIC + bytes([PROTOCOL_VERSION]) + struct.pack("<I", length) + b"\x91\x07")
    huge_array, huge_text, huge_bytes = b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"
    for lie in (huge_array, huge_text, huge_bytes, b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            decode(hand_built(lie))


def test_text_that_is_not_utf8_is_refused():
    for text in (b"\xff", b"\xed\xa0\x80"):
        with pytest.raises(ProtocolError):
            decode(hand_built(b"\x93\x05\xc4\x08session0" + bytes([0xA0 | len(text)]) + text))


def test_the_magic_comes_first():
    frame = FRAMES[StatusRequest]
    for magic in itertools.chain((b"sbn", b"SBM", b"\0\0\0"), (b"GET", b"\xff\0\0")):
        with pytest.raises(ProtocolError, match="expected to begin with b'SBN'"):
            decode(magic + frame[3:])


def framed(header: bytes) -> bytes:
    return MAGIC + bytes([PROTOCOL_VERSION]) + struct.pack("<I", len(header)) + header


def test_a_request_that_names_all_members_there_can_be_still_fits():
    known = Members(tuple((number, 1) for number in range(0, limits.MAX_MEMBERS, 2)))
    name, most = "é" * 128, limits.MAX_COUNTER
    longest = register(session=b"session0", job=name, group=name, place=name, epoch=most, step=most, known=known)
    assert decode_request(encode(longest)) == longest
    result = Result(b"session0", dataclasses.replace(AGGREGATE, members=known))
    assert decode_request(encode(result)).aggregate.members == known


def test_a_contribution_with_the_longest_header_still_fits():
    name, most = "é" * 128, dict.fromkeys(("epoch", "step", "call"), limits.MAX_COUNTER)
    longest = key(name, job=name, group=name, phase="é" * 16, **most)
    rows = Rows((limits.MAX_COUNT // limits.MAX_REPLICAS,) * limits.MAX_REPLICAS, np.ones((limits.MAX_REPLICAS, 1, 1)))
    sent = Contribution(b"session0", longest, limits.MAX_COUNTER, rows)
    assert decode_request(encode(sent)).key == longest


def parts_of(contribution: Contribution) -> tuple[Any, ...]:
    rows = contribution.rows
    numbers = rows.values
    return (contribution.session, contribution.key, contribution.attempt, rows.counts, numbers.shape, numbers.tobytes())


@relaxed
@given(MESSAGES[Contribution], st.binary(min_size=limits.TOKEN_BYTES, max_size=limits.TOKEN_BYTES), st.floats())
def test_a_contribution_whose_header_came_before_is_decoded_as_if_it_had_not(first, session, number):
    decode_request(encode(first))
    rows = Rows(first.rows.counts, np.full_like(first.rows.values, number))
    frame = encode(dataclasses.replace(first, session=session, rows=rows))
    assert parts_of(decode_request(frame)) == parts_of(decode(frame))


def test_a_contribution_is_not_taken_for_another_with_nearly_the_same_header():
    frame = encode(CONTRIBUTION)
    decode_request(frame)
    start = len(frame) - CONTRIBUTION.rows.values.nbytes
    for place in range(start):
        changed = bytearray(frame)
        changed[place] ^= 1
        try:
            expected = parts_of(decode(bytes(changed)))
        except ProtocolError:
            with pytest.raises(ProtocolError):
                decode_request(bytes(changed))
        else:
            assert parts_of(decode_request(bytes(changed))) == expected


@pytest.mark.parametrize("end", [b"\0", b"\0" * 8, -1, -8, -40])
def test_a_header_that_came_before_is_no_licence_for_the_values_behind_it(end):
    frame = encode(CONTRIBUTION)
    decode_request(frame)
    with pytest.raises(ProtocolError):
        decode_request(frame + end if isinstance(end, bytes) else frame[:end])


def test_only_so_many_headers_are_kept():
    for step in range(3 * repeated._MOST_KEPT):
        decode_request(encode(dataclasses.replace(CONTRIBUTION, key=KEY._replace(step=step))))
    assert len(repeated._kept) <= repeated._MOST_KEPT


ANNOUNCED = b"\xdc\xff\xff" * 500  # arrays in arrays, each of 65,535 items


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\x00\x0f\xff\xfb" + b"\x90" * 0xFFFFB,  # a mebibyte of empty arrays
        b"\xdd\x00\x00\xff\xfb" + b"\x90" * 0xFFFB,
        b"\xdc\x07\xf0" + b"\x90" * 2032,
        b"\x92\x01" + b"\xdc\x00\x40" * 600,
        b"\x92\x01" + ANNOUNCED,
        ANNOUNCED,
        b"\x91" * 2047 + b"\xc0",
        b"\x92\x01" + b"\x80" * 2000,
        b"\x92\x01" + b"\xdf\xff\xff\xff\xff" * 300,
        msgpack.packb([6, "code", "message", {"a": 1}, None]),
        msgpack.packb([5, b"session0", "x" * 70_000]),
        msgpack.packb([1, *["x" * 4000] * 15]) + b"\xc0",
        msgpack.packb([1, *["x" * 4000] * 20]),
        msgpack.packb([1, b"session0", [1], "x" * 3000]),
        msgpack.packb([2, b"session0", ANNOUNCED]),
        msgpack.packb([3, b"session0", ANNOUNCED, 0, [1], 1, 1]),
        msgpack.packb([3, b"session0", b"\x97" + b"\x90" * 870, 0, [1], 1, 1]),
    ],
)
def test_an_unsound_request_makes_next_to_no_objects(header):
    """msgpack makes what is announced before anybody can look at it, so it is told first how much there can be."""
    frame = framed(header)
    tracemalloc.start()
    with pytest.raises(ProtocolError) as refused:
        decode_request(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * min(len(frame), limits.MAX_REQUEST_HEADER_BYTES) + 700_000
    assert len(str(refused.value)) < 500
