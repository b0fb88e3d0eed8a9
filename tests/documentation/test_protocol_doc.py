"""docs/protocol.md defines the wire, and the code conforms to it."""

import dataclasses
import functools
import math
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgpack
import numpy as np
import pytest

from client.launch import connect
from client.session import channel_pool
from client.session.protocol import registration, round_trip
from server.core import deadlock, hang_probe, registry
from server.core.dispatcher import Dispatcher
from server.group import contributor, master, recovery
from server.group.rounds import Round, RoundState
from server.network import connections, listener, service
from server.security.access import Principal
from statsd_bn import PROTOCOL_VERSION, errors, limits, messages
from statsd_bn.errors import ProtocolError
from statsd_bn.members import Members
from statsd_bn.round_key import FORWARD, RoundKey
from statsd_bn.wire import decode, decode_request, encode
from support import strategies
from support.paths import ROOT
from support.strategies import AGGREGATE, contribution, key, register, rows, session_of

DOCUMENT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")

# The page that describes the report's fields.
REPORT = (ROOT / "docs" / "seeing.md").read_text(encoding="utf-8")

# Errors raised locally, which are never sent.
LOCAL = {"error", "configuration", "bind", "connection_closed", "unreachable", "group_incomplete", "non_finite"}

# One valid message of each type; some are as small as possible.
SAMPLES: dict[type[messages.Message], messages.Message] = {
    **strategies.SAMPLES,
    messages.Failure: messages.Failure("mismatch", "", {}, key()),
    messages.Status: messages.Status({}),
    messages.Figures: messages.Figures("job", "world", 0, 0, "", np.zeros((0, 2, 4))),
}


# Reading the document.


def section(title: str, page: str = DOCUMENT) -> str:
    found = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
    assert found, f"no section {title!r}"
    return found[1]


def table(title: str, page: str = DOCUMENT) -> list[list[str]]:
    """The rows of a section's one table, without its head."""
    lines = [line for line in section(title, page).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@dataclasses.dataclass(frozen=True)
class Field:
    """A documented field; `number` is also its place in the header, where the message's type is number 0."""

    number: int
    name: str
    type: str
    limits: str


def title_of(message: type[messages.Message]) -> str:
    return f"{message.type}. {message.__name__}"


def documented(title: str) -> list[Field]:
    return [Field(number, *row[:3]) for number, row in enumerate(table(title), 1)]


def number(text: str) -> int:
    for sign, apply in ((" - ", int.__sub__), (" · ", int.__mul__)):
        if sign in text:
            left, right = text.split(sign)
            return apply(number(left), number(right))
    named = {**vars(limits), "world_size": register().world_size}
    return int(named[text]) if text in named else int(text)


# Frames, valid and invalid; their headers are made without the code under test.


# How `struct` names the types of a header of fixed fields.
FIXED = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "token": "8s"}
LARGEST = {"u8": 2**8 - 1, "u16": 2**16 - 1, "u32": 2**32 - 1, "u64": 2**64 - 1}
RUN_BYTES = 4


def header_of(frame: bytes) -> list[Any]:
    header = frame[8 : 8 + int.from_bytes(frame[4:8], "little")]
    is_fixed = header[0] in {messages.Contribution.type, messages.Aggregate.type}
    return fixed_header_of(header) if is_fixed else msgpack.unpackb(header)


def fixed_header_of(header: bytes) -> list[Any]:
    found: dict[str, Any] = {}
    at, fields = 1, documented(title_of(messages.BY_TYPE[header[0]]))
    for field in fields:
        if field.type == "name":
            continue
        if field.type in FIXED:
            size = struct.calcsize("<" + FIXED[field.type])
            (found[field.name],) = struct.unpack_from("<" + FIXED[field.type], header, at)
        elif field.type == "u64s":
            size = 8 * found["replicas"]
            found[field.name] = list(struct.unpack_from(f"<{found['replicas']}Q", header, at))
        else:
            size = RUN_BYTES * found["member_runs" if field.name == "members" else "non_finite_runs"]
            found[field.name] = header[at : at + size]
        at += size
    return [header[0], *found.values(), *header[at:].decode().split("\0")]


def packed_header(header: list[Any]) -> bytes:
    if header[0] not in {messages.Contribution.type, messages.Aggregate.type}:
        return msgpack.packb(header)
    packed, names = bytes([header[0]]), []
    for field in documented(title_of(messages.BY_TYPE[header[0]])):
        value = header[field.number]
        if field.type == "name":
            names.append(value.encode())
        elif field.type in LARGEST:
            packed += struct.pack("<" + FIXED[field.type], value)
        else:
            packed += struct.pack(f"<{len(value)}Q", *value) if field.type == "u64s" else value
    return packed + b"\0".join(names)


def frame_of(header: list[Any]) -> bytes:
    packed = packed_header(header)
    frame = b"SBN" + bytes([PROTOCOL_VERSION]) + len(packed).to_bytes(4, "little") + packed
    padding = bytes(-len(packed) % 8)
    if header[0] in {messages.SkewStats.type, messages.Figures.type}:
        *_, layers, members = header
        is_empty = header[0] == messages.Figures.type and not layers
        number = layers.count("\n") + 1 if isinstance(layers, str) and not is_empty else int(not is_empty)
        return frame + padding + bytes(8 * 4 * max(0, number * members))
    if header[0] == messages.Result.type:
        return frame + padding + encode(AGGREGATE)
    if header[0] in {messages.Contribution.type, messages.Aggregate.type}:
        of = {field.name: header[field.number] for field in documented(title_of(messages.BY_TYPE[header[0]]))}
        rows = of["replicas"] if header[0] == messages.Contribution.type else 1
        return frame + padding + bytes(8 * rows * of["vectors"] * of["channels"])
    return frame


def changed(message: type[messages.Message], field: Field, value: Any) -> bytes:
    """A frame with one changed field. If one of two fields counts the items of the other, both are changed."""
    header = header_of(encode(SAMPLES[message]))
    numbers = {one.name: one.number for one in documented(title_of(message))}
    header[field.number] = value
    if message is messages.Contribution and field.name == "counts":
        header[numbers["replicas"]] = len(value)
    elif message is messages.Contribution and field.name == "replicas":
        header[numbers["counts"]] = [0] * value
    elif message is messages.Aggregate and field.type == "members":
        runs = {"members": "member_runs", "non_finite": "non_finite_runs"}[field.name]
        header[numbers[runs]] = len(value) // RUN_BYTES
    return frame_of(header)


def changed_key(field: Field, value: Any) -> bytes:
    header = header_of(encode(SAMPLES[messages.Pending]))
    fields = msgpack.unpackb(header[1])
    fields[field.number - 1] = value
    return frame_of([header[0], msgpack.packb(fields), *header[2:]])


def is_refused(frame: bytes) -> bool:
    """Whether a member refuses a frame; a server also refuses frames that are no requests."""
    refused = _is_refused(frame, decode)
    is_request = isinstance(header_of(frame)[0], int) and messages.BY_TYPE[header_of(frame)[0]] in get_args(
        messages.Request
    )
    assert _is_refused(frame, decode_request) == (refused or not is_request)
    return refused


def _is_refused(frame: bytes, read: Callable[[bytes], messages.Message]) -> bool:
    try:
        read(frame)
    except ProtocolError:
        return True
    return False


# The version, the messages and their fields.

EVERY_MESSAGE = pytest.mark.parametrize("message", messages.BY_TYPE.values(), ids=lambda message: message.__name__)


def test_the_version_is_that_of_the_code():
    assert re.findall(r"^Protocol version: (.*)$", DOCUMENT, re.MULTILINE) == [str(PROTOCOL_VERSION)]


def test_every_message_is_documented_and_no_other():
    titles = re.findall(r"^### (\d+\. .*)$", DOCUMENT, re.MULTILINE)
    assert titles == [title_of(message) for message in messages.BY_TYPE.values()]


def test_the_round_key_has_its_fields_in_order():
    assert [field.name for field in documented("Round key")] == list(RoundKey._fields)


COUNTERS, NAMES = ["epoch", "step", "call"], ["job", "group", "layer", "phase"]


@EVERY_MESSAGE
def test_every_message_has_its_fields_in_order(message):
    expected = {
        messages.Contribution: ["vectors", "replicas", "session", "channels", *COUNTERS, "attempt", "counts", *NAMES],
        messages.Aggregate: [
            *("vectors", "member_runs", "non_finite_runs", "channels", "replicas", "count"),
            *(*COUNTERS, "members", "non_finite", *NAMES),
        ],
        messages.Result: ["session"],
        messages.SkewStats: ["session", "step", "layers", "members"],
        messages.Figures: ["job", "group", "first", "total", "layers", "members"],
    }.get(message, [field.name for field in dataclasses.fields(message)])
    assert [field.name for field in documented(title_of(message))] == expected


@EVERY_MESSAGE
def test_a_real_frame_has_the_documented_fields(message):
    header = header_of(encode(SAMPLES[message]))
    assert header[0] == message.type
    assert len(header) - 1 == len(documented(title_of(message)))


@EVERY_MESSAGE
def test_the_server_accepts_exactly_the_messages_directed_to_it(message):
    direction = re.search(r"^Direction: (.*?) to (.*?)\.", section(title_of(message)), re.MULTILINE)
    (*_, answer) = play(SAMPLES[message]) or [None]
    refused = isinstance(answer, messages.Failure) and "expected a request" in answer.message
    assert refused == (direction[2] != "server")


# Limits of fields.

TYPES = {**dict.fromkeys(("u8", "u16", "u32", "u64"), int), "u64s": list, "name": str, "text": str, "names": str}
TYPES |= {"token": bytes, "integer": int, "float": float, "integers": list, "members": bytes, "map": dict, "key": bytes}
# For each type, a value of another type.
FOREIGN = {"name": b"x", "text": b"x", "names": b"x", "token": "session0", "integer": True, "float": 5, "integers": 5}
FOREIGN |= {"members": 5, "map": [], "key": "job"}


def test_every_type_is_explained():
    assert [name for name, _ in table("Field types")] == list(TYPES)


@EVERY_MESSAGE
def test_every_field_accepts_only_its_type(message):
    header = header_of(encode(SAMPLES[message]))
    for field in documented(title_of(message)):
        assert type(header[field.number]) is TYPES[field.type], field
        # In these two messages, fields are bytes at fixed places, so no value can have another type.
        if message not in {messages.Contribution, messages.Aggregate}:
            assert is_refused(changed(message, field, FOREIGN[field.type])), field


def legal_and_illegal_of_fixed(field: Field) -> Iterator[tuple[bool, Any]]:
    """Like `legal_and_illegal`, for the types that occur only in headers of fixed fields."""
    if field.type == "u64s":
        low, high = map(number, re.fullmatch(r"each (.+) to (.+)", field.limits).groups())
        yield from ((True, [low]), (True, [high]), (False, [high + 1]), (False, [2**64 - 1]), (False, []))
    elif field.limits:
        low, high = map(number, re.fullmatch(r"(.+) to (.+)", field.limits).groups())
        yield from ((True, low), (True, high), (False, high + 1))
        if field.type == "u64":
            yield False, LARGEST[field.type]
        if low:
            yield False, low - 1
    else:
        yield False, LARGEST[field.type]


def legal_and_illegal(field: Field) -> Iterator[tuple[bool, Any]]:
    if field.type in LARGEST or field.type == "u64s":
        yield from legal_and_illegal_of_fixed(field)
    elif field.type == "token":
        size = limits.TOKEN_BYTES
        yield from ((True, bytes(size)), (False, bytes(size - 1)), (False, bytes(size + 1)))
    elif field.type == "float":
        low, high = map(number, re.fullmatch(r"above (.+), at most (.+)", field.limits).groups())
        yield from ((True, math.nextafter(low, high)), (True, float(high)), (False, math.nan))
        yield from ((False, float(low)), (False, math.nextafter(high, math.inf)))
    elif field.type in {"name", "text"}:
        low, high = map(number, re.fullmatch(r"(.+) to (.+) bytes", field.limits).groups())
        yield from ((True, "x" * low), (True, "é" * (high // 2)), (False, "x" * (high + 1)), (False, "é" * high))
        yield from ((field.type == "text", f"a{letter}b") for letter in "\n\t")
        yield from ((False, f"a{letter}b") for letter in "\x1b\r\0\x7f\x9b\u202e\u2028\u200d\u00a0")
        if low:
            yield False, "x" * (low - 1)
    elif field.type == "names":
        pattern = r"(.+) to (.+) of them, each (.+) to (.+) bytes"
        low, high, shortest, longest = map(number, re.fullmatch(pattern, field.limits).groups())
        assert (low in {0, 1}, shortest) == (True, 1)
        yield from ((True, "x" * longest), (False, "x" * (longest + 1)), (low == 0, ""), (False, "x\n"))
        yield from ((True, "\n".join(["x" * longest] * high)), (False, "\n".join("x" * (high + 1))))
    elif field.type == "integer":
        low, high = map(number, re.fullmatch(r"(.+) to (.+)", field.limits).groups())
        yield from ((True, low), (True, high), (False, low - 1), (False, high + 1))
    elif field.type == "integers":
        pattern = r"(?:(1) to )?(.+) of them, each (.+) to (.+)"
        least, most, low, high = (text and number(text) for text in re.fullmatch(pattern, field.limits).groups())
        least = least or most
        yield from ((True, [low] * least), (True, [high] * least))
        yield from ((False, [low - 1] * least), (False, [high + 1] * least))
        yield from ((True, [low] * most), (False, [low] * (most + 1)), (False, [low] * (least - 1)))
    elif field.type == "members":
        assert field.limits in {"", "not empty"}
        most = limits.MAX_MEMBERS
        legal = [[0, most], [most - 1, 1], [0, 4, 7, 1]]
        yield not field.limits, b""
        illegal = [[0], [0, most + 1], [most, 1], [65_535, 1], [0, 0], [0, 2, 2, 1], [7, 1, 0, 4]]
        yield from ((flat in legal, struct.pack(f"<{len(flat)}H", *flat)) for flat in legal + illegal)
        yield from ((False, bytes(size)) for size in (1, 3, 5, 2 * most + 4))
    else:
        assert not field.limits


def test_every_field_of_a_round_key_is_of_its_type_and_within_its_limits():
    for field in documented("Round key"):
        assert is_refused(changed_key(field, FOREIGN[field.type])), field
        for legal, value in legal_and_illegal(field):
            assert is_refused(changed_key(field, value)) != legal, (field, legal, value)


@EVERY_MESSAGE
def test_every_field_accepts_values_up_to_its_limits_only(message):
    for field in documented(title_of(message)):
        for legal, value in legal_and_illegal(field):
            assert is_refused(changed(message, field, value)) != legal, (field, legal, value)


def test_every_limit_has_its_value():
    found = {name: float(value) for name, value in table("Limits")}
    assert found == {name: value for name, value in vars(limits).items() if name.isupper()}


# Errors: each is provoked, and the failure that is sent is the documented one.

OPEN = (register(0), register(1))
FRESH = b"a fresh1"
PAST: dict[str, Any] = {"server": b"server-9", "known": Members.of([0, 1]), "results": 1}


def play(*inputs: messages.Message | bytes, then: Callable[[Dispatcher], Any] = lambda _: ()) -> list[messages.Message]:
    """Sends messages to a new server; returns the answers to the last message, or the answers that `then` causes."""
    dispatcher = Dispatcher(b"server-0", 0.0)
    replies: Any = []
    for message in inputs:
        replies = dispatcher.receive(0.0, b"peer", message if isinstance(message, bytes) else encode(message)).replies
    replies = then(dispatcher) or replies
    return [decode(frame) for _, frame in replies]


def after_a_while(dispatcher: Dispatcher) -> Any:
    return dispatcher.tick(5.0)


TWO_RESULTS = (
    *(register(member, **PAST) for member in (0, 1)),
    messages.Result(session_of(0), AGGREGATE),
    messages.Result(session_of(1), dataclasses.replace(AGGREGATE, count=2)),
)
LEFT = messages.Leave(session_of(1), "boom")
EVE = Principal("eve", "key of eve", ("eve-*",))
MOST = rows(1.0, count=limits.MAX_COUNT)


def from_eve(message: messages.Message) -> Callable[[Dispatcher], Any]:
    return lambda dispatcher: dispatcher.receive(0.0, b"peer", encode(message), EVE).replies


# For each cause of a failure in the document, a way to provoke it.
WAYS: dict[str, Callable[[], list[messages.Message]]] = {
    "a foreign session": lambda: play(*OPEN, then=from_eve(messages.Heartbeat(session_of(0)))),
    "a foreign job": lambda: play(register(0), then=from_eve(register(1))),
    "an unsound frame": lambda: play(b"garbage"),
    "a session that registers as another member": lambda: play(register(0), register(1, session=session_of(0))),
    "a foreign key": lambda: play(*OPEN, contribution(0, key=key(job="other"), session=session_of(0))),
    "another version": lambda: play(b"SBN" + bytes([PROTOCOL_VERSION + 1]) + bytes(4)),
    "other results": lambda: play(*TWO_RESULTS, contribution(0, key=key(step=1))),
    "other results, and registering": lambda: play(*TWO_RESULTS, register(0)),
    "missing results": lambda: play(register(0, **PAST), messages.Heartbeat(session_of(0))),
    "another policy": lambda: play(register(0), register(1, min_members=1)),
    "a session that has left": lambda: play(*OPEN, messages.Leave(session_of(0), ""), contribution(0)),
    "the server's end before the group opens": lambda: play(register(0), then=Dispatcher.stop),
    "a round that ended long ago": lambda: play(
        register(0, 1), *(contribution(0, key=key(step=step)) for step in (*range(limits.CACHED_ROUNDS + 1), 0))
    ),
    "a member that does not come back": lambda: play(
        register(0, **PAST, deadline=5.0),
        messages.Result(session_of(0), AGGREGATE),
        contribution(0, key=key(step=1)),
        then=after_a_while,
    ),
    "a new run": lambda: play(*OPEN, contribution(0), register(0, epoch=1, session=FRESH)),
    "a member twice": lambda: play(register(0), register(0, session=FRESH)),
    "another world size": lambda: play(register(0), register(1, 3)),
    "a number outside of the world": lambda: play(register(2, 2)),
    "one member too many": lambda: play(*(register(member, 2, group="pair") for member in (3, 5, 4))),
    "an earlier epoch": lambda: play(register(0, epoch=1), register(1)),
    "an unknown session": lambda: play(contribution(0)),
    "an unknown session's heartbeat": lambda: play(messages.Heartbeat(FRESH)),
    "the server's end": lambda: play(*OPEN, contribution(0), then=Dispatcher.stop),
    "too many groups": lambda: play(*(register(job=str(number)) for number in range(limits.MAX_GROUPS + 1))),
    "too many rounds": lambda: play(
        *OPEN, *(contribution(0, key=key(step=step)) for step in range(limits.MAX_OPEN_ROUNDS + 1))
    ),
    "too early": lambda: play(register(0), contribution(0)),
    "too many values": lambda: play(*OPEN, contribution(0, MOST), contribution(1, MOST)),
    "another shape": lambda: play(*OPEN, contribution(0), contribution(1, rows(1.0, channels=2))),
    "another layer": lambda: play(*OPEN, contribution(0), contribution(1, key=key("bn2")), then=after_a_while),
    "another group": lambda: play(
        *OPEN,
        register(0, group="pair", session=FRESH),
        contribution(1),
        then=lambda dispatcher: after_a_while(dispatcher)[1:],
    ),
    "other bytes": lambda: play(*OPEN, contribution(0), contribution(0, 2.0)),
    "too late": lambda: play(*OPEN, contribution(0), then=lambda dispatcher: dispatcher.tick(600.0)),
    "a member lost": lambda: play(*OPEN, LEFT, contribution(0)),
    "a member lost, and registering": lambda: play(*OPEN, LEFT, register(0)),
}


@functools.cache
def failure(way: str) -> messages.Failure:
    return next(answer for answer in WAYS[way]() if isinstance(answer, messages.Failure))


def test_every_error_that_can_travel_is_documented():
    assert {code for code, *_ in table("Errors")} == set(errors.BY_CODE) - LOCAL


def test_every_documented_error_does_travel():
    assert {failure(way).code for way in WAYS} == {code for code, *_ in table("Errors")}


@pytest.mark.parametrize("way", WAYS)
def test_an_error_has_the_documented_fields(way):
    spread = ", ".join(field.name for field in documented("Round key"))
    documented_ = [
        [name for name in names.replace("round key", spread).split(", ") if name]
        for code, has_key, _, names in table("Errors")
        if code == failure(way).code and has_key in {"both", "no" if failure(way).key is None else "yes"}
    ]
    assert list(failure(way).fields) in documented_


def test_an_error_has_a_key_where_the_document_says_so():
    found: dict[str, set[bool]] = {}
    for way in WAYS:
        found.setdefault(failure(way).code, set()).add(failure(way).key is not None)
    words = {"yes": {True}, "no": {False}, "both": {True, False}}
    documented_: dict[str, set[bool]] = {}
    for code, has_key, *_ in table("Errors"):
        documented_.setdefault(code, set()).update(words[has_key])
    assert found == documented_


def test_the_table_of_stuck_members_has_the_documented_entries():
    spread = {"step, layer, call, phase": ["step", "layer", "call", "phase"]}
    names = [part for name, *_ in table("Stuck members") for part in spread.get(name, [name])]
    assert names.pop() == "stack", "only in the error of a rank that waits in a collective, see test_hang_probe"
    for way in ("another layer", "another group"):
        rows_ = failure(way).fields["table"]
        assert len(rows_) == 2
        assert [list(row) in (names, names[:4]) for row in rows_] == [True, True]
    assert [list(row) for row in failure("another layer").fields["table"]] == [names, names]


# Rounds, deadlines, the report, the example.


def test_a_round_has_the_documented_states():
    happen = {
        "contributed": lambda round_: round_.put(0, rows(1.0), b"peer"),
        "withdrawn": lambda round_: round_.withdraw(0),
        "completed": lambda round_: round_.end(b"answer"),
        "broken": lambda round_: round_.end(b"answer", RoundState.FAILED),
    }
    documented = table("The life of a round")
    assert {event for _, event, _ in documented} == happen.keys()
    for state, event, after in documented:
        round_ = Round(key(), (0, 1), 0.0, 600.0)
        assert round_.state == state
        happen[event](round_)
        assert round_.state == after


def test_deadlines_and_queues_have_the_values_in_the_code():
    whose = {
        "server": [service, master, recovery, deadlock, registry, connections, listener],
        "client": [connect, registration, round_trip, channel_pool],
        "both": [listener, channel_pool],
    }
    for name, value, side in table("Deadlines"):
        found = [getattr(module, name) for module in whose[side] if hasattr(module, name)]
        assert set(found) == {float(value)}, name
        assert len(found) > 1 or side != "both", name


def test_the_times_of_stack_requests_are_those_in_the_code():
    found = {name: float(value) for name, value in table("Where a member is")}
    of_code = vars(contributor) | vars(hang_probe) | vars(deadlock)
    assert found == {name: of_code[name] for name in found}


def test_the_status_report_has_the_documented_entries(monkeypatch):
    transports = [messages.Heartbeat(session_of(number), 0, 0, "server", "rank 0: on purpose") for number in range(2)]
    transports += [messages.RoundTrips(session_of(number), 500, (0, 3, *[0] * 22)) for number in range(2)]
    first = (contribution(0), contribution(1))
    inputs = (*OPEN, *first, contribution(0, key=key(step=1)), *transports, messages.StatusRequest())
    (whole,) = play(*inputs)
    (group,) = whole.report["groups"]
    monkeypatch.setattr(limits, "MAX_HEADER_BYTES", 300)
    (cut,) = play(*inputs)
    monkeypatch.undo()
    goodbyes = [messages.Leave(session_of(member), "") for member in (0, 1)]
    (after,) = play(*OPEN, *goodbyes, messages.StatusRequest())
    kinds = {"text": str, "integer": int, "float": float, "boolean": bool, "array": list, "map": dict}
    for title, real in (
        ("Report", cut.report),
        ("Group", group),
        ("Group member", group["members"][0]),
        *(("Histogram", group[name]) for name in ("round_seconds", "late_seconds", "round_trip_seconds")),
        ("Open round", group["waiting"][0]),
        ("Ended job", after.report["ended"][0]),
    ):
        documented = {name: kinds[kind] for name, kind, _ in table(title, REPORT)}
        # Fields that a report has only later: a member's position after a stack request, its speed after a minute, and
        # what broke the group or was not finite.
        later = {"where", "findings", "slowest", "held", "held_seconds", "last", "late", "waiting", "score"}
        later = (later | {"slowest_in", "lost_by", "refused", "first_non_finite", "compared_layers"}) - set(real)
        where_cut = {name for name in documented if name.endswith("_left_out")} | later & set(documented)
        assert {name: type(value) for name, value in real.items()} == {
            name: kind for name, kind in documented.items() if name not in where_cut
        }
    assert set(cut.report) - set(whole.report) == {"left_out"}


def test_the_example_is_the_described_frame():
    (block,) = re.findall(r"```\n(.*?)```", section("Example"), re.DOTALL)
    frame = bytes.fromhex("".join(re.match(r"((?:[0-9a-f]{2} ?)+)", line)[1] for line in block.splitlines()))
    message = decode(frame)
    assert isinstance(message, messages.Contribution)
    assert message.session == bytes(range(1, 9))
    assert message.key == RoundKey("digits", "world", 0, 7, "bn1", 0, FORWARD)
    assert (message.attempt, message.rows.counts) == (0, (18,))
    assert message.rows.values.tolist() == [[[9.0, -4.5], [12.25, 3.0]]]
    assert encode(message) == frame
    assert f"The frame has {len(frame)} bytes." in section("Example")
    assert f"a header of {int.from_bytes(frame[4:8], 'little')} bytes" in block
