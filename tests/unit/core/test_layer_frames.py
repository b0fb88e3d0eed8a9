"""Frames of layers that have had a round before are to the byte what encoding gives, and say what decoding says."""

import numpy as np
import pytest

from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.members import NOBODY, Members
from statsd_bn.messages import Aggregate, Contribution
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.wire import decode, encode, layer_frames
from statsd_bn.wire.layer_frames import LayerFrames

SESSION = b"12345678"
KEY = RoundKey("digits", "world", 3, 7, "layer3.0.bn1", 0, "forward")

# Around each change of the length that msgpack gives a number.
STEPS = [0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, limits.MAX_COUNTER]
TWICE = [step for step in STEPS for _ in range(2)]


def rows_of(counts=(2, 3), channels=4, start=0.0):
    values = np.arange(2.0 * len(counts) * channels).reshape(len(counts), 2, channels) + start
    return Rows(counts, values)


def aggregate_of(key=KEY, *, count=5, members=(0, 1), channels=4, non_finite=()):
    values = np.arange(2.0 * channels).reshape(2, channels)
    return Aggregate(key, 2, count, Members.of(members), values, Members.of(non_finite))


def told(aggregate):
    said = aggregate.replicas, aggregate.count, aggregate.members, aggregate.non_finite
    return aggregate.key, *said, aggregate.values.shape, aggregate.values.tobytes()


@pytest.fixture
def frames():
    return LayerFrames(SESSION)


@pytest.fixture
def known(frames):
    """Frames that know one aggregate of the layer."""
    frames.keep(encode(aggregate_of()), aggregate_of())
    return frames


@pytest.mark.parametrize("layer", ["bn", "layer3.0.downsample.batch_norm.1", "l" * limits.MAX_NAME_BYTES, "schicht.ä"])
def test_a_contribution_is_what_encoding_gives(frames, layer):
    key = KEY._replace(layer=layer)
    for number, step in enumerate(TWICE):
        for call in (0, 200):
            at, rows = key.at(step, call), rows_of(start=number)
            assert frames.contribution(at, rows) == encode(Contribution(SESSION, at, 0, rows)), (step, call)


def test_a_known_layers_contribution_is_not_encoded_again(frames, monkeypatch):
    frames.contribution(KEY, rows_of())
    monkeypatch.setattr(layer_frames, "encode", lambda _: pytest.fail("it was encoded"))
    frames.contribution(KEY.at(8, 1), rows_of(start=1.0))


@pytest.mark.parametrize(
    "other", [rows_of(counts=(3, 2)), rows_of(counts=(2,)), rows_of(channels=5), rows_of(counts=(2, 3, 4))]
)
def test_other_rows_of_the_layer_have_a_header_of_their_own(frames, other):
    frames.contribution(KEY, rows_of())
    assert frames.contribution(KEY.at(8, 0), other) == encode(Contribution(SESSION, KEY.at(8, 0), 0, other))


def test_rows_that_lie_otherwise_in_memory_are_sent_in_order(frames):
    plain = rows_of()
    turned = Rows(plain.counts, np.asfortranarray(plain.values))
    frames.contribution(KEY, plain)
    assert frames.contribution(KEY, turned) == frames.contribution(KEY, plain)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("non_finite", [(), (1,)])
def test_an_aggregate_is_what_decoding_gives(frames, channels, non_finite):
    kept = 0
    for step in TWICE:
        frame = encode(aggregate_of(KEY.at(step, 0), channels=channels, non_finite=non_finite))
        decoded = decode(frame)
        found = frames.aggregate(decoded.key, frame)
        if found is None:
            frames.keep(frame, decoded)
            kept += 1
        else:
            assert told(found) == told(decoded)
    # Of so many lengths is a key with these steps.
    assert kept == 5


def test_no_changed_byte_is_taken_for_what_is_expected(known):
    frame = encode(aggregate_of(KEY.at(8, 0)))
    assert known.aggregate(KEY.at(8, 0), frame)
    for place in range(len(frame) - aggregate_of().values.nbytes):
        for byte in set(range(256)) - {frame[place]}:
            changed = frame[:place] + bytes([byte]) + frame[place + 1 :]
            assert known.aggregate(KEY.at(8, 0), changed) is None, (place, byte)


@pytest.mark.parametrize("end", [-1, -8, -16])
def test_a_frame_that_is_too_short_is_left_to_decoding(known, end):
    frame = encode(aggregate_of())
    assert known.aggregate(KEY, frame[:end]) is None
    with pytest.raises(ProtocolError):
        decode(frame[:end])


def test_a_frame_that_is_too_long_is_left_to_decoding(known):
    assert known.aggregate(KEY, encode(aggregate_of()) + bytes(8)) is None


@pytest.mark.parametrize(
    "key", [KEY.at(8, 0), KEY.at(7, 1), KEY.at(700, 0), KEY.of_phase("backward"), KEY._replace(layer="layer3.0.bn2")]
)
def test_the_aggregate_of_another_round_is_not_taken_for_this_one(known, key):
    assert known.aggregate(key, encode(aggregate_of())) is None
    assert known.aggregate(KEY, encode(aggregate_of(key))) is None


@pytest.mark.parametrize(
    "other", [{"count": 6}, {"members": (0, 2)}, {"channels": 5}, {"non_finite": (0,)}, {"members": (0, 1, 3)}]
)
def test_an_aggregate_that_says_something_else_is_left_to_decoding(known, other):
    frame = encode(aggregate_of(**other))
    assert known.aggregate(KEY, frame) is None
    known.keep(frame, decode(frame))
    assert told(known.aggregate(KEY, frame)) == told(decode(frame))


def test_a_key_that_is_packed_otherwise_than_ours_is_not_kept(frames):
    frame = encode(aggregate_of())
    frames.keep(frame.replace(b"world", b"wurld"), aggregate_of())
    assert frames.aggregate(KEY, frame) is None


def test_only_so_many_layers_are_kept(frames, monkeypatch):
    monkeypatch.setattr(layer_frames, "_MOST_LAYERS", 8)
    for number in range(20):
        key = KEY._replace(layer=f"layer{number}")
        frames.contribution(key, rows_of())
        frames.keep(encode(aggregate_of(key)), aggregate_of(key))
        assert len(frames._sent) <= 8
        assert len(frames._received) <= 8


def test_nobody_brought_anything_that_is_not_finite(known):
    assert known.aggregate(KEY, encode(aggregate_of())).non_finite == NOBODY
