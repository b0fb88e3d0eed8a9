"""A packed state comes back as it was, and nothing that came can do more than be refused."""

import copy
from collections import Counter, OrderedDict

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from client import arrays
from client.packing import COUNTER, pack, unpack
from statsd_bn.errors import ProtocolError

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(0, 99), inner),
)


@given(plain)
def test_plain_values_come_back(state):
    assert repr(unpack(pack(state))) == repr(state)


def test_tensors_come_back_bit_for_bit_wherever_they_are():
    weights = torch.tensor([1.5, -0.0, torch.nan], dtype=torch.bfloat16)
    state = {"weights": (weights, [np.arange(6).reshape(2, 3)]), 7: torch.zeros(0, 2), "step": torch.tensor(3)}
    found = unpack(pack(state))
    assert found["weights"][0].dtype == torch.bfloat16
    assert torch.equal(found["weights"][0].view(torch.int16), weights.view(torch.int16))
    assert np.array_equal(found["weights"][1][0], np.arange(6).reshape(2, 3))
    assert found[7].shape == (0, 2)
    assert found["step"].item() == 3


def test_an_optimizers_state_comes_back():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.3, 0.4))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = unpack(pack(optimizer.state_dict()))
    assert found["param_groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(found["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_a_counter_comes_back_as_one():
    found = unpack(pack({"milestones": Counter([2, 2, 4])}))
    assert repr(found) == "{'milestones': Counter({2: 2, 4: 1})}"


def test_a_schedule_with_milestones_goes_on():
    """`MultiStepLR` keeps them in a counter."""

    def rates(travelled):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = MultiStepLR(optimizer, [1, 1, 3])
        schedule.load_state_dict(travelled(schedule.state_dict()))
        for _ in range(6):
            optimizer.step()
            schedule.step()
            yield schedule.get_last_lr()

    assert list(rates(lambda state: unpack(pack(state)))) == list(rates(copy.deepcopy))


@pytest.mark.parametrize("inside", [None, 1, "text", [], [[1, 2]]])
def test_a_counter_of_something_else_is_refused(inside):
    structure = msgpack.packb(msgpack.ExtType(COUNTER, msgpack.packb(inside)))
    with pytest.raises(ProtocolError, match=r"^state: expected the counts of a counter, got "):
        unpack(len(structure).to_bytes(4, "little") + structure + arrays.encode([]))


def test_types_made_of_the_plain_ones_become_plain():
    state = OrderedDict(size=torch.Size([2, 3]), mean=np.float32(0.5), weight=nn.Parameter(torch.ones(1)))
    found = unpack(pack(state))
    assert (type(found), found["size"], found["mean"]) == (dict, (2, 3), 0.5)
    assert torch.equal(found["weight"], torch.ones(1))


def test_what_is_not_plain_is_named():
    with pytest.raises(TypeError, match="and lists, tuples and dicts of these, got torch"):
        pack({"model": [nn.Linear(1, 1)]})


@given(st.binary(max_size=64))
def test_garbage_is_refused(data):
    with pytest.raises(ProtocolError):
        unpack(b"garbage " + data)


@given(st.data())
def test_a_changed_byte_raises_nothing_else(data):
    packed = bytearray(pack({"weights": (torch.ones(3), [1, "x"]), "milestones": Counter([2, 2])}))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        unpack(bytes(packed))
    except ProtocolError:
        return


@pytest.mark.parametrize("cut", [0, 3, 10, -1])
def test_a_cut_one_is_refused(cut):
    with pytest.raises(ProtocolError, match=r"^(state|array 0): "):
        unpack(pack({"weights": torch.ones(3)})[:cut])
