"""mp_sync gives every member the values of all; mismatches raise on all members, and their next rounds succeed."""

import functools
import struct
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import client
from client import DDPHandler
from client.serialization import pack
from client.training.ddp_handler import ROUND_NAME, all_gather_tensors, as_tensor, concatenate, from_tensor
from statsd_bn import limits
from statsd_bn.errors import ConnectionClosed, ProtocolError, RoundFailed, RoundMismatch
from statsd_bn.reduction import Rows
from statsd_bn.text import unwrap
from support.memory_members import MemoryMaster, in_threads, outcome, run_members
from support.sentences import says

LOOP = SimpleNamespace(train_loader=None, validation_loader=None, test_loader=None)


# Extensions nested 400 deep: a recursive decoder would overflow the stacks of all other members.
NESTED = functools.reduce(lambda inner, _: msgpack.packb(msgpack.ExtType(2, inner)), range(400), msgpack.packb(1))


def handler(connection: client.Connection) -> DDPHandler:
    return DDPHandler(LOOP, connection=connection)


def synced(values: list[Any], **options: Any) -> list[Any]:
    return run_members(len(values), lambda connection: handler(connection).mp_sync(values[connection.rank], **options))


def assert_all_get(results: list[Any], expected: torch.Tensor) -> None:
    for result in results:
        assert result.dtype is expected.dtype
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_all_members_are_present_again_between_two_passes():
    def measure(connection: client.Connection) -> Any:
        mine = connection.rank
        loop = SimpleNamespace(train_loader=DataLoader(range(6)), validation_loader=None, test_loader=None)
        connection.rejoin(None)
        for _ in range(1 + mine):
            client.SlavePipe(connection, "bn").run_slave(Rows((1,), np.ones((1, 2, 1))))
        connection.pause(None)
        DDPHandler(loop, connection=connection).add_distributed_samplers()
        sums = handler(connection).mp_sync(mine).tolist()
        connection.rejoin(None)
        aggregate = client.SlavePipe(connection, "bn").run_slave(Rows((1,), np.ones((1, 2, 1))))
        return list(loop.train_loader.sampler), sums, list(aggregate.members)

    assert run_members(2, measure) == [([0, 2, 4], [0, 1], [0, 1]), ([1, 3, 5], [0, 1], [0, 1])]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, 1.5, 2.5], torch.tensor([0.5, 1.5, 2.5])),
        ([7, 8], torch.tensor([7, 8])),
        ([True, False], torch.tensor([True, False])),
        ([np.float32(1), np.float32(2)], torch.tensor([1.0, 2.0])),
        ([[1, 2], [3]], torch.tensor([1, 2, 3])),
        ([(1, 2), [3]], torch.tensor([1, 2, 3])),
        ([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])),
        ([[torch.tensor(1.0, requires_grad=True), 2.0], [3.0]], torch.tensor([1.0, 2.0, 3.0])),
        ([[np.ones(2)], [np.zeros(2)]], torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)),
        ([np.arange(4)[::-2], np.arange(1)], torch.tensor([3, 1, 0])),
        ([np.array(2.0, ">f4"), np.array(3.0, "<f4")], torch.tensor([2.0, 3.0])),
        ([torch.tensor(1.0), torch.tensor(2.0)], torch.tensor([1.0, 2.0])),
        ([torch.ones(1, 3), torch.zeros(0, 3), torch.zeros(2, 3)], torch.eye(3)[:, :1].expand(3, 3)),
        ([torch.ones(2, requires_grad=True), torch.ones(1)], torch.ones(3)),
        ([torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([-0.0], dtype=torch.bfloat16)],
         torch.tensor([1.5, -0.0], dtype=torch.bfloat16)),
        ([torch.tensor([2**62 + 1]), torch.tensor([-(2**62) - 1])], torch.tensor([2**62 + 1, -(2**62) - 1])),
        ([torch.tensor([True]), torch.tensor([False, True])], torch.tensor([True, False, True])),
        ([torch.tensor([float("nan")]), torch.tensor([float("inf")])], torch.tensor([float("nan"), float("inf")])),
        ([[], [1, 2]], torch.tensor([1, 2])),
        ([torch.empty(0), torch.ones(2, 3)], torch.ones(2, 3)),
        ([[], []], torch.tensor([])),
    ],
)  # fmt: skip
def test_values_of_all_members_are_joined_in_rank_order(values, expected):
    assert_all_get(synced(values), expected)


@pytest.mark.parametrize(
    "values", [[1, 2], [0.1, 0.2], [True, False], [[1], [2, 3]], [np.ones(1, "f4"), np.ones(2, "f4")]]
)
def test_double_precision_makes_float64_of_all_but_tensors(values):
    expected = np.concatenate([np.atleast_1d(np.asarray(value, np.float64)) for value in values])
    assert_all_get(synced(values, double_precision=True), torch.from_numpy(expected))
    tensors = [torch.ones(1), torch.ones(2)]
    assert_all_get(synced(tensors, double_precision=True), torch.ones(3))


def test_without_concatenation_the_result_is_a_list_of_each_members_value():
    results = synced([1, [2, 3]], concat_mp_data=False)
    assert [[part.tolist() for part in parts] for parts in results] == [[[1], [2, 3]]] * 2
    different = [torch.ones(1), torch.ones(2, 2, dtype=torch.int8)]
    for parts in synced(different, concat_mp_data=False):
        assert [part.dtype for part in parts] == [torch.float32, torch.int8]
        assert [part.shape for part in parts] == [(1,), (2, 2)]


def test_without_return_tensor_an_array_gives_an_array_and_another_value_a_list():
    array, *lists = synced([np.ones(2, "f4"), [1.0], torch.ones(1)], return_tensor=False)
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.float32
    assert array.tolist() == [1.0] * 4
    assert lists == [[1.0] * 4] * 2
    arrays, parts = synced([np.ones(1, "i8"), 2], concat_mp_data=False, return_tensor=False)
    assert [type(part) for part in arrays] == [np.ndarray] * 2
    assert parts == [[1], [2]]


def test_a_tensor_returns_to_its_device():
    on_meta = torch.empty(1, device="meta")
    assert from_tensor(torch.ones(2), on_meta, return_tensor=True).device.type == "meta"
    assert from_tensor(torch.ones(2), [1.0], return_tensor=True).device.type == "cpu"
    assert from_tensor(torch.ones(2), on_meta, return_tensor=False) == [1.0, 1.0]


def test_a_result_is_a_separate_copy():
    def change(connection):
        given = torch.zeros(2)
        handler(connection).mp_sync(given).add_(1)
        return given.tolist()

    assert run_members(2, change) == [[0, 0]] * 2


def test_a_dict_of_values_takes_one_round():
    def sync(connection):
        mine = connection.rank
        keys = ["loss", "labels", 3] if mine else [3, "labels", "loss"]
        values = {"loss": mine + 0.5, "labels": [mine] * (mine + 1), 3: np.ones((1, 2))}
        results = handler(connection).mp_sync_dict({key: values[key] for key in keys})
        return list(results) == keys, {key: value.tolist() for key, value in results.items()}, connection.rounds

    expected = {"loss": [0.5, 1.5], "labels": [0, 1, 1], 3: [[1, 1], [1, 1]]}
    assert run_members(2, sync) == [(True, expected, 1)] * 2


def test_an_empty_dict_gives_an_empty_dict():
    assert run_members(2, lambda connection: handler(connection).mp_sync_dict({})) == [{}, {}]


def after(connection: client.Connection, sync: Any) -> tuple[Any, list[int], int]:
    return outcome(sync), handler(connection).mp_sync(connection.rank).tolist(), connection.rounds


@pytest.mark.parametrize(
    ("bad", "kind", "what"),
    [
        ("text", TypeError, "expected a tensor, an array, a number, or a list of these, got str"),
        (None, TypeError, "got NoneType"),
        ({"loss": 1.0}, TypeError, "got dict"),
        ([1.0, "text"], TypeError, "expected a list of numbers, arrays, tensors or such lists, got str in it"),
        ([[None]], TypeError, "got NoneType in it"),
        (np.array(["text"]), TypeError, "expected an array of numbers or bool, got dtype <U4"),
        (torch.eye(2).to_sparse(), TypeError, "expected a dense tensor, got one with layout torch.sparse_coo"),
        ([[1], [1, 2]], ValueError, "expected sequence of length 1"),
        ([np.ones(1), np.ones(2)], ValueError, r"elements of one shape, got \[\(1,\), \(2,\)\]"),
        (2**64, ValueError, "expected numbers that fit into int64, got 18446744073709551616"),
        ([1, -(2**63) - 1], ValueError, r"fit into int64, got \[1, -9223372036854775809\]"),
        (torch.ones(1, device="meta"), NotImplementedError, "meta"),
    ],
)
def test_an_invalid_value_on_one_member_is_an_error_on_all(bad, kind, what):
    def sync(connection):
        value = bad if connection.rank == 1 else 1.0
        return after(connection, lambda: handler(connection).mp_sync(value))

    (first, *_), (second, *_), (third, *_) = results = run_members(3, sync)
    with pytest.raises(kind, match=what):
        raise second
    assert type(first) is type(third) is RoundFailed
    assert str(first) == str(third)
    assert f"expected values from all ranks, got none from 1; rank 1: {kind.__name__}: " in first.message
    assert first.fields["member"] == 1
    assert [ranks_and_rounds for _, *ranks_and_rounds in results] == [[[0, 1, 2], 2]] * 3


def test_a_number_that_is_too_large_for_double_precision_is_refused():
    with pytest.raises(ValueError, match=r"expected numbers that fit into float64, got 10{17}\.\.\.0{19}$"):
        as_tensor(10**400, double_precision=True)


def test_a_cause_that_is_too_long_and_not_utf_8_is_reported_all_the_same():
    def sync(connection):
        return outcome(lambda: all_gather_tensors(connection, lambda: fail() if connection.rank else {}))

    def fail():
        raise OSError("\udc80" * 100_000)

    first, second = run_members(2, sync)
    assert type(first) is RoundFailed
    assert r"OSError: \udc80\udc80" in first.message
    assert len(first.fields["cause"]) == limits.MAX_TEXT_BYTES
    assert type(second) is OSError


@pytest.mark.parametrize("values", [["a", None], ["a", "a"]])
def test_with_invalid_values_on_all_members_each_raises_its_own_error(values):
    def sync(connection):
        return after(connection, lambda: handler(connection).mp_sync(values[connection.rank]))

    for error, *ranks_and_rounds in run_members(2, sync):
        assert type(error) is TypeError
        assert ranks_and_rounds == [[0, 1], 2]


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ([1, 0.5, 2], r"got int64 of shape \(\*\) from ranks 0, 2; float32 of shape \(\*\) from rank 1"),
        ([np.ones(1), [1.0]], r"got float64 of shape \(\*\) from rank 0; float32 of shape \(\*\) from rank 1"),
        ([torch.ones(1, 2), torch.ones(1, 3)], r"\(\*, 2\) from rank 0; float32 of shape \(\*, 3\) from rank 1"),
        ([torch.ones(2), torch.ones(1, 2)], r"\(\*\) from rank 0; float32 of shape \(\*, 2\) from rank 1"),
    ],
)
def test_values_that_cannot_be_joined_are_named_on_every_member(values, what):
    def sync(connection):
        return after(connection, lambda: handler(connection).mp_sync(values[connection.rank]))

    results = run_members(len(values), sync)
    for error, *ranks_and_rounds in results:
        with pytest.raises(RoundMismatch, check=says(rf"mp_sync\(\): expected one dtype, and one shape .* {what}")):
            raise error
        assert ranks_and_rounds == [list(range(len(values))), 2]


def test_different_keys_are_named_on_every_member():
    dicts = [{"loss": 1.0, "f1": 1.0}, {"loss": 1.0, 7: 1.0}, {"loss": 1.0, "f1": 1.0}]

    def sync(connection):
        return after(connection, lambda: handler(connection).mp_sync_dict(dicts[connection.rank]))

    for error, *ranks_and_rounds in run_members(3, sync):
        with pytest.raises(RoundMismatch, check=says(r"ranks 0-2, got 'f1' only from 0, 2; 7 only from 1(\n|$)")):
            raise error
        assert ranks_and_rounds == [[0, 1, 2], 2]


def test_a_value_of_a_dict_that_cannot_be_joined_is_named():
    def sync(connection):
        value = 1 if connection.rank else 1.0
        return outcome(lambda: handler(connection).mp_sync_dict({"loss": 1.0, "f1": value}))

    for error in run_members(2, sync):
        assert str(error).startswith("mp_sync(), 'f1': expected one dtype")


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ([1.0], "expected a dict, got list"),
        ({None: 1.0}, "expected keys of type str or int, got None"),
        ({"loss": "low"}, "'loss': expected a tensor, an array, a number, or a list of these, got str"),
    ],
)
def test_an_invalid_dict_on_one_member_is_an_error_on_all(bad, what):
    def sync(connection):
        given = {"loss": 1.0} if connection.rank else bad
        return after(connection, lambda: handler(connection).mp_sync_dict(given))

    (first, *_), (second, *_) = results = run_members(2, sync)
    assert type(first) is TypeError
    assert str(first) == what
    assert type(second) is RoundFailed
    assert what in str(second)
    assert [ranks_and_rounds for _, *ranks_and_rounds in results] == [[[0, 1], 2]] * 2


def test_a_dict_on_one_member_and_a_value_on_another_is_an_error():
    def sync(connection):
        mine = handler(connection)
        return after(connection, lambda: mine.mp_sync_dict({"loss": 1}) if connection.rank else mine.mp_sync(1))

    for error, *ranks_and_rounds in run_members(2, sync):
        assert "got 'data' only from 0; 'loss' only from 1" in error.message
        assert ranks_and_rounds == [[0, 1], 2]


def test_a_given_connection_that_is_closed_is_an_error():
    connection = MemoryMaster().connect(0, 1)
    connection.close()
    with pytest.raises(ConnectionClosed):
        handler(connection).mp_sync(1)


def test_an_elastic_job_joins_the_values_of_present_members():
    master = MemoryMaster()
    connections = in_threads([lambda n=n: master.connect(n, 3, min_members=1) for n in range(3)])
    connections.pop(0).close(cause="OutOfMemoryError: full")
    results = in_threads([lambda one=one: handler(one).mp_sync(one.rank).tolist() for one in connections])
    assert results == [[1, 2]] * 2


@pytest.mark.parametrize(
    ("foreign", "what"),
    [
        (b"", "state: expected at least 4 bytes, got 0"),
        (pack({}), r"expected tensors by name and a text, got \{\}"),
        (pack([{}]), r"expected tensors by name and a text, got \[\{\}\]"),
        (pack([{}, None]), r"expected tensors by name and a text, got \[\{\}, None\]"),
        (pack([{"a": np.ones(1)}, ""]), "expected tensors by name and a text, got"),
        (pack([{b"a": torch.ones(1)}, ""]), "expected tensors by name and a text, got"),
        (pack([{"a": torch.tensor(1.0)}, ""]), "expected tensors by name and a text, got"),
        (struct.pack("<I", len(NESTED)) + NESTED, "state: expected a number of 4 bytes, got "),
    ],
)
def test_an_invalid_message_of_values_is_refused_by_all(foreign, what):
    def sync(connection):
        if connection.rank == 1:
            connection.all_gather(ROUND_NAME, foreign)
            return None
        return outcome(lambda: handler(connection).mp_sync(1))

    for error in run_members(3, sync)[::2]:
        with pytest.raises(ProtocolError, check=says(rf"mp_sync\(\): the values of rank 1: .*{what}")):
            raise error


@pytest.mark.parametrize(
    ("foreign", "what"),
    [
        (pack([{}, "OSError: \x1b[2J\r" + "x" * 10**6]), r"none from 1; rank 1: OSError: \x1b[2J\rxxx"),
        (pack([{"\x1b]0;x\x07": torch.ones(1)}, ""]), r"got 'value' only from 0, 2; '\x1b]0;x\x07' only from 1"),
        (pack([{number: torch.ones(1) for number in range(10**4)}, ""]), "only from 1 and 9993 keys more"),
    ],
)
def test_text_of_a_member_is_short_and_printable_in_the_others_error(foreign, what):
    def sync(connection):
        if connection.rank == 1:
            connection.all_gather(ROUND_NAME, foreign)
            return None
        return outcome(lambda: handler(connection).mp_sync_dict({"value": 1}))

    for error in run_members(3, sync)[::2]:
        assert isinstance(error, RoundFailed)
        assert what in error.message
        assert unwrap(str(error)).isprintable()
        assert len(str(error)) < limits.MAX_TEXT_BYTES + 200


def test_many_members_in_an_error_are_shortened():
    tensors = {member: torch.ones(1, 1 + (member == 500)) for member in range(1000)}
    with pytest.raises(RoundMismatch, match=r"from ranks 0-499, 501-999; float32 of shape \(\*, 2\) from rank 500"):
        concatenate("it", tensors)
