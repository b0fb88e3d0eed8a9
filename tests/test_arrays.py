"""What arrives is what was sent, to the bit; what is no array is refused."""

import struct
from contextlib import suppress

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from client.arrays import MAX_DIMENSIONS, NUMPY_DTYPES, TORCH_DTYPES, decode, encode
from statsd_bn import limits
from statsd_bn.errors import ProtocolError

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def ndarrays(draw) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(sorted(NUMPY_DTYPES)))).newbyteorder(draw(st.sampled_from("<>")))
    array = draw(hnp.arrays(dtype, SHAPES))
    return draw(st.sampled_from([array, array.T, np.asarray(np.flip(array))]))


@st.composite
def tensors(draw) -> torch.Tensor:
    dtype = TORCH_DTYPES[draw(st.sampled_from(sorted(TORCH_DTYPES)))]
    shape = draw(SHAPES)
    elements = draw(hnp.arrays("u1", (*shape, dtype.itemsize)))
    if dtype is torch.bool:
        elements %= 2
    # Of no bytes there is nothing that could be seen as another dtype.
    tensor = torch.from_numpy(elements).view(dtype)[..., 0] if elements.size else torch.empty(shape, dtype=dtype)
    return draw(st.sampled_from([tensor, tensor.mT if tensor.ndim > 1 else tensor]))


def bits(array: torch.Tensor | np.ndarray) -> bytes:
    if isinstance(array, np.ndarray):
        return array.astype(array.dtype.newbyteorder("<")).tobytes()
    return array.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def native(dtype: torch.dtype | np.dtype) -> torch.dtype | np.dtype:
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype


@given(st.lists(ndarrays() | tensors(), max_size=5))
def test_arrays_arrive_as_they_were_to_the_bit(arrays):
    arrived = decode(encode(arrays))
    assert [type(array) for array in arrived] == [type(array) for array in arrays]
    assert [tuple(array.shape) for array in arrived] == [tuple(array.shape) for array in arrays]
    assert [array.dtype for array in arrived] == [native(array.dtype) for array in arrays]
    assert [bits(array) for array in arrived] == [bits(array) for array in arrays]


def test_what_arrives_is_its_own_and_may_be_changed():
    sent = [torch.ones(2, requires_grad=True), np.ones(2)]
    tensor, array = decode(encode(sent))
    tensor.add_(1)
    array += 1
    assert not tensor.requires_grad
    assert sent[0].tolist() == sent[1].tolist() == [1, 1]


def test_an_empty_tensor_from_numpy_has_stride_0_and_travels():
    (arrived,) = decode(encode([torch.from_numpy(np.zeros(0, "i8"))]))
    assert (arrived.shape, arrived.dtype) == ((0,), torch.int64)


def test_a_lazy_conjugate_arrives_resolved():
    (arrived,) = decode(encode([torch.tensor([1 + 2j]).conj()]))
    assert arrived.tolist() == [1 - 2j]


@pytest.mark.parametrize(
    ("array", "what"),
    [
        ([1.0], "array 0: expected a tensor or a numpy array, got list"),
        (np.array(["a"]), "array 0: expected numbers or bool, got dtype <U1"),
        (np.array([None]), "array 0: expected numbers or bool, got dtype object"),
        (np.array(["2026-01-01"], "datetime64[D]"), r"array 0: expected numbers or bool, got dtype datetime64\[D\]"),
        (torch.eye(2).to_sparse(), "array 0: expected a dense tensor of numbers or bool, got torch.sparse_coo"),
    ],
)
def test_what_is_no_plain_array_is_not_sent(array, what):
    with pytest.raises(TypeError, match=what):
        encode([array])


def test_more_than_a_header_describes_is_not_sent():
    with pytest.raises(ValueError, match=r"expected at most 1048576 bytes .*, got \d+ for 60000 arrays"):
        encode([np.zeros(0)] * 60_000)
    with pytest.raises(ValueError, match="array 0: expected at most 32 dimensions, got 33"):
        encode([torch.zeros([1] * (MAX_DIMENSIONS + 1))])


def with_header(header: object, body: bytes = b"") -> bytes:
    packed = msgpack.packb(header)
    return struct.pack("<I", len(packed)) + packed + body


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\0\0\0", "expected at least 4 bytes, got 3"),
        (struct.pack("<I", 9) + b"1234", "header: 9 bytes announced, 4 came"),
        (struct.pack("<I", limits.MAX_HEADER_BYTES + 1) + bytes(limits.MAX_HEADER_BYTES + 1), "bytes announced"),
        (struct.pack("<I", 1) + b"\xc1", "header: expected msgpack"),
        (with_header(7), r"header: expected a list of \[kind, dtype, shape\], got 7"),
        (with_header([7]), "array 0: expected .*, got 7"),
        (with_header([["matrix", "int8", []]]), r"array 0: expected \['tensor' or 'ndarray', .*'matrix'"),
        (with_header([["tensor", "int8", [], 0]]), "array 0: expected"),
        (with_header([["ndarray", "bfloat16", []]]), "array 0: expected a dtype of .* got 'bfloat16'"),
        (with_header([["tensor", "object", []]]), "array 0: expected a dtype of .* got 'object'"),
        (with_header([["tensor", "int8", [-1]]]), r"expected a shape of .* integers from 0 on, got \[-1\]"),
        (with_header([["tensor", "int8", [True]]]), r"integers from 0 on, got \[True\]"),
        (with_header([["tensor", "int8", [1.0]]]), r"integers from 0 on, got \[1.0\]"),
        (with_header([["tensor", "int8", [1] * 33]]), "expected a shape of at most 32"),
        (with_header([["tensor", "int16", [0, 2**62]]]), "expected a shape within 9223372036854775807 bytes"),
        (with_header([["tensor", "int16", [3]]], bytes(5)), r"expected 6 bytes for \[3\] of int16, got 5"),
        (with_header([["ndarray", "int16", [3]]], bytes(7)), "expected no more after the last array, got 1 bytes"),
        (with_header([["tensor", "bool", [2]]], b"\1\2"), "expected bytes 0 and 1 for bool, got 2"),
    ],
)
def test_what_is_no_message_of_arrays_is_refused(data, what):
    with pytest.raises(ProtocolError, match=what):
        decode(data)


@given(st.lists(ndarrays() | tensors(), max_size=3), st.data())
def test_a_changed_byte_gives_arrays_or_an_error(arrays, data):
    changed = bytearray(encode(arrays))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        decode(bytes(changed))


def test_a_tensors_storage_can_be_resized_afterwards():
    """As FSDP does with parameters."""
    tensor = torch.ones(3, 2)
    encode([tensor])
    assert tensor.untyped_storage().resizable()
