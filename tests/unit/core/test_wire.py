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

from statsd_bn import limits, messages
from statsd_bn.errors import ProtocolError, VersionMismatch
from statsd_bn.members import Members
from statsd_bn.reduction import Rows
from statsd_bn.round_key import RoundKey
from statsd_bn.wire import MAGIC, PROTOCOL_VERSION, decode, decode_request, encode
from support.strategies import MESSAGES, SAMPLES, any_message, key, register

relaxed = settings(deadline=None)

KEY = RoundKey("job", "world", 1, 2, "bn1", 3, "forward")
KEY_FIELDS = ["job", "world", 1, 2, "bn1", 3, "forward"]
PACKED_KEY = msgpack.packb(KEY_FIELDS)
CONTRIBUTION = messages.Contribution(b"session0", KEY, 0, Rows((3, 0), np.array([[[1.5, -2.0]], [[0.0, 1e300]]])))
AGGREGATE = messages.Aggregate(KEY, 2, 3, Members.of([0, 2]), np.array([[1.5, 1e300]]), Members.of([2]))

# One small frame of each type.
FRAMES = {
    kind: encode(message)
    for kind, message in (SAMPLES | {messages.Contribution: CONTRIBUTION, messages.Aggregate: AGGREGATE}).items()
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
    """Any frame gives either a message that can be encoded again or a ProtocolError."""
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
@given(MESSAGES[messages.Contribution])
def test_a_contribution_is_unchanged_by_the_wire(message):
    found = decode(encode(message))
    assert (found.session, found.key, found.attempt) == (message.session, message.key, message.attempt)
    assert found.rows.counts == message.rows.counts
    assert found.rows.values.shape == message.rows.values.shape
    assert found.rows.values.tobytes() == message.rows.values.tobytes()


@relaxed
@given(MESSAGES[messages.Register] | MESSAGES[messages.Registered] | MESSAGES[messages.Leave])
def test_a_message_without_values_comes_back_equal(message):
    assert decode(encode(message)) == message


def packed_runs(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}H", *numbers)


KEY_TEXTS = b"job\0world\0bn1\0forward"


def contribution_header(
    *, vectors=1, replicas=2, channels=2, counters=(1, 2, 3), attempt=0, counts=(3, 0), texts=KEY_TEXTS
) -> bytes:
    """Header of a Contribution as docs/protocol.md lays it out, made without the code under test."""
    fixed = struct.pack("<BBH8sIQQQQ", 3, vectors, replicas, b"session0", channels, *counters, attempt)
    return fixed + struct.pack(f"<{len(counts)}Q", *counts) + texts


def aggregate_header(*, runs=(2, 1), members=(0, 1, 2, 1, 2, 1), texts=KEY_TEXTS, **changed: Any) -> bytes:
    """Header of an Aggregate, like `contribution_header`; `members` are the runs of all, then of non-finite members."""
    given = {"vectors": 1, "channels": 2, "replicas": 2, "count": 3, "counters": (1, 2, 3)} | changed
    vectors, channels, replicas, count, counters = given.values()
    fixed = struct.pack("<BBHIIIQQQQ", 4, vectors, *runs, channels, replicas, count, *counters)
    return fixed + packed_runs(*members) + texts


def test_the_golden_frame_of_a_contribution():
    assert encode(CONTRIBUTION) == hand_built(contribution_header(), struct.pack("<4d", 1.5, -2.0, 0.0, 1e300))
    assert encode(CONTRIBUTION).hex() == (
        "53424e09 55000000"  # "SBN", version 9, a header of 85 bytes
        "03 01 0200 73657373696f6e30 02000000"  # type 3, vectors, replicas, session, channels
        "0100000000000000 0200000000000000 0300000000000000 0000000000000000"  # epoch, step, call, attempt
        "0300000000000000 0000000000000000"  # counts
        "6a6f62 00 776f726c64 00 626e31 00 666f7277617264"  # job, group, layer, phase
        "000000"  # up to a multiple of 8
        "000000000000f83f 00000000000000c0 0000000000000000 9c7500883ce4377e"
    ).replace(" ", "")


def test_the_golden_frame_of_skew_stats():
    values = np.arange(16.0).reshape(2, 2, 4) / 16
    frame = hand_built([15, b"session0", 7, "bn1\nbn2", 2], values.tobytes())
    assert encode(messages.SkewStats(b"session0", 7, "bn1\nbn2", values)) == frame
    assert decode(frame).names == ["bn1", "bn2"]
    assert decode(frame).values.tolist() == values.tolist()


@pytest.mark.parametrize(("kind", "number"), [(messages.RoundTrips, 18), (messages.LatenessReport, 20)])
def test_the_golden_frames_of_round_trips_and_lateness(kind, number):
    counts = (0, 3, *[0] * 21, 1)
    frame = hand_built([number, b"session0", 500, list(counts)])
    assert encode(kind(b"session0", 500, counts)) == frame
    assert decode(frame) == kind(b"session0", 500, counts)


def test_the_golden_frame_of_a_round_that_was_not_finite():
    message = messages.NonFiniteRound(b"session0", KEY, Members.of([0, 1, 3]), "1 of 3 channels (inf)")
    frame = hand_built([19, b"session0", PACKED_KEY, packed_runs(0, 2, 3, 1), "1 of 3 channels (inf)"])
    assert encode(message) == frame
    assert decode(frame) == message


def test_a_report_of_a_non_finite_round_must_name_a_member():
    frame = hand_built([19, b"session0", PACKED_KEY, b"", "1 of 3 channels (inf)"])
    with pytest.raises(ProtocolError, match="members: expected at least one member with non-finite values, got none"):
        decode(frame)


def test_the_golden_frame_of_an_aggregate():
    assert encode(AGGREGATE) == hand_built(aggregate_header(), struct.pack("<2d", 1.5, 1e300))
    assert encode(AGGREGATE).hex() == (
        "53424e09 51000000"  # "SBN", version 9, a header of 81 bytes
        "04 01 0200 01000000 02000000 02000000"  # type 4, vectors, two numbers of runs, channels, replicas
        "0300000000000000 0100000000000000 0200000000000000 0300000000000000"  # count, epoch, step, call
        "0000 0100 0200 0100 0200 0100"  # members 0 and 2; member 2 sent non-finite values
        "6a6f62 00 776f726c64 00 626e31 00 666f7277617264"  # job, group, layer, phase
        "00000000000000"  # up to a multiple of 8
        "000000000000f83f 9c7500883ce4377e"
    ).replace(" ", "")


def test_the_golden_frame_of_a_result_has_its_aggregates_frame_after_the_header():
    frame = encode(messages.Result(b"session0", AGGREGATE))
    assert frame == hand_built([11, b"session0"], encode(AGGREGATE))
    assert encode(decode(frame).aggregate) == encode(AGGREGATE)


@pytest.mark.parametrize(
    "inner", [b"", b"SBN", encode(messages.StatusRequest()), encode(CONTRIBUTION), encode(AGGREGATE)[:-8]]
)
def test_a_result_of_anything_but_an_aggregate_is_refused(inner):
    with pytest.raises(ProtocolError):
        decode(hand_built([11, b"session0"], inner))
    with pytest.raises(ProtocolError, match="zero bytes"):
        decode(hand_built([11, b"session0"], encode(AGGREGATE), padding=b"\1" * 4))


@pytest.mark.parametrize(
    "flat",
    [
        *([0], [0, 1, 2], [0, 0], [0, 65_535], [0, 2, 2, 1], [4, 1, 0, 1]),
        *([0, limits.MAX_MEMBERS + 1], [limits.MAX_MEMBERS, 1]),
    ],
)
def test_invalid_runs_of_members_are_refused(flat):
    for header in (
        [2, b"session0", b"server00", 1, 2, 5, packed_runs(*flat)],
        [1, b"session0", "j", "g", 1, 2, 3, 0, 4.5, "here", 1, b"server00", 6, 5, 7, packed_runs(*flat)],
    ):
        assert decode(hand_built([*header[:-1], packed_runs(0, 1, 2, 1)])).type == header[0]
        with pytest.raises(ProtocolError, match="members: expected"):
            decode(hand_built(header))


def test_the_golden_frames_of_messages_without_values():
    registered = (b"session0", "j", "g", 1, 2, 3, 0, 4.5, "here", 1, b"server00", 6, 5, 7)
    fields = (b"session0", b"server00", 1, 2, 5)
    golden = {
        messages.Register(*registered, Members.of([0, 1, 4])): [1, *registered, packed_runs(0, 2, 4, 1)],
        messages.Registered(*fields, Members.of([3, 4])): [2, *fields, packed_runs(3, 2)],
        messages.Leave(b"session0", "boom"): [5, b"session0", "boom"],
        messages.StatusRequest(): [7],
        messages.Pending(KEY, 3, "late", "there"): [10, PACKED_KEY, 3, "late", "there"],
        messages.StackRequest(b"digest00", 3, "0"): [12, b"digest00", 3, "0"],
        messages.StackReport(b"session0", 3, "here", 1, "0", Members.of([0, 1, 4]), 7, "barrier"): (
            [13, b"session0", 3, "here", 1, "0", packed_runs(0, 2, 4, 1), 7, "barrier"]
        ),
        messages.RoundDone(b"session0", KEY): [14, b"session0", PACKED_KEY],
    }
    for message, header in golden.items():
        assert encode(message) == hand_built(header)
        assert decode(hand_built(header)) == message
    assert encode(messages.Failure("c", "m", {"a": 1}, KEY)) == hand_built([6, "c", "m", {"a": 1}, PACKED_KEY])
    assert encode(messages.Failure("c", "m", {})) == hand_built([6, "c", "m", {}, None])
    assert encode(messages.Status({"a": [1]})) == hand_built([8, {"a": [1]}])


@pytest.mark.parametrize("kind", [messages.Contribution, messages.Aggregate], ids=lambda kind: kind.__name__)
def test_values_are_a_view_into_the_frame(kind):
    frame = FRAMES[kind]
    message = decode(frame)
    values = message.rows.values if kind is messages.Contribution else message.values
    assert np.shares_memory(values, np.frombuffer(frame, np.uint8))
    assert not values.flags.writeable
    assert values.flags.aligned


def test_values_in_any_memory_order_travel_in_c_order():
    straight = np.arange(6.0).reshape(1, 2, 3)
    reversed_twice = straight[:, ::-1, ::-1][:, ::-1, ::-1]
    orders = (straight, np.asfortranarray(straight), reversed_twice, np.repeat(straight, 2, 2)[..., ::2])
    contributions = [messages.Contribution(b"session0", KEY, 0, Rows((1,), values)) for values in orders]
    assert len({encode(contribution) for contribution in contributions}) == 1


@relaxed
@given(st.binary(max_size=200))
def test_garbage_after_a_sound_prelude_is_refused_or_a_message(garbage):
    decoded_or_refused(hand_built(garbage))


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


@settings(deadline=None, max_examples=150)
@given(any_message, st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=5))
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
    header, values = contribution_header(), bytes(32)
    assert decode(hand_built(header, values, padding=bytes(3))).rows.counts == (3, 0)
    for padding in (b"\0\0\1", b"\1\0\0", bytes(1), b"", bytes(4), bytes(11)):
        with pytest.raises(ProtocolError, match="zero padding"):
            decode(hand_built(header, values, padding=padding))


@pytest.mark.parametrize("version", [0, 1, 255])
def test_another_protocol_version_is_named(version):
    for frame in FRAMES.values():
        other = frame[:3] + bytes([version]) + frame[4:]
        with pytest.raises(VersionMismatch, match=f"expected {PROTOCOL_VERSION}, got {version}") as caught:
            decode(other)
        assert caught.value.fields == {"expected": PROTOCOL_VERSION, "got": version}


def test_another_version_is_named_even_in_an_unknown_frame():
    with pytest.raises(VersionMismatch):
        decode(MAGIC + bytes([PROTOCOL_VERSION + 1]) + b"\xff" * 20)


def test_a_frame_beyond_the_limit_is_refused():
    with pytest.raises(ProtocolError, match=f"expected at most {limits.MAX_FRAME_BYTES} bytes"):
        decode(MAGIC + bytes([PROTOCOL_VERSION]) + bytes(limits.MAX_FRAME_BYTES))


def test_a_frame_beyond_the_limit_is_not_sent():
    values = np.zeros((limits.MAX_REPLICAS, 1, limits.MAX_CHANNELS))
    with pytest.raises(ProtocolError, match=f"expected at most {limits.MAX_FRAME_BYTES} bytes") as caught:
        encode(messages.Contribution(b"session0", KEY, 0, Rows((1,) * limits.MAX_REPLICAS, values)))
    assert str(values.shape) in caught.value.message


def test_a_contribution_of_the_most_replicas_at_16384_channels_fits():
    values = np.zeros((limits.MAX_REPLICAS, 2, 16_384))
    long_key = key("l" * 256, job="j" * 256, group="g" * 256)
    rows = Rows((limits.MAX_COUNT,) * limits.MAX_REPLICAS, values)
    frame = encode(messages.Contribution(b"session0", long_key, 0, rows))
    assert decode(frame).rows.values.shape == values.shape


def test_a_header_beyond_the_limit_is_neither_sent_nor_read():
    large = {"x": "a" * limits.MAX_HEADER_BYTES}
    with pytest.raises(ProtocolError, match=f"expected at most {limits.MAX_HEADER_BYTES} bytes"):
        encode(messages.Status(large))
    with pytest.raises(ProtocolError, match="announced"):
        decode(hand_built([8, large]))


@pytest.mark.parametrize(
    "header",
    [
        *([], {}, None, 3, "text", [0], [9], [True], [1.0], ["1"], [None], [[1]], [-1], [2**63], [7, None], [5]),
        *([5, b"session0"], [5, b"session0", "", 1], [5, "session0", ""], [5, b"session0", b"boom"]),
        *([1, b"session0", "j", "g", 0, 0, 2, 600.0], [1, b"session0", "j", "g", 0, 0, 2, 600.0, "here"]),
        [1, b"session0", "j", "g", 0, 0, 2, 600.0, "here", b"server00"],
        [1, b"session0", "j", "g", 0, 0, 2, 600.0, "here", b"server00", 0, 0],
        [1, b"session0", "j", "g", 0, 0, 2, 600, "here", b"server00", 0],
        [1, b"session0", "j", "g", False, 0, 2, 600.0, "here", b"server00", 0],
        [1, b"session0", "j", "g", 0, 0, 2, 600.0, "here", b"server00", True],
        *([2, b"session0", b"server00", 0, 0, 1], [2, b"session0", b"server00", 0, 0, None]),
        *([2, b"session0", b"server00", 0, 0, ["0"]], [6, "c", "m", {}], [6, "c", "m", {}, []], [6, "c", "m", {}, 1]),
        *([6, "c", "m", {}, msgpack.packb([*KEY_FIELDS, 1])], [6, "c", "m", {}, KEY_FIELDS]),
        *([6, "c", "m", {}, PACKED_KEY + b"\0"], [6, "c", "m", {}, msgpack.packb(KEY_FIELDS[:-1])]),
        *([6, "c", "m", {1: 2}, None], [6, "c", "m", None, None], [8], [8, []], [8, {1: 2}]),
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_header_of_no_message_is_refused(header):
    with pytest.raises(ProtocolError):
        decode(hand_built(header))


_MOST = 2**64 - 1


@pytest.mark.parametrize(
    "changes",
    [
        *({"vectors": 0}, {"vectors": 2}, {"vectors": limits.MAX_VECTORS + 1}, {"replicas": 0}, {"replicas": 1}),
        *({"replicas": 3}, {"replicas": 2**16 - 1}, {"replicas": 65, "counts": (1,) * 65}, {"channels": 0}),
        *({"channels": 3}, {"channels": 2**32 - 1}, {"counters": (_MOST, 2, 3)}),
        *({"counters": (1, limits.MAX_COUNTER + 1, 3)}, {"counters": (1, 2, _MOST)}),
        *({"attempt": limits.MAX_COUNTER + 1}, {"counts": (limits.MAX_COUNT + 1, 0)}, {"counts": ()}, {"texts": b""}),
        *({"texts": b"job\0world\0bn1"}, {"texts": KEY_TEXTS + b"\0"}, {"texts": b"\0world\0bn1\0forward"}),
        *({"texts": b"job\0world\0b\n1\0forward"}, {"texts": b"job\0world\0bn\xff\0forward"}),
        *({"texts": b"job\0world\0" + b"b" * 257 + b"\0forward"}, {"texts": b"job\0world\0bn1\0" + b"f" * 33}),
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_a_contribution_with_a_field_out_of_its_limits_is_refused(changes):
    values = bytes(32)
    assert decode(hand_built(contribution_header(), values)).key == KEY
    for read in (decode, decode_request):
        with pytest.raises(ProtocolError):
            read(hand_built(contribution_header(**changes), values))


@pytest.mark.parametrize(
    "changes",
    [
        *({"vectors": 0}, {"vectors": 2}, {"channels": 2**32 - 1}, {"replicas": 0}),
        *({"replicas": limits.MAX_REPLICAS * limits.MAX_MEMBERS + 1}, {"count": limits.MAX_COUNT + 1}),
        *({"counters": (1, _MOST, 3)}, {"runs": (2**16 - 1, 1)}, {"runs": (2, 2**32 - 1)}, {"runs": (3, 0)}),
        *({"members": (2, 1, 0, 1, 2, 1)}, {"members": (0, 1, 2, 1, 2, 0)}, {"texts": b"job\0world\0bn1"}),
    ],
    ids=str,
)
def test_an_aggregate_with_a_field_out_of_its_limits_is_refused(changes):
    values = bytes(16)
    assert decode(hand_built(aggregate_header(), values)).key == KEY
    with pytest.raises(ProtocolError):
        decode(hand_built(aggregate_header(**changes), values))


def test_a_header_of_fixed_fields_that_is_cut_short_is_refused():
    for header, values in ((contribution_header(), bytes(32)), (aggregate_header(), bytes(16))):
        # A header cut within the phase's name, its last field, is still valid.
        for length in range(1, len(header) - len("forward") + 1):
            with pytest.raises(ProtocolError):
                decode(hand_built(header[:length], values))


def test_a_contribution_and_an_aggregate_in_msgpack_are_refused():
    for number in (3, 4):
        with pytest.raises(ProtocolError, match="type: expected"):
            decode(hand_built([number, b"session0", PACKED_KEY, 0, [1], 1, 1], bytes(8)))


def test_a_key_beyond_ascii_comes_back():
    texts = "jöb\0wörld\0bn1é\0forward".encode()
    frame = hand_built(contribution_header(texts=texts), bytes(32))
    assert decode(frame).key == RoundKey("jöb", "wörld", 1, 2, "bn1é", 3, "forward")
    assert encode(decode(frame)) == frame


@pytest.mark.parametrize(
    "present", [b"\1", b"\0\0\1", "", {}, [], [0, 1], bytes(4 * limits.MAX_MEMBERS)], ids="{!r:.20}".format
)
def test_present_members_must_be_bytes(present):
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
def test_malformed_msgpack_raises_no_error_but_a_protocol_error(extension):
    for before in (b"", b"\x91", b"\x93\x05\xc4\x08session0", b"\x92\x08\x81\xa1a"):
        decoded_or_refused(hand_built(before + extension))


# Nested arrays and maps, within the depth of msgpack's stack (1,024) and beyond.
openers = pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
depths = pytest.mark.parametrize("depth", [2, 100, 500, 900, 1_000, 1_020, 1_030, 10_000, 300_000])


@openers
@depths
def test_deep_nesting_raises_no_error_but_a_protocol_error(opener, depth):
    nested = opener * depth + b"\xc0"
    headers = {
        "the header": nested,
        "the type": b"\x91" + nested,
        "a token": b"\x93\x05" + nested + b"\xa0",
        "a text": b"\x93\x05\xc4\x08session0" + nested,
        "an integer": b"\x96\x02\xc4\x08session0\xc4\x08server00" + nested + b"\0\x90",
        "a key": b"\x95\x06\xa1c\xa1m\x80" + nested,
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


def test_invalid_utf8_is_refused():
    for text in (b"\xff", b"\xed\xa0\x80"):
        with pytest.raises(ProtocolError):
            decode(hand_built(b"\x93\x05\xc4\x08session0" + bytes([0xA0 | len(text)]) + text))


def test_the_magic_comes_first():
    frame = FRAMES[messages.StatusRequest]
    for magic in itertools.chain((b"sbn", b"SBM", b"\0\0\0"), (b"GET", b"\xff\0\0")):
        with pytest.raises(ProtocolError, match="expected to begin with b'SBN'"):
            decode(magic + frame[3:])


def test_a_request_with_the_most_runs_of_members_still_fits():
    known = Members(tuple((number, 1) for number in range(0, limits.MAX_MEMBERS, 2)))
    name, most = "é" * 128, limits.MAX_COUNTER
    longest = register(session=b"session0", job=name, group=name, place=name, epoch=most, step=most, known=known)
    assert decode_request(encode(longest)) == longest
    result = messages.Result(b"session0", dataclasses.replace(AGGREGATE, members=known))
    assert decode_request(encode(result)).aggregate.members == known


def test_a_contribution_with_the_longest_header_still_fits():
    name, most = "é" * 128, dict.fromkeys(("epoch", "step", "call"), limits.MAX_COUNTER)
    longest = key(name, job=name, group=name, phase="é" * 16, **most)
    rows = Rows((limits.MAX_COUNT // limits.MAX_REPLICAS,) * limits.MAX_REPLICAS, np.ones((limits.MAX_REPLICAS, 1, 1)))
    message = messages.Contribution(b"session0", longest, limits.MAX_COUNTER, rows)
    assert decode_request(encode(message)).key == longest


ANNOUNCED = b"\xdc\xff\xff" * 500  # arrays in arrays, each announcing 65,535 items


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
        msgpack.packb([14, b"session0", ANNOUNCED]),
        msgpack.packb([14, b"session0", b"\x97" + b"\x90" * 870]),
    ],
)
def test_an_unsound_request_takes_little_memory(header):
    """msgpack allocates announced sizes before any check, so `decode_request` gives it limits."""
    frame = hand_built(header)
    tracemalloc.start()
    with pytest.raises(ProtocolError) as refused:
        decode_request(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * min(len(frame), limits.MAX_REQUEST_HEADER_BYTES) + 700_000
    assert len(str(refused.value)) < 500
