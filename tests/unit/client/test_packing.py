"""A packed state is restored unchanged, and invalid received data raises only ProtocolError."""

import copy
import struct
import tracemalloc
from collections import Counter, OrderedDict
from contextlib import suppress

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from client.serialization import COUNTER, DICT, LIST, TENSOR, TUPLE, pack, unpack
from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from support.sentences import says

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(0, 99), inner),
)


@given(plain)
def test_plain_values_come_back(state):
    assert repr(unpack(pack(state))) == repr(state)


def test_a_schedule_with_milestones_continues():
    def rates(travelled):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = MultiStepLR(optimizer, [1, 1, 3])
        schedule.load_state_dict(travelled(schedule.state_dict()))
        for _ in range(6):
            optimizer.step()
            schedule.step()
            yield schedule.get_last_lr()

    assert list(rates(lambda state: unpack(pack(state)))) == list(rates(copy.deepcopy))


def test_values_similar_to_plain_ones_become_plain():
    state = OrderedDict(size=torch.Size([2, 3]), mean=np.float32(0.5), weight=nn.Parameter(torch.ones(1)))
    found = unpack(pack(state))
    assert (type(found), found["size"], found["mean"]) == (dict, (2, 3), 0.5)
    assert torch.equal(found["weight"], torch.ones(1))


def test_a_value_other_than_a_plain_one_is_named():
    with pytest.raises(TypeError, check=says("and lists, tuples and dicts of these, got torch")):
        pack({"model": [nn.Linear(1, 1)]})


def nested(depth: int, wrap) -> object:
    state: object = 1
    for _ in range(depth):
        state = wrap(state)
    return state


WRAPS = [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"a": inner}, lambda inner: Counter(a=inner)]


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_state_nests_32_deep_and_no_deeper(wrap):
    deepest = nested(limits.MAX_DEPTH, wrap)
    assert repr(unpack(pack(deepest))) == repr(deepest)
    with pytest.raises(ValueError, match="expected at most 32 levels of nesting"):
        pack(wrap(deepest))


def framed(*values: object) -> bytes:
    structure = b"".join(map(msgpack.packb, values))
    return struct.pack("<I", len(structure)) + structure


def items(code: int, number: int) -> msgpack.ExtType:
    return msgpack.ExtType(code, struct.pack("<I", number))


@pytest.mark.parametrize("code", [LIST, TUPLE, COUNTER, DICT])
@pytest.mark.parametrize("levels", [33, 200, 100_000])
def test_deeper_received_states_are_refused(code, levels):
    key = [1] if code in {COUNTER, DICT} else []
    with pytest.raises(ProtocolError, match="expected at most 32 levels of nesting"):
        unpack(framed(*[items(code, 1), *key] * levels, 1))


def test_extensions_within_extensions_do_not_crash_the_process():
    """A decoder that unpacks extensions recursively overflows the stack of the receiving process."""
    inner = msgpack.packb(1)
    for _ in range(10_000):
        inner = msgpack.packb(msgpack.ExtType(TUPLE, inner))
    with pytest.raises(ProtocolError, match="expected a number of 4 bytes"):
        unpack(struct.pack("<I", len(inner)) + inner)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\0\0\0", "expected at least 4 bytes, got 3"),
        (struct.pack("<I", 9) + b"1234", "expected 13 bytes, got 8"),
        (framed(), "expected packed bytes, got "),
        (framed(1, 2), "expected 1 bytes of structure, got 2"),
        (framed(1) + b"more", "expected nothing after the last array, got 4 bytes"),
        (framed([1]), "expected packed bytes, got 1 exceeds max_array_len"),
        (framed([]), r"expected plain values, got \[\]"),
        (framed({}), r"expected plain values, got {}"),
        (framed(msgpack.Timestamp(1)), "expected plain values, got Timestamp"),
        (framed(items(LIST, 2), 1), "expected packed bytes, got "),
        (framed(items(LIST, 2**32 - 1)), "expected packed bytes, got "),
        (framed(items(TUPLE, 2**32 - 1)), "expected packed bytes, got "),
        (framed(msgpack.ExtType(TUPLE, b"\1")), "expected a number of 4 bytes, got 1"),
        (framed(items(99, 0)), "expected one of the extensions 1 to 6, got 99"),
        (framed(items(DICT, 1), items(LIST, 0), 1), "expected keys of plain values and tuples, got list"),
        (framed(items(DICT, 1), items(TUPLE, 1), items(LIST, 0), 1), "unhashable type"),
    ],
)
def test_an_invalid_state_is_refused(data, what):
    with pytest.raises(ProtocolError, match=f"^state: .*{what}"):
        unpack(data)


@pytest.mark.parametrize(
    "announced",
    [
        items(LIST, 2**32 - 1),
        items(COUNTER, 2**32 - 1),
        b"\xdd\xff\xff\xff\xff" * 20_000,  # msgpack's own arrays, each of 2^32 - 1 items
        b"\xdf\xff\xff\xff\xff" * 20_000,
        b"\xdc\x7f\xff" * 33_000,
        [items(DICT, 0)] * 20_000,
        [items(COUNTER, 0)] * 20_000,
        [msgpack.ExtType(TENSOR, b"\1" + bytes(8))] * 20_000,
        [items(TUPLE, 2), *[None] * 3] * 20_000,
    ],
)
def test_unpacking_takes_memory_in_proportion_to_the_received_bytes(announced):
    if isinstance(announced, bytes):
        data = struct.pack("<I", len(announced)) + announced
    else:
        values = announced if isinstance(announced, list) else [announced]
        data = framed(items(LIST, len(values)), *values)
    tracemalloc.start()
    with suppress(ProtocolError):
        unpack(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * len(data) + 50_000


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_buffers_travel_as_bytes(kind):
    assert unpack(pack([kind(b"held")])) == [b"held"]


@given(st.data())
def test_a_changed_byte_raises_only_our_error(data):
    packed = bytearray(pack({"weights": (torch.ones(3), [1, "x"]), "milestones": Counter([2, 2])}))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        unpack(bytes(packed))
    except ProtocolError:
        return


@pytest.mark.parametrize("cut", [0, 3, 10, -1])
def test_a_truncated_state_is_refused(cut):
    with pytest.raises(ProtocolError, match=r"^(state|array 0): "):
        unpack(pack({"weights": torch.ones(3)})[:cut])
