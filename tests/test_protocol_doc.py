"""docs/protocol.md is the authority on the wire; the code is held against it."""

import dataclasses
import re
from pathlib import Path

import msgpack
import numpy as np
import pytest

from server.rounds import TRANSITIONS
from statsd_bn import PROTOCOL_VERSION, errors, limits
from statsd_bn.messages import BY_TYPE, FORWARD, Aggregate, Contribution, RoundKey, Rows
from statsd_bn.wire import decode, encode

DOCUMENT = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text()

# Errors that one side raises by itself; they never travel.
LOCAL = {"error", "configuration", "bind", "connection_closed", "unreachable", "group_incomplete"}


def section(title: str) -> str:
    """The text under a heading, up to the next heading."""
    found = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert found, f"no section {title!r}"
    return found[1]


def table(text: str) -> list[list[str]]:
    """The rows of the section's table, without its head."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def documented_fields(title: str) -> list[str]:
    """Field names in wire order, with the round key spread out."""
    names = []
    for number, name, *_ in table(section(title)):
        spread = [row[1] for row in table(section("Round key"))] if name == "round key" else [name]
        first = int(number.split("-")[0])
        assert first == len(names) + 1, f"{title}: field {name} is numbered {number}"
        names += spread
    return names


def test_the_version_is_the_codes():
    assert f"\nProtocol version: {PROTOCOL_VERSION}\n" in DOCUMENT


def test_the_round_key_has_its_fields_in_order():
    assert documented_fields("Round key") == [field.name for field in dataclasses.fields(RoundKey)]


@pytest.mark.parametrize("message", BY_TYPE.values(), ids=lambda message: message.__name__)
def test_every_message_has_its_number_and_its_fields_in_order(message):
    documented = documented_fields(f"{message.type}. {message.__name__}")
    key = [field.name for field in dataclasses.fields(RoundKey)]
    expected = {
        "Contribution": ["session", *key, "attempt", "counts", "vectors", "channels"],
        "Aggregate": [*key, "replicas", "count", "vectors", "channels"],
    }.get(message.__name__, [field.name for field in dataclasses.fields(message)])
    assert documented == expected


@pytest.mark.parametrize(
    "message",
    [
        Contribution(b"session0", RoundKey("j", "g", 0, 0, "l", 0, FORWARD), 0, Rows((1,), np.ones((1, 2, 3)))),
        Aggregate(RoundKey("j", "g", 0, 0, "l", 0, FORWARD), 1, 1, np.ones((2, 3))),
    ],
    ids=lambda message: type(message).__name__,
)
def test_frames_with_values_have_as_many_fields_as_documented(message):
    frame = encode(message)
    header = msgpack.unpackb(frame[8 : 8 + int.from_bytes(frame[4:8], "little")])
    assert len(header) - 1 == len(documented_fields(f"{message.type}. {type(message).__name__}"))


def test_no_message_is_documented_that_does_not_exist():
    numbers = [int(number) for number in re.findall(r"^### (\d+)\. ", DOCUMENT, re.MULTILINE)]
    assert numbers == list(BY_TYPE)


def test_every_limit_has_its_value():
    documented = {name: float(value) for name, value, _ in table(section("Limits"))}
    assert documented == {name: value for name, value in vars(limits).items() if name.isupper()}


def test_every_error_that_can_travel_is_documented():
    assert {row[0] for row in table(section("Errors"))} == set(errors.BY_CODE) - LOCAL


def test_the_life_of_a_round_is_the_codes_table():
    documented = {tuple(row) for row in table(section("The life of a round"))}
    assert documented == {(state.value, event.value, after.value) for (state, event), after in TRANSITIONS.items()}


def test_the_example_is_the_frame_it_says():
    (block,) = re.findall(r"```\n(.*?)```", section("Example"), re.DOTALL)
    frame = bytes.fromhex("".join(re.match(r"((?:[0-9a-f]{2} ?)+)", line)[1] for line in block.splitlines()))
    message = decode(frame)
    assert isinstance(message, Contribution)
    assert message.session == bytes(range(1, 9))
    assert message.key == RoundKey("digits", "world", 0, 7, "bn1", 0, FORWARD)
    assert (message.attempt, message.rows.counts) == (0, (18,))
    assert message.rows.values.tolist() == [[[9.0, -4.5], [12.25, 3.0]]]
    assert encode(message) == frame
