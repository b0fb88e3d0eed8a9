"""Arrays arrive bit for bit; unsupported and malformed ones are refused."""

import struct
from contextlib import suppress

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from client.serialization import (
    DTYPES,
    LIST,
    MAX_ARRAYS,
    MAX_DIMENSIONS,
    NDARRAY,
    NUMPY_DTYPES,
    TENSOR,
    TORCH_DTYPES,
    pack,
    unpack,
)
from statsd_bn.errors import ProtocolError
from support.sentences import says

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
    # An empty array has no bytes to reinterpret as another dtype.
    tensor = torch.from_numpy(elements).view(dtype)[..., 0] if elements.size else torch.empty(shape, dtype=dtype)
    return draw(st.sampled_from([tensor, tensor.mT if tensor.ndim > 1 else tensor]))


def bits(array: torch.Tensor | np.ndarray) -> bytes:
    if isinstance(array, np.ndarray):
        return array.astype(array.dtype.newbyteorder("<")).tobytes()
    return array.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def native(dtype: torch.dtype | np.dtype) -> torch.dtype | np.dtype:
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype


@given(st.lists(ndarrays() | tensors(), max_size=5))
def test_arrays_arrive_bit_for_bit(arrays):
    arrived = unpack(pack(arrays))
    assert [type(array) for array in arrived] == [type(array) for array in arrays]
    assert [tuple(array.shape) for array in arrived] == [tuple(array.shape) for array in arrays]
    assert [array.dtype for array in arrived] == [native(array.dtype) for array in arrays]
    assert [bits(array) for array in arrived] == [bits(array) for array in arrays]


def test_received_arrays_are_writable_copies():
    sent = [torch.ones(2, requires_grad=True), np.ones(2)]
    tensor, array = unpack(pack(sent))
    tensor.add_(1)
    array += 1
    assert not tensor.requires_grad
    assert sent[0].tolist() == sent[1].tolist() == [1, 1]


def test_an_empty_tensor_from_numpy_has_stride_0_and_travels():
    (arrived,) = unpack(pack([torch.from_numpy(np.zeros(0, "i8"))]))
    assert (arrived.shape, arrived.dtype) == ((0,), torch.int64)


def test_a_lazy_conjugate_arrives_resolved():
    (arrived,) = unpack(pack([torch.tensor([1 + 2j]).conj()]))
    assert arrived.tolist() == [1 - 2j]


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.array(["a"]), "array 0: expected numbers or bool, got dtype <U1"),
        (np.array([None]), "array 0: expected numbers or bool, got dtype object"),
        (np.array(["2026-01-01"], "datetime64[D]"), r"array 0: expected numbers or bool, got dtype datetime64\[D\]"),
        (torch.eye(2).to_sparse(), "array 0: expected a dense tensor of numbers or bool, got torch.sparse_coo"),
    ],
)
def test_an_array_of_an_unsupported_type_is_not_sent(array, what):
    with pytest.raises(TypeError, check=says(what)):
        pack([array])


def test_too_many_arrays_or_dimensions_are_not_sent():
    with pytest.raises(ValueError, match="expected at most 65536 arrays, got more"):
        pack([np.zeros(0)] * (MAX_ARRAYS + 1))
    with pytest.raises(ValueError, match="array 0: expected at most 32 dimensions, got 33"):
        pack([torch.zeros([1] * (MAX_DIMENSIONS + 1))])


def described(kind: int, dtype: str | int, *shape: int) -> bytes:
    number = DTYPES.index(dtype) if isinstance(dtype, str) else dtype
    return msgpack.packb(msgpack.ExtType(kind, struct.pack(f"<B{len(shape)}Q", number, *shape)))


def framed(structure: bytes, elements: bytes = b"") -> bytes:
    return struct.pack("<I", len(structure)) + structure + elements


def a_list_of(number: int, item: bytes) -> bytes:
    return framed(msgpack.packb(msgpack.ExtType(LIST, struct.pack("<I", number))) + item * number)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (framed(msgpack.packb(msgpack.ExtType(TENSOR, b""))), "array 0: expected a dtype and a shape .*, got 0 bytes"),
        (framed(msgpack.packb(msgpack.ExtType(TENSOR, bytes(8)))), "expected a dtype and a shape .*, got 8 bytes"),
        (framed(described(TENSOR, "int8", *[1] * 33)), "a shape of at most 32 dimensions, got 265 bytes"),
        (framed(described(NDARRAY, "bfloat16")), "array 0: expected a dtype of .* got 'bfloat16'"),
        (framed(described(TENSOR, 255)), "array 0: expected a dtype of .* got '255'"),
        (framed(described(TENSOR, "int16", 0, 2**62)), "expected a shape within 9223372036854775807 bytes"),
        (framed(described(NDARRAY, "int16", 0, 2**62)), "expected a shape within 9223372036854775807 bytes"),
        (framed(described(TENSOR, "int16", 3), bytes(5)), r"expected 6 bytes for \[3\] of int16, got 5"),
        (framed(described(TENSOR, "int8", 2**40), b"1"), r"expected 1099511627776 bytes for"),
        (framed(described(NDARRAY, "int16", 3), bytes(7)), "expected nothing after the last array, got 1 bytes"),
        (framed(described(TENSOR, "bool", 2), b"\1\2"), "expected bytes 0 and 1 for bool, got 2"),
        (a_list_of(MAX_ARRAYS + 1, described(TENSOR, "int8", 0)), "expected at most 65536 arrays, got more"),
    ],
)
def test_malformed_array_data_is_refused(data, what):
    with pytest.raises(ProtocolError, check=says(what)):
        unpack(data)


@given(st.lists(ndarrays() | tensors(), max_size=3), st.data())
def test_a_changed_byte_gives_arrays_or_an_error(arrays, data):
    changed = bytearray(pack(arrays))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        unpack(bytes(changed))


def test_the_storage_of_a_packed_tensor_stays_resizable():
    tensor = torch.ones(3, 2)
    pack([tensor])
    assert tensor.untyped_storage().resizable()
