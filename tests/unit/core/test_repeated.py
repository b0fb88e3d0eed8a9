"""Headers that have come before: what is taken without being unpacked is what unpacking gives."""

import dataclasses

import msgpack
import numpy as np
import pytest

from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.messages import Contribution
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.wire import decode, decode_request, encode, kept, repeated

# Around each change of the length that msgpack gives a number.
STEPS = [0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, limits.MAX_COUNTER]

SESSION = b"12345678"
KEY = RoundKey("digits", "world", 3, 7, "layer3.0.bn1", 0, "forward")


@pytest.fixture(autouse=True)
def _nothing_kept():
    for kept_ones in (repeated._kept, repeated._layers, kept._keys, kept._packed):
        kept_ones.clear()


def frame_of(key, session=SESSION, channels=4):
    rows = Rows((2, 3), np.arange(4.0 * channels).reshape(2, 2, channels))
    return encode(Contribution(session, key, 0, rows))


def told(contribution):
    rows = contribution.rows
    return contribution.session, contribution.key, contribution.attempt, rows.counts, rows.values.tobytes()


@pytest.mark.parametrize("epoch", [0, 200, 70_000])
@pytest.mark.parametrize("name", ["j", "j" * 31, "j" * 32, "j" * 90, "tâche"])
def test_another_step_is_read_without_unpacking_the_header(name, epoch, monkeypatch):
    at = {step: RoundKey(name, "world", epoch, step, "bn", 0, "backward") for step in STEPS}
    # One header of each length has to come first.
    for step in (0, 130, 300, 70_000, 2**33):
        decode_request(frame_of(KEY.__class__(*at[0][:3], step, *at[0][4:])))
    monkeypatch.setattr(msgpack, "unpackb", lambda *_, **__: pytest.fail("a header was unpacked"))
    for step in STEPS:
        assert told(decode_request(frame_of(at[step], b"another."))) == (
            b"another.",
            at[step],
            0,
            (2, 3),
            np.arange(16.0).tobytes(),
        )


@pytest.mark.parametrize("layer", ["bn", "layer3.0.downsample.batch_norm.1", "l" * 64])
def test_another_call_of_a_layer_is_read_without_unpacking_the_header(layer, monkeypatch):
    key = KEY._replace(layer=layer)
    # As many bytes in all, wherever they are.
    for call in (0, 200, 300):
        decode_request(frame_of(key.at(0, call)))
    monkeypatch.setattr(msgpack, "unpackb", lambda *_, **__: pytest.fail("a header was unpacked"))
    for step, call in [(5, 1), (5, 127), (127, 128), (200, 127), (0, 256), (255, 200), (256, 0)]:
        assert decode_request(frame_of(key.at(step, call))).key == key.at(step, call)


def test_no_changed_byte_is_taken_for_what_came_before():
    frame = frame_of(KEY)
    decode_request(frame)
    for place in range(repeated._BEHIND + 64):
        for byte in range(256):
            changed = frame[:place] + bytes([byte]) + frame[place + 1 :]
            assert outcome(decode_request, changed) == outcome(decode, changed), (place, byte)


def test_a_number_that_is_longer_than_it_has_to_be_is_not_kept_for_the_answer():
    decode_request(frame_of(KEY.at(300, 0)))
    short = kept.packed_key(KEY.at(5, 0))
    kept._packed.clear()
    sound, packed = frame_of(KEY.at(300, 0)), kept.packed_key(KEY.at(300, 0))
    long = packed.replace(b"\xcd\x01\x2c", b"\xcd\x00\x05")
    assert decode_request(sound.replace(packed, long)).key == KEY.at(5, 0)
    assert kept.packed_key(KEY.at(5, 0)) == short


def test_a_step_beyond_all_is_refused():
    decode_request(frame_of(KEY.at(limits.MAX_COUNTER, 0)))
    frame = frame_of(KEY.at(limits.MAX_COUNTER, 0))
    beyond = frame.replace(limits.MAX_COUNTER.to_bytes(8, "big"), (limits.MAX_COUNTER + 1).to_bytes(8, "big"))
    with pytest.raises(ProtocolError, match="step"):
        decode_request(beyond)


def test_values_of_another_length_are_refused():
    decode_request(frame_of(KEY))
    with pytest.raises(ProtocolError, match="values"):
        decode_request(frame_of(KEY.at(8, 0)) + bytes(8))


def test_only_so_many_layers_are_kept(monkeypatch):
    monkeypatch.setattr(repeated, "_MOST_LAYERS", 8)
    for number in range(20):
        decode_request(frame_of(RoundKey("job", "world", 0, 0, f"layer{number}", 0, "forward")))
        assert len(repeated._layers) <= 8


def outcome(read, frame):
    """What a frame says, or what is wrong with it; each time as if it were the first to come but for one."""
    before = {name: dict(getattr(repeated, name)) for name in ("_kept", "_layers")}
    try:
        message = read(frame)
    except ProtocolError:
        return None
    finally:
        for name, ones in before.items():
            getattr(repeated, name).clear()
            getattr(repeated, name).update(ones)
    if type(message) is not Contribution:
        return None
    assert [field.name for field in dataclasses.fields(message)] == ["session", "key", "attempt", "rows"]
    return told(message)
