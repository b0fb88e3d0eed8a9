import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from statsd_bn import limits, messages
from statsd_bn.errors import ProtocolError
from statsd_bn.reduction import Rows
from statsd_bn.round_key import FORWARD, RoundKey
from support.strategies import SAMPLES

KEY = RoundKey("job", "world", 0, 1, "layer1.bn", 2, FORWARD)

# Classes built for each frame of a round; not frozen, because an instance of a frozen class takes longer to build.
EACH_ROUND = {messages.Contribution, messages.Aggregate, Rows}

SOUND: dict[type, Any] = {RoundKey: KEY, Rows: Rows((1, 2), np.zeros((2, 2, 3))), **SAMPLES}

TOKENS = ([b"12345678", bytes(8)], [b"", bytes(7), bytes(9), "12345678", bytearray(8), 8, None])
# ESC, CR, NUL, DEL, a C1 control, right-to-left override, line separator, zero-width joiner, half a surrogate pair.
CONTROLS = ["a\x1b[2J", "a\rb", "a\0", "\x7f", "\x9b2J", "a\u202eb", "a\u2028b", "a\u200db", "\ud800"]
LONGEST = limits.MAX_NAME_BYTES
NAMES = (
    ["a", "naïve λ 層 🙂", "é" * (LONGEST // 2), "a" * LONGEST],
    ["", "a" * (LONGEST + 1), "é" * (LONGEST // 2) + "a", b"a", 1, None, "a\nb", "a\tb", *CONTROLS],
)
TEXTS = (
    ["", "x" * limits.MAX_TEXT_BYTES, "two\nlines, a\ttab", "naïve λ 層 🙂"],
    ["x" * (limits.MAX_TEXT_BYTES + 1), b"boom", 1, None, *CONTROLS],
)
NOT_INTEGERS = [True, False, 1.0, "1", None, np.int64(1)]
COUNTERS = ([0, limits.MAX_COUNTER], [-1, limits.MAX_COUNTER + 1, *NOT_INTEGERS])
MEMBERS = ([0, limits.MAX_MEMBERS - 1], [-1, limits.MAX_MEMBERS, *NOT_INTEGERS])
FLOATS_3 = np.zeros((2, 2, 3))
NOT_VALUES = [
    *([[[1.0]]], None, np.float64(1)),
    *(np.zeros((2, 2, 3), kind) for kind in (np.float32, ">f8", np.int64)),
    *(np.zeros(shape) for shape in ((1, 2, 2, 3), 3, (2, 2, 0), (2, 0, 3))),
    *(np.zeros(shape) for shape in ((2, limits.MAX_VECTORS + 1, 3), (2, 1, limits.MAX_CHANNELS + 1))),
]
NOT_FIGURES = [
    *(np.zeros(shape) for shape in ((1, 3, 4), (2, 3, 3), (2, 3, 5), (2, 0, 4))),
    *(np.full((2, 3, 4), value) for value in (np.nan, np.inf, [-1.0, 0.0, 0.0, 0.0], [1.0, 0.0, -1.0, 0.0])),
    *(np.full((2, 3, 4), [1.0, 0.0, 0.0, part]) for part in (1.5, -0.5)),
    np.full((2, 3, 4), [2.0**53 + 2, 0.0, 0.0, 0.5]),
]
FIGURES = ([np.zeros((2, 1, 4)), np.full((2, 5, 4), 1.0)], [*NOT_VALUES, *NOT_FIGURES])
HISTOGRAM = (
    [(0,) * 24, (limits.MAX_COUNTER,) * 24],
    [(0,) * 23, (0,) * 25, [0] * 24, (-1, *[0] * 23), (limits.MAX_COUNTER + 1, *[0] * 23), (1.0, *[0] * 23), None],
)
PHASES = ["p" * (limits.MAX_PHASE_BYTES + 1), *CONTROLS]
GROUPS_OF_TORCH = (["", "0"], ["g" * (LONGEST + 1), *CONTROLS])
OF_MEMBERS = (
    *(messages.Heartbeat, messages.Register, messages.Contribution, messages.Result, messages.RoundDone),
    *(messages.SkewStats, messages.RoundTrips, messages.LatenessReport, messages.StackReport),
)

# Limits, the fields that have them, and the messages with these fields.
ALIKE = [
    (TOKENS, "session", (*OF_MEMBERS, messages.NonFiniteRound, messages.Leave)),
    (TOKENS, "digest", (messages.Registered, messages.StackRequest)),
    (NAMES, "job group", (RoundKey, messages.Register, messages.FiguresRequest, messages.Figures)),
    (NAMES, "layer", (RoundKey,)),
    (NAMES, "place", (messages.Register,)),
    (NAMES, "what", (messages.NonFiniteRound,)),
    (NAMES, "code", (messages.Failure,)),
    (COUNTERS, "epoch", (RoundKey, messages.Register, messages.Registered)),
    (COUNTERS, "step", (RoundKey, messages.Register, messages.Heartbeat, messages.SkewStats)),
    (COUNTERS, "first_step", (messages.Register, messages.Registered)),
    (COUNTERS, "number", (messages.StackRequest, messages.StackReport)),
    (COUNTERS, "microseconds", (messages.RoundTrips, messages.LatenessReport)),
    (COUNTERS, "first", (messages.FiguresRequest, messages.Figures)),
    (COUNTERS, "call", (RoundKey,)),
    (COUNTERS, "rounds", (messages.Heartbeat,)),
    (COUNTERS, "total", (messages.Figures,)),
    (COUNTERS, "attempt", (messages.Contribution,)),
    (COUNTERS, "launched", (messages.StackReport,)),
    (COUNTERS, "seconds", (messages.Pending,)),
    (HISTOGRAM, "counts", (messages.RoundTrips, messages.LatenessReport)),
    (FIGURES, "values", (messages.SkewStats, messages.Figures)),
    (GROUPS_OF_TORCH, "torch_group", (messages.StackRequest, messages.StackReport)),
    (TEXTS, "cause", (messages.Leave,)),
    (TEXTS, "message", (messages.Failure,)),
]
FIELDS: list[tuple[type, str, list[Any], list[Any]]] = [
    *((kind, field, *values) for values, fields, kinds in ALIKE for kind in kinds for field in fields.split()),
    (RoundKey, "phase", ["forward", "p" * limits.MAX_PHASE_BYTES], ["", b"forward", 1, "a\nb", *PHASES]),
    (
        Rows,
        "counts",
        [(0, 0), (limits.MAX_COUNT, limits.MAX_COUNT)],
        [(), (1,), (1, 2, 3), (-1, 1), (limits.MAX_COUNT + 1, 1), *[(value, 1) for value in NOT_INTEGERS]],
    ),
    (
        Rows,
        "values",
        [FLOATS_3, np.full((2, limits.MAX_VECTORS, 1), np.nan), np.full((2, 1, limits.MAX_CHANNELS), np.inf)],
        [*NOT_VALUES, np.zeros((1, 2, 3)), np.zeros((3, 2, 3)), np.zeros((0, 2, 3))],
    ),
    (messages.Heartbeat, "transport", ["", "p" * limits.MAX_PHASE_BYTES], PHASES),
    (messages.Heartbeat, "why", ["", "w" * LONGEST], ["w" * (LONGEST + 1), *CONTROLS]),
    (messages.Register, "member", *MEMBERS),
    (messages.Register, "world_size", [1, 2, limits.MAX_MEMBERS], [-1, 0, limits.MAX_MEMBERS + 1, *NOT_INTEGERS]),
    (
        messages.Register,
        "deadline",
        [5e-324, 0.5, limits.MAX_DEADLINE],
        [0.0, -1.0, limits.MAX_DEADLINE + 1, float("nan"), float("inf"), 600, True, "600", None, np.float64(1)],
    ),
    (messages.Register, "min_members", [0, 1, 2], [-1, 3, *NOT_INTEGERS]),
    (messages.Register, "participation", [0, 1, 2], [-1, 3, *NOT_INTEGERS]),
    (messages.Register, "results", [0, limits.CACHED_ROUNDS], [-1, limits.CACHED_ROUNDS + 1, *NOT_INTEGERS]),
    (messages.Registered, "missing", [0, limits.MAX_MEMBERS], [-1, limits.MAX_MEMBERS + 1, *NOT_INTEGERS]),
    (messages.Pending, "message", ["two\nlines"], ["", *CONTROLS]),
    (messages.Pending, "stacks", ["", "two\nlines"], CONTROLS),
    (
        messages.SkewStats,
        "layers",
        ["a\nb", "λ\n" + "n" * limits.MAX_NAME_BYTES],
        ["", "a", "a\n", "a\nb\nc", "a\n" + "n" * (limits.MAX_NAME_BYTES + 1), "a\tb\nc", b"a\nb", None],
    ),
    (messages.Figures, "layers", ["a\nb"], ["", "a", "a\n", "a\nb\nc", "a\tb\nc", b"a\nb", None]),
    (messages.StackReport, "stack", ["", "two\nlines"], ["s" * (limits.MAX_STACK_BYTES + 1), *CONTROLS]),
    (messages.StackReport, "in_collective", [0, 1], [-1, 2, True]),
    (messages.StackReport, "collective", ["", "barrier"], ["c" * (limits.MAX_NAME_BYTES + 1), *CONTROLS]),
    (
        messages.Aggregate,
        "replicas",
        [1, limits.MAX_REPLICAS * limits.MAX_MEMBERS],
        [0, -1, limits.MAX_REPLICAS * limits.MAX_MEMBERS + 1, *NOT_INTEGERS],
    ),
    (messages.Aggregate, "count", [0, limits.MAX_COUNT], [-1, limits.MAX_COUNT + 1, *NOT_INTEGERS]),
    (
        messages.Aggregate,
        "values",
        [np.zeros((1, 1)), np.zeros((limits.MAX_VECTORS, 1)), np.zeros((1, limits.MAX_CHANNELS))],
        [*NOT_VALUES, FLOATS_3],
    ),
    (messages.Failure, "fields", [{}, {"a": [1]}], [[], None, "a", 1, {1: 2}, {b"a": 1}, {None: 1}]),
    (messages.Status, "report", [{}, {"a": [1]}], [[], None, "a", 1]),
]


def build(kind: type, **changed: Any) -> Any:
    sound = SOUND[kind]
    return RoundKey(**{**sound.fields, **changed}) if kind is RoundKey else dataclasses.replace(sound, **changed)


def name_of(value: object) -> str | None:
    return value.__name__ if isinstance(value, type) else value if isinstance(value, str) else ""


@pytest.mark.parametrize(("kind", "field", "good", "bad"), FIELDS, ids=name_of)
def test_a_field_accepts_exactly_the_values_within_its_limits(kind, field, good, bad):
    for value in good:
        assert getattr(build(kind, **{field: value}), field) is value
    for value in bad:
        with pytest.raises(ProtocolError):
            build(kind, **{field: value})


@pytest.mark.parametrize("kind", [messages.Register, messages.Registered], ids=name_of)
def test_the_field_server_is_a_token(kind):
    for bad in TOKENS[1]:
        with pytest.raises(ProtocolError, match="server: expected 8 bytes"):
            build(kind, server=bad)


def test_a_new_member_names_no_server():
    assert (build(messages.Register).server, build(messages.Register).step) == (messages.NO_SERVER, 0)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        (RoundKey, {"step": True}, "step: expected an integer in [0, 281474976710655], got True"),
        (RoundKey, {"layer": "x" * 257}, "layer: expected printable text of 1 to 256 bytes, got 'xxxx"),
        (messages.Register, {"session": b"123"}, "session: expected 8 bytes, got b'123'"),
        (messages.Register, {"member": -1}, "member: expected an integer in [0, 16383], got -1"),
        (messages.Register, {"deadline": 0.0}, "deadline: expected seconds in (0, 86400], got 0.0"),
        (Rows, {"counts": (1, -5)}, "count: expected an integer in [0, 9007199254740992], got -5"),
        (Rows, {"counts": (1,)}, "values: expected 1 rows, one per count, got 2"),
        (Rows, {"values": np.zeros((2, 3), np.float32)}, "expected float64 of 3 dimensions, got float32 (2, 3)"),
        (Rows, {"values": [1.0]}, "expected float64 of 3 dimensions, got list"),
        (Rows, {"values": np.zeros((2, 9, 3))}, "vectors: expected an integer in [1, 8], got 9"),
        (
            messages.Aggregate,
            {"values": np.zeros((2, 65_537))},
            "channels: expected an integer in [1, 65536], got 65537",
        ),
        (messages.Failure, {"fields": [1]}, "fields: expected a map"),
        (messages.Status, {"report": "x"}, "report: expected a map, got str"),
    ],
    ids=name_of,
)
def test_the_error_gives_the_expected_and_the_actual_value(kind, changed, message):
    with pytest.raises(ProtocolError) as caught:
        build(kind, **changed)
    assert message in caught.value.message


def test_an_error_shows_only_the_beginning_of_a_long_value():
    with pytest.raises(ProtocolError) as caught:
        build(messages.Leave, cause="x" * 100_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("kind", [kind for kind in SOUND if kind not in EACH_ROUND], ids=name_of)
def test_messages_are_frozen_except_those_of_each_round(kind):
    message = build(kind)
    for name in RoundKey._fields if kind is RoundKey else (field.name for field in dataclasses.fields(kind)):
        with pytest.raises(AttributeError):
            setattr(message, name, None)


def test_types_of_messages_are_distinct():
    kinds = [kind for kind in SOUND if kind not in {RoundKey, Rows}]
    assert len(messages.BY_TYPE) == len(kinds)
    assert {messages.BY_TYPE[kind.type] for kind in kinds} == set(kinds)


def test_a_key_has_its_fields_in_the_order_of_the_protocol():
    assert list(KEY) == ["job", "world", 0, 1, "layer1.bn", 2, FORWARD]


def test_the_text_of_a_key_names_its_round():
    assert str(KEY) == "job 'job', group 'world', epoch 0, step 1, layer 'layer1.bn', call 2, forward"


def test_the_fields_of_a_key_have_their_names():
    assert list(KEY.fields.items())[3:5] == [("step", 1), ("layer", "layer1.bn")]


def test_keys_are_equal_by_value_and_differ_in_every_field():
    assert RoundKey(**KEY.fields) == KEY
    assert hash(RoundKey(**KEY.fields)) == hash(KEY)
    for name, value in KEY.fields.items():
        other = value + 1 if isinstance(value, int) else f"{value}x"
        assert RoundKey(**{**KEY.fields, name: other}) != KEY


def test_another_phase_of_a_key_is_checked_as_well():
    assert KEY.of_phase("backward") == RoundKey("job", "world", 0, 1, "layer1.bn", 2, "backward")
    with pytest.raises(ProtocolError, match="phase"):
        KEY.of_phase("")


SCRIPT = """
import sys, threading
from statsd_bn.messages import Heartbeat
from statsd_bn.wire import decode, encode

sys.setswitchinterval(1e-5)
mixed = []

def check(session):
    try:
        for step in range(2000):
            read = decode(encode(Heartbeat(session, step)))
            assert (read.session, read.step) == (session, step)
    except Exception as error:
        mixed.append(error)

threads = [threading.Thread(target=check, args=(b"session%d" % number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(len(mixed))
"""


@pytest.mark.parametrize("pure", ["", "1"])
def test_threads_do_not_write_into_one_anothers_frames(pure):
    environment = {**os.environ, "MSGPACK_PUREPYTHON": pure}
    assert subprocess.run([sys.executable, "-c", SCRIPT], env=environment, timeout=60, check=False).returncode == 0
