"""moments and RunningMoments by themselves: errors, limits, modes, compilers."""

import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn

import client
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError, NonFinite, RoundMismatch
from support.device_without_float64 import device_without_float64
from support.elastic_threads import run_as_current
from support.memory_members import outcome
from support.sentences import says

X = torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MASK = torch.tensor([True, True, False, True, True, True])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1.0],), TypeError, "moments(): expected a tensor, got list"),
        ((X.int(),), TypeError, "expected a dense floating-point tensor, got torch.int32, torch.strided"),
        ((X.to_sparse(),), TypeError, "expected a dense floating-point tensor, got torch.float64, torch.sparse_coo"),
        ((X, 3), ValueError, "expected dim to name different dimensions of shape (6, 3, 2), got 3"),
        ((X, (0, -3)), ValueError, "expected dim to name different dimensions of shape (6, 3, 2), got (0, -3)"),
        ((X, ()), ValueError, "expected dim to name different dimensions of shape (6, 3, 2), got ()"),
        ((X[:, :0],), ValueError, "expected a value outside of the reduced dimensions, got shape (6, 0, 2)"),
        ((X, 0, MASK.float()), TypeError, "expected a boolean mask, got torch.float32"),
        ((X, 0, MASK[:5]), ValueError, "a mask on cpu that expands to the reduced dimensions (6,), got (5,) on cpu"),
        ((X, 0, MASK.view(1, -1)), ValueError, "expands to the reduced dimensions (6,), got (1, 6) on cpu"),
        ((X, 0, MASK.to("meta")), ValueError, "a mask on cpu that expands to the reduced dimensions (6,), got (6,) on"),
    ],
)
def test_invalid_input_is_refused(arguments, error, text):
    with pytest.raises(error, check=says(re.escape(text))):
        client.moments(*arguments)


def test_batches_of_other_shapes_are_refused():
    statistics = client.RunningMoments((3, 2), name="seen")
    for x in (X[..., :1], X[0, 0]):
        text = re.escape(f"seen: expected a batch of shape (*, 3, 2), got {tuple(x.shape)}")
        with pytest.raises(ValueError, match=text):
            statistics.update(x)
    assert statistics.count == 0


@pytest.mark.parametrize("shapes", [((4, 3), (4, 2)), ((4, 3, 2), (5, 2, 3))])
def test_different_shapes_on_ranks_are_an_error_on_all(shapes):
    def measure(connection):
        return outcome(lambda: client.moments(torch.ones(shapes[connection.rank])))

    for error in run_as_current(2, measure):
        assert isinstance(error, RoundMismatch)
        assert "moments()" in str(error)


def test_more_means_than_a_round_takes_go_in_several_rounds():
    x = torch.arange(2.0 * limits.MAX_CHANNELS + 3, dtype=torch.float64) * torch.tensor([[1.0], [3.0]])

    def measure(connection):
        return client.moments(x[connection.rank :: 2]), connection.rounds

    for found, rounds in run_as_current(2, measure):
        assert (found.count, rounds) == (2, 3)
        assert torch.equal(found.mean, x.mean(0))
        assert torch.equal(found.var, x.var(0))


def test_too_few_values_are_no_error():
    for count, var in ((0, np.nan), (1, np.nan), (2, 0.0)):
        found = client.moments(torch.ones(count, 1))
        assert found.count == count
        np.testing.assert_equal([found.mean.item(), found.var.item()], [1.0 if count else np.nan, var])
    loss = torch.tensor(3.0, requires_grad=True)
    assert client.moments(loss, correction=0) == (1, 3.0, 0.0)


def test_on_nonfinite_raise_refuses_values_that_are_not_finite(monkeypatch):
    monkeypatch.setenv("STATSD_BN_ON_NONFINITE", "raise")
    statistics = client.RunningMoments(2, name="seen")
    with pytest.raises(NonFinite, match="layer 'seen'"):
        statistics.update(torch.tensor([[1.0, np.inf], [2.0, 3.0]]))
    assert statistics.count == 0
    statistics.update(torch.tensor([[1.0, np.nan], [2.0, 3.0]]), torch.tensor([False, True]))
    assert statistics.mean.tolist() == [2.0, 3.0]


def test_running_moments_are_a_module_like_others():
    statistics = client.RunningMoments((3, 2), eps=1e-3)
    statistics.update(X[:4])
    statistics.update(X[4])
    statistics.eval().update(torch.ones(3, 2))
    assert list(statistics.state_dict()) == ["count", "mean", "var"]
    assert (statistics.count.dtype, statistics.count.item()) == (torch.int64, 5)
    assert repr(statistics) == "RunningMoments((3, 2), eps=0.001)"
    normal = statistics(X.float())
    expected = (X - X[:5].mean(0)) / (X[:5].var(0, correction=0) + 1e-3).sqrt()
    torch.testing.assert_close(normal, expected.float())
    torch.testing.assert_close(statistics.denormalize(normal), X.float())
    torch.testing.assert_close(statistics.normalize(X, clip=0.5), expected.clamp(-0.5, 0.5))
    narrow = statistics.train().float()
    narrow.update(X[5:])
    assert narrow.mean.dtype == torch.float32
    torch.testing.assert_close(narrow.mean, X.mean(0).float())
    assert pickle.loads(pickle.dumps(statistics)).name == statistics.name  # noqa: S301 - our own
    assert client.RunningMoments(3).name != client.RunningMoments(3).name


def test_compiled_code_updates_running_moments_as_eager_code_does():
    statistics = client.RunningMoments((3, 2))

    @torch.compile(backend="eager")
    def evaluate(x):
        statistics.update(x)
        return statistics(x) * client.moments(x).var

    torch.testing.assert_close(evaluate(X), statistics(X) * X.var(0))
    assert statistics.count == len(X)


def test_replicas_of_one_process_are_refused():
    class Counting(nn.Module):
        def forward(self, x):
            client.moments(x)

    model = client.DataParallelWithCallback(Counting(), device_ids=["cpu", "cpu"])
    with pytest.raises(ConfigurationError, match="called inside a replica of DataParallelWithCallback"):
        model(X)


def test_a_device_without_float64_computes_on_the_host():
    x = X.float() + 1000
    with device_without_float64() as device:
        statistics = client.RunningMoments((3, 2)).float().to(device)
        statistics.update(x.to(device))
        found = client.moments(x.to(device), mask=MASK.to(device))
        normal = statistics(x.to(device)).cpu()
    assert {each.device for each in found} == {statistics.mean.device} == {device}
    torch.testing.assert_close(found.var.on_host, x[MASK].var(0))
    torch.testing.assert_close(normal, (x - x.mean(0)) / x.var(0, correction=0).sqrt(), rtol=1e-3, atol=1e-3)
