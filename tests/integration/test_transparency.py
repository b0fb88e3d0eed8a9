"""N shards through the service equal `torch.nn.BatchNorm` on the whole batch."""

import numpy as np
import pytest
import torch

from programs import member_programs, transport_programs
from support import whole_batch
from support.transports import CHOSEN, HOST_TRANSPORTS, TRANSPORTS, WATCHED
from support.whole_batch import KINDS, Case, assert_equal_to_whole_batch, joined

EQUAL = {2: (3, 3), 3: (2, 2, 2), 4: (2, 2, 2, 2)}
UNEQUAL = {2: (5, 2), 3: (1, 4, 2), 4: (3, 1, 2, 5)}

CASES = [
    pytest.param(Case(kind, sizes[n], dtype), id=f"{kind}, {n} {split} shards, {dtype}")
    for kind in KINDS
    for split, sizes in (("equal", EQUAL), ("unequal", UNEQUAL))
    for n in (2, 3, 4)
    for dtype in ("float64", "float32")
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_processes_equal_the_whole_batch(over, n, transport):
    """All cases with `n` shards on one connection, since each connection or process group takes time to start."""
    cases = [case for (case,) in (parameters.values for parameters in CASES) if len(case.sizes) == n]
    results = over(transport, n, whole_batch.as_member_in_each, cases)
    for case, shards in zip(cases, zip(*results, strict=True), strict=True):
        assert_equal_to_whole_batch(joined(shards), case)


@pytest.mark.parametrize("case", CASES)
def test_virtual_replicas_equal_the_whole_batch(case):
    assert_equal_to_whole_batch(whole_batch.as_virtual_replicas(case), case)


@pytest.mark.parametrize(("ratio", "seed"), [(1_000.0, 1), (10_000.0, 2)])
def test_a_large_mean_costs_no_digits_of_the_variance(members, ratio, seed):
    """float32 input: the textbook formula in float32 errs by over 1 % at ratio 1,000, and fails at 10,000."""
    case = Case("2d", (20, 30), "float32", offset=ratio, scale=1.0, seed=seed)
    x = case.tensors()[0].double()
    exact = x.var((0, 2, 3), correction=1).numpy()
    before = case.tensors()[2]["running_var"].double().numpy()
    for found in (joined(members(2, whole_batch.as_member, case)), whole_batch.as_virtual_replicas(case)):
        variance = (found["running_var"].astype(np.float64) - 0.9 * before) / 0.1
        np.testing.assert_allclose(variance, exact, rtol=1e-4)
        whitened = (x - x.mean((0, 2, 3), keepdim=True)) / x.var((0, 2, 3), correction=0, keepdim=True).add(1e-5).sqrt()
        state = {name: value.double().view(1, -1, 1, 1) for name, value in case.tensors()[2].items() if value.dim()}
        np.testing.assert_allclose(
            found["output"], (whitened * state["weight"] + state["bias"]).numpy(), rtol=1e-4, atol=1e-4
        )
    textbook = _textbook_variance(case.tensors()[0])
    if ratio == 1_000.0:
        assert np.abs(textbook / exact - 1).max() > 0.01
    else:
        assert textbook.min() <= 0


def _textbook_variance(x: torch.Tensor) -> np.ndarray:
    """E[x²] - E[x]² as computed from sums in float32."""
    over = (0, 2, 3)
    n = x.numel() // x.shape[1]
    return ((x.square().sum(over) - x.sum(over).square() / n) / (n - 1)).double().numpy()


@pytest.mark.parametrize(
    ("transports", "train"),
    [
        pytest.param(HOST_TRANSPORTS, member_programs.train, id="over the host, the CPU's kernels"),
        pytest.param(
            TRANSPORTS, member_programs.train_by_reference, id="over the host and on devices, reference kernels"
        ),
    ],
)
def test_running_statistics_are_bit_identical_after_40_steps_in_all_transports(over, transports, train):
    buffers = [each for transport in transports for each in over(transport, 3, train, 40)]
    for name in buffers[0]:
        assert len({each[name].tobytes() for each in buffers}) == 1, name
    assert buffers[0]["bn.num_batches_tracked"] == 40


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_same_shards_give_the_same_bits_however_they_are_placed(members, ranks, dtype):
    case = Case("2d", (3, 1, 2, 5), dtype)
    one = whole_batch.as_virtual_replicas(case)
    split = whole_batch.as_member_with_virtual_replicas, case, [(3, 1), (2, 5)]
    for found in (
        members(4, whole_batch.as_member, case),
        members(2, *split, job="two-by-two"),
        ranks(4, whole_batch.as_member, case),
        ranks(2, *split),
    ):
        for name in ("output", "input gradient", "running_mean", "running_var"):
            assert joined(found)[name].tobytes() == one[name].tobytes(), name


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_members_with_different_numbers_of_replicas_equal_the_whole_batch(over, transport):
    case = Case("2d", (2, 1, 4, 3))
    sizes = [(2, 1, 4), (3,)]
    results = over(transport, 2, whole_batch.as_member_with_virtual_replicas, case, sizes)
    assert_equal_to_whole_batch(joined(results), case)


def test_a_world_of_one_is_exactly_torch(members):
    case = Case("2d", (7,), "float32")
    (found,) = members(1, whole_batch.as_member, case)
    for name, value in whole_batch.on_the_whole_batch(case).items():
        assert value.tobytes() == found[name].tobytes(), name


def test_eval_is_exactly_torch_without_the_others(members):
    for found, expected in members(2, member_programs.evaluate_on_one_member_only):
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_model_with_several_layers_trains_as_on_the_whole_batch(over, transport):
    results = over(transport, 3, member_programs.train_small_model, 10)
    expected = member_programs.train_small_model_on_whole_batch(3, 10)
    for result in results:
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


RANKS = len(transport_programs.SIZES)


@pytest.mark.parametrize(
    ("transports", "program"),
    [
        pytest.param(
            (*HOST_TRANSPORTS, WATCHED), transport_programs.every_kind_of_call, id="over the host, the fastest kernels"
        ),
        pytest.param(
            (*TRANSPORTS, CHOSEN),
            transport_programs.by_reference,
            id="over the host and on devices, reference kernels",
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_kind_of_call_gives_the_same_bits_over_all_transports(over, transports, program):
    first, *others = (over(transport, RANKS, program) for transport in transports)
    assert len(others) == len(transports) - 1 > 1
    for rank in range(RANKS):
        for name, values in first[rank].items():
            for transport, other in zip(transports[1:], others, strict=True):
                assert other[rank][name].tobytes() == values.tobytes(), (rank, name, transport)
