"""average_gradients gives every member the gradient of the mean loss over all samples."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import client
from client.session.connection import Connection
from client.training.gradients import average_gradients
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError, RoundMismatch
from support.elastic_threads import own_connections, run_as_current, use
from support.memory_members import MemoryMaster, in_threads, outcome
from support.sentences import says

INPUTS = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# Unequal shares, and one member without a sample.
SHARES = (slice(0, 5), slice(5, 5), slice(5, 7))


with torch.random.fork_rng():
    torch.manual_seed(1)
    MODEL = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def model() -> nn.Sequential:
    """A model with the same weights each time, copied because threads share one random generator."""
    return copy.deepcopy(MODEL)


def gradients(network: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in network.parameters()]


def averaged(connection: Connection) -> tuple[int, list[torch.Tensor]]:
    network, mine = client.convert_model(model()), INPUTS[SHARES[connection.rank]]
    network(mine).square().sum().backward()
    return average_gradients(network, len(mine)), gradients(network)


def test_unequal_shares_give_the_gradient_of_the_whole_batch():
    whole = model()
    whole(INPUTS).square().mean().backward()
    results = run_as_current(3, averaged)
    assert abs(gradients(whole)[0]).max() > 1e-2
    for total, found in results:
        assert total == 7
        for one, expected, first in zip(found, gradients(whole), results[0][1], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-14)
            assert torch.equal(one, first)


def test_more_elements_than_a_round_takes_go_in_several_rounds():
    size = 2 * limits.MAX_CHANNELS + 3

    def average(connection: Connection) -> Any:
        weight = nn.Parameter(torch.zeros(size))
        weight.grad = torch.arange(size, dtype=torch.float32) * (connection.rank + 1)
        average_gradients([weight])
        return weight.grad, connection.rounds

    for gradient, rounds in run_as_current(2, average):
        assert torch.equal(gradient, torch.arange(size, dtype=torch.float32) * 1.5)
        assert rounds == 3


def test_samples_outside_the_loss_participate_in_the_layers_backward_pass():
    whole = model()
    whole(INPUTS)[:5].square().sum().div(5).backward()

    def average(connection: Connection) -> Any:
        network, is_in_loss = client.convert_model(model()), connection.rank == 0
        outputs = network(INPUTS[slice(5) if is_in_loss else slice(5, 7)]).square().sum()
        (outputs * is_in_loss).backward()
        return average_gradients(network, 5 * is_in_loss), gradients(network)

    results = run_as_current(2, average)
    for total, found in results:
        assert total == 5
        for one, expected in zip(found, gradients(whole), strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-14)


def test_without_any_sample_gradients_stay_unchanged():
    def average(_: Connection) -> Any:
        weight = nn.Parameter(torch.zeros(2))
        return average_gradients([weight], 0), weight.grad

    assert run_as_current(2, average) == [(0, None)] * 2


def test_an_unused_parameter_is_not_moved():
    """Its gradient stays None, as in one process: a gradient of 0 would let weight decay change the parameter."""

    def average(connection: Connection) -> Any:
        used_by_one, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
        if connection.rank:
            used_by_one.grad = torch.ones(2)
        average_gradients([unused, used_by_one])
        return unused.grad, used_by_one.grad.tolist()

    assert run_as_current(2, average) == [(None, [0.5, 0.5])] * 2


def test_complex_gradients_keep_both_parts():
    def average(connection: Connection) -> Any:
        real, weight = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 2, dtype=torch.complex64))
        real.grad = torch.ones(1)
        weight.grad = torch.tensor([[1 + 2j, 3 - 4j]]).conj() * connection.rank
        average_gradients([weight, real])
        return weight.grad.tolist(), real.grad.tolist()

    assert run_as_current(2, average) == [([[0.5 - 1j, 1.5 + 2j]], [1.0])] * 2


def test_sparse_gradients_are_refused():
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with own_connections(), MemoryMaster().connect(0, 1) as connection:
        use(connection)
        expected = says(r"expected dense gradients, got sparse ones .* shape \(4, 2\)")
        with pytest.raises(ConfigurationError, check=expected):
            average_gradients(layer)


def test_half_precision_is_added_in_double():
    def average(_: Connection) -> Any:
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
        weight.grad = torch.full((1,), 60000.0, dtype=torch.float16)
        average_gradients([weight])
        return weight.grad.item()

    assert run_as_current(2, average) == [60000.0] * 2


@pytest.mark.parametrize(("count", "average"), [(5, 2.0), (1, 10.0), (0, 10.0)])
def test_a_process_that_trains_alone_divides_its_own_gradients(count, average):
    weight, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), 10.0, requires_grad=True)
    assert client.average_gradients([weight, unused, weight], np.int64(count)) == count
    assert weight.grad.tolist() == [average] * 2
    assert unused.grad is None


def test_models_of_different_sizes_are_reported():
    def average(connection: Connection) -> Any:
        return outcome(lambda: average_gradients(nn.Linear(2, 2 + connection.rank)))

    assert [type(error) for error in run_as_current(2, average)] == [RoundMismatch] * 2


@pytest.mark.parametrize(
    ("parameters", "count", "message"),
    [
        ([torch.zeros(2, requires_grad=True)], -1, "at least 0, got -1"),
        ([torch.zeros(2, requires_grad=True)], 2.0, "an int of at least 0"),
        ([torch.zeros(2)], 1, "expected at least one that requires a gradient"),
    ],
)
def test_an_invalid_count_and_parameters_that_require_no_gradient_are_refused(parameters, count, message):
    with own_connections():
        connection = in_threads([lambda: MemoryMaster().connect(0, 1)])[0]
        use(connection)
        with connection, pytest.raises(ConfigurationError, match=message):
            average_gradients(parameters, count)
