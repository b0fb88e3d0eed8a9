"""Rounds of compiled branches keep the program's order, however inductor orders the code for a rank's batch size."""

import pytest
import torch
from torch import nn

from programs import branch_programs
from simulation import branches
from support.branch_networks import Network


class _Towers(nn.Module):
    """A branch that becomes narrower and one that becomes wider: the order that saves memory depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _tower(512, 8), _tower(8, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def _tower(a: int, b: int) -> nn.Module:
    into = nn.Linear(6, a), nn.Tanh(), nn.Linear(a, b), nn.BatchNorm1d(b)
    return nn.Sequential(*into, nn.Linear(b, b), nn.Tanh(), nn.Linear(b, 4))


class _NetworkOfTowers(Network):
    def model(self) -> nn.Module:
        return _Towers().double()


def _towers() -> Network:
    network = _NetworkOfTowers(0, 2)
    network.dynamic, network.is_checkpointed, network.batches = False, False, [[256, 2]]
    return network


def _orders() -> list[list[branch_programs.Round]]:
    with branch_programs.without_machine_code():
        return branch_programs.rounds_of(_towers(), is_compiled=True)


# Warnings of torch itself when it imports inductor.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Skipping serialization:UserWarning")
def test_ranks_with_different_batch_sizes_run_the_rounds_of_two_branches_in_the_same_order():
    expected = [(layer, 0, phase) for layer, phase in (("first.3", "forward"), ("second.3", "forward"))]
    expected += [(layer, 0, "backward") for layer in ("second.3", "first.3")]
    assert _orders() == [expected] * 2


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 7])
def test_random_networks_train_to_the_whole_batch(members, seed):
    """With the backend that only traces; `scripts/simulate branches` uses inductor."""
    ranks = 2 + seed % 2
    results = members(ranks, branch_programs.train, seed, ranks, "aot_eager")
    assert branches.differences(Network(seed, ranks), results) == []
