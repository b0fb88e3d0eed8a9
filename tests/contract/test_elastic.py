"""The contract of elastic training: `run_elastic`, `ElasticState`, `ElasticSampler`, `MembersChanged`.

Members leave and join at the boundaries of steps, and the others train on with exact results.
"""

import copy
import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import client
from programs import contract_elastic_programs as programs
from programs.contract_elastic_programs import LEAVER, NEWCOMER, SAMPLES, WORLD_SIZE
from support.comparison import assert_close
from support.contract_seed import server_on_a_socket

WAIT_SECONDS = 100.0


@pytest.fixture
def lives(pool, tmp_path):
    """Trains while one member leaves and another joins; returns what each of the four has seen."""

    def run(says_why: bool) -> list[programs.Life]:
        with server_on_a_socket() as running:
            futures = [
                pool.submit(programs.live, running.endpoint, str(tmp_path), rank, says_why)
                for rank in range(WORLD_SIZE + 1)
            ]
            return [future.result(WAIT_SECONDS) for future in futures]

    return run


@pytest.mark.parametrize("says_why", [False, True], ids=["in good order", "by an exception"])
def test_members_leave_and_join_and_the_others_end_as_one_process_does(lives, says_why):
    found = lives(says_why)
    final = [life for life in found if life.rank != LEAVER]
    first, second, newcomer = final
    assert first.changes == second.changes == [([LEAVER], []), ([], [NEWCOMER])]
    assert (newcomer.changes, newcomer.first_step > 0) == ([], True)
    assert first.undone == second.undone > 0, "what was done since the commit before the loss"
    expected = programs.in_one_process(found)
    for life in final:
        assert_close(life.state, expected)
        for name, value in life.state.items():
            assert torch.equal(value, first.state[name]), f"{name} of rank {life.rank}"
    _check_cover(found)
    _check_epochs(final + [life for life in found if life.rank == LEAVER])


def _check_cover(found: list[programs.Life]) -> None:
    """Each aggregate reported the replicas and samples that contributed to it."""
    by_rank = {life.rank: life.steps for life in found}
    covers = set()
    for number, step in by_rank[0].items():
        brought = [by_rank[rank][number] for rank in step.members]
        samples = sum(len(each.own) for each in brought)
        for each in brought:
            assert each.members == step.members
            assert (each.replicas, each.samples, each.averaged_over) == (len(step.members), samples, samples)
        covers.add(tuple(step.members))
    assert covers == {(0, 1, LEAVER), (0, 1), (0, 1, NEWCOMER)}


def _check_epochs(lives: list[programs.Life]) -> None:
    """The job trained on every sample once in each epoch, whichever members were present."""
    by_rank = {life.rank: life.steps for life in lives}
    learnt: dict[int, Counter[int]] = {}
    for number, step in by_rank[0].items():
        for rank in step.members:
            learnt.setdefault(step.epoch, Counter()).update(by_rank[rank][number].own)
    assert len(learnt) > 1
    for epoch, counts in learnt.items():
        assert counts == Counter(range(SAMPLES)), f"epoch {epoch}"


def shares(samplers: list[client.ElasticSampler]) -> list[list[int]]:
    return [list(sampler) for sampler in samplers]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sampler_splits_what_is_left_of_an_epoch_again_among_other_members(shuffle):
    samplers = [client.ElasticSampler(range(11), shuffle=shuffle) for _ in range(3)]
    for rank, sampler in enumerate(samplers):
        sampler.reset(rank, 3)
    before = shares(samplers)
    assert sorted(itertools.chain(*before)) == list(range(11))
    assert sorted(map(len, before)) == [3, 4, 4]
    for sampler in samplers:
        sampler.record_batch(0, 2)
    processed = [sample for sampler in samplers for sample in sampler.processed_indices]
    assert len(processed) == 6
    left = samplers[:2]
    for rank, sampler in enumerate(left):
        sampler.record_indices(processed)
        sampler.reset(rank, 2)
    assert sorted(itertools.chain(*shares(left))) == sorted(set(range(11)).difference(processed))
    assert sorted(map(len, left)) == [2, 3]


def test_each_epoch_of_a_sampler_has_an_order_of_its_own_which_is_the_same_on_all_members():
    first, second = (client.ElasticSampler(range(20), seed=3) for _ in range(2))
    orders = []
    for epoch in (0, 1):
        first.set_epoch(epoch)
        second.set_epoch(epoch)
        assert list(first) == list(second)
        assert sorted(first) == list(range(20))
        orders.append(list(first))
    assert orders[0] != orders[1]


def test_a_samplers_state_is_the_epoch_and_its_processed_samples():
    sampler, restored = client.ElasticSampler(range(7)), client.ElasticSampler(range(7))
    sampler.set_epoch(2)
    list(DataLoader(range(7), 3, sampler=sampler))
    sampler.record_batch(0, 3)
    state = copy.deepcopy(sampler.state_dict())
    sampler.record_batch(1, 3)
    restored.load_state_dict(state)
    assert restored.epoch == 2
    assert len(restored.processed_indices) == 3
    assert sorted(restored.processed_indices + list(restored)) == list(range(7))
    restored.set_epoch(2)
    assert len(restored) == 4, "a restored epoch goes on"
    restored.set_epoch(3)
    assert len(restored) == 7


def test_a_state_goes_back_to_its_last_commit():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = client.ElasticSampler(range(8))
    state = client.ElasticState(model, optimizer, sampler, epoch=0, best={"loss": 1.0})

    def step() -> None:
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        state.best["loss"] /= 2
        state.epoch += 1

    step()
    sampler.record_batch(0, 2)
    state.commit()
    weights = copy.deepcopy(model.state_dict())
    momenta = copy.deepcopy(optimizer.state_dict()["state"])
    step()
    sampler.record_batch(1, 2)
    assert not torch.equal(model.weight, weights["weight"])
    state.restore()
    assert_close(model.state_dict(), weights)
    assert [momentum["momentum_buffer"].tolist() for momentum in optimizer.state_dict()["state"].values()] == [
        momentum["momentum_buffer"].tolist() for momentum in momenta.values()
    ]
    assert (state.epoch, state.best, len(sampler.processed_indices)) == (1, {"loss": 0.5}, 2)


def test_a_value_that_cannot_go_to_a_newcomer_is_refused_at_once():
    with pytest.raises(TypeError, match="file"):
        client.ElasticState(nn.Linear(2, 1), file=object())


def test_training_is_called_again_after_each_change_of_membership_and_its_result_returned():
    calls = []

    def train(state: client.ElasticState) -> str:
        calls.append(state.epoch)
        if len(calls) < 3:
            raise client.MembersChanged(lost=[4, 2], joined=[7])
        return "trained"

    assert client.run_elastic(train, client.ElasticState(nn.Linear(2, 1), epoch=5)) == "trained"
    assert calls == [5, 5, 5]
    change = client.MembersChanged(lost=[4, 2], joined=[7])
    assert (change.lost, change.joined) == ([2, 4], [7])


def test_a_strict_connection_is_refused():
    with client.connect(rank=0, world_size=1), pytest.raises(ValueError, match=r'policy="elastic"'):
        client.run_elastic(lambda _: None, client.ElasticState(nn.Linear(2, 1)))
