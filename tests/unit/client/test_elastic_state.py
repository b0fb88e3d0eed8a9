"""ElasticState and run_elastic: every sample is learnt once in each epoch, whenever members join or die."""

import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from client.elastic.sampler import ElasticSampler
from client.elastic.state import COMMIT, STATE, ElasticState, MembersChanged, Report, run_elastic
from client.serialization import pack
from client.session.connection import Connection
from statsd_bn.errors import ProtocolError, ReplicaLost, RoundMismatch
from support.elastic_threads import Job, World, own_connections, use
from support.memory_members import MemoryMaster, in_threads, outcome, wait_until

jobs = st.builds(Job, st.integers(1, 24), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


@st.composite
def fates(draw: Any) -> tuple[int, dict[int, int], dict[int, tuple[int, int]]]:
    """(world size, deaths, newcomers) for `World.run`; at least one initial member survives."""
    world_size = draw(st.integers(1, 4))
    nr_newcomers = draw(st.integers(0, 2))
    survivor = draw(st.integers(0, world_size - 1))
    deaths = draw(st.dictionaries(st.integers(0, world_size + nr_newcomers - 1), st.integers(0, 30)))
    deaths.pop(survivor, None)
    place = st.tuples(st.integers(0, world_size - 1), st.integers(0, 30))
    successors = draw(st.sets(st.sampled_from(sorted(deaths)))) if deaths else set()
    newcomers = successors.union(range(world_size, world_size + nr_newcomers))
    return world_size, deaths, {newcomer: draw(place) for newcomer in sorted(newcomers)}


@given(jobs, fates())
def test_every_sample_is_learnt_once_in_each_epoch(job, fate):
    learnt = World(job).run(*fate)
    assert learnt
    assert learnt == dict.fromkeys(learnt, [float(job.epochs)] * job.samples)


@pytest.mark.parametrize(
    ("job", "fate", "ranks"),
    [
        pytest.param(Job(5, 1, 1, 1), (2, {}, {}), (0, 1), id="one member has a batch more"),
        pytest.param(Job(8, 1, 1, 2), (2, {}, {2: (0, 4)}), (0, 1, 2), id="a newcomer takes over the state"),
        # Member 1 dies in its second batch; its successor joins before member 0 commits for the first time.
        pytest.param(Job(12, 1, 3, 1), (2, {1: 3}, {1: (0, 4)}), (0, 1), id="a successor takes a lost member's number"),
        # Member 0 dies in its second round: all have received its report, but not its state.
        pytest.param(Job(6, 2, 1, 1), (3, {0: 1}, {}), (1, 2), id="the member with the state dies"),
    ],
)
def test_every_sample_is_learnt_once_through_losses_and_returns(job, fate, ranks):
    assert World(job).run(*fate) == dict.fromkeys(ranks, [float(job.epochs)] * job.samples)


@pytest.fixture
def together() -> Iterator[Callable[[int, Callable[[Connection], Any]], list[Any]]]:
    """Returns a function that runs `program(connection)` as n elastic members, each with its own current connection."""
    master = MemoryMaster()

    def run(n: int, program: Callable[[Connection], Any]) -> list[Any]:
        def member(number: int) -> Any:
            with master.connect(number, n, min_members=1) as connection:
                use(connection)
                return outcome(lambda: program(connection))

        return in_threads([lambda number=number: member(number) for number in range(n)])

    with own_connections():
        yield run


def test_all_members_begin_with_the_state_of_member_0(together):
    def begin(connection: Connection) -> Any:
        mine = connection.rank
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, float(mine))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + mine, betas=(0.5, 0.6 + mine / 10))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3 + mine)
        state = ElasticState(
            model, optimizer, epoch=mine, history=[mine, (mine, None)], best=torch.tensor(mine), schedule=schedule
        )
        state.sync()
        group = state.optimizer.param_groups[0]
        return (
            model.weight.tolist(),
            group["lr"],
            group["betas"],
            state.epoch,
            state.history,
            state.best,
            schedule.step_size,
        )

    assert together(3, begin) == [([[0.0, 0.0]], 0.1, (0.5, 0.6), 0, [0, (0, None)], torch.tensor(0), 3)] * 3


def test_a_value_that_cannot_travel_is_named_before_others_need_it():
    with pytest.raises(TypeError, match=r"state\.best: expected None, numbers"):
        ElasticState(nn.Linear(2, 1), best=Path("best.pt"))
    state = ElasticState(nn.Linear(2, 1), best={"loss": None})
    state.best["loss"] = Path("best.pt")
    with pytest.raises(TypeError, match=r"state\.best: expected None, numbers"):
        state.commit()
    nested = None
    for _ in range(32):
        nested = [nested]
    for value, kind, what in (
        ("\udcff", ValueError, "surrogates not allowed"),
        (nested, ValueError, "expected at most 32 levels of nesting"),
    ):
        with pytest.raises(kind, match=f"state.best: .*{what}"):
            ElasticState(nn.Linear(2, 1), best=value)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(2, 1).parameters()), 1)
    scheduler.path = Path("here")
    with pytest.raises(TypeError, match=r"state\.scheduler: expected None"):
        ElasticState(nn.Linear(2, 1), scheduler=scheduler)
    state.best["loss"] = torch.zeros(1).to_sparse()
    with pytest.raises(TypeError, match=r"state\.best: array \d: expected a dense tensor"):
        state.commit()


def test_a_tensor_stays_on_its_members_device(together):
    def begin(connection: Connection) -> Any:
        device = "meta" if connection.rank else "cpu"
        state = ElasticState(
            nn.Linear(1, 1), best=torch.ones(2, device=device), lists=[{"a": (torch.ones(1, device=device), 2)}, 3]
        )
        state.sync()
        return state.best.device.type, state.lists[0]["a"][0].device.type, state.lists[0]["a"][1], state.lists[1]

    assert together(2, begin) == [("cpu", "cpu", 2, 3), ("meta", "meta", 2, 3)]


def test_a_batch_that_was_not_recorded_does_not_change_the_shares(together):
    def skip_one(connection: Connection) -> Any:
        state = ElasticState(nn.Linear(1, 1), sampler=ElasticSampler(range(12)))
        state.sync()
        before = list(state.sampler)
        if connection.rank:
            state.sampler.record_batch(0, 2)
        state.commit()
        return before == list(state.sampler), len(state.sampler.processed_indices)

    assert together(2, skip_one) == [(True, 2)] * 2


def test_a_member_that_connects_anew_with_its_state_is_a_newcomer():
    master, left = MemoryMaster(), threading.Event()

    def stay(state: ElasticState) -> Any:
        left.wait(20)
        wait_until(lambda: master.members("world") == [0, 1])
        return outcome(state.commit)

    def member(number: int) -> Any:
        state = ElasticState(nn.Linear(1, 1), sampler=ElasticSampler(range(4), shuffle=False), seen=[])
        with master.connect(number, 2, min_members=1) as connection:
            use(connection)
            state.sync()
            state.sampler.record_batch(0, 1)
            state.seen.append(number)
            if number == 0:
                return stay(state), state.seen, list(state.sampler)
        left.set()
        with master.connect(number, 2, min_members=1) as connection:
            use(connection)
            state.sync()
            return state.seen, list(state.sampler)

    with own_connections():
        (change, *first), second = in_threads([lambda: member(0), lambda: member(1)])
    assert type(change) is MembersChanged
    assert (change.lost, change.joined) == ([1], [1])
    assert first == [[], [0, 2]]
    assert second == ([], [1, 3])


def test_members_that_commit_in_different_epochs_get_an_error(together):
    def wander(connection: Connection) -> Any:
        state = ElasticState(nn.Linear(1, 1), sampler=ElasticSampler(range(4)))
        state.sync()
        state.sampler.set_epoch(connection.rank)
        state.commit()

    for error in together(2, wander):
        assert type(error) is RoundMismatch
        assert "rank 0 in epoch 0 after 1 commits, rank 1 in epoch 1 after 1 commits" in str(error)


def test_members_changed_lists_the_members_that_were_lost_and_joined(together):
    def leave(connection: Connection) -> Any:
        state = ElasticState(nn.Linear(1, 1))
        state.sync()
        if connection.rank == 1:
            return None
        return outcome(state.commit)

    first, gone, third = together(3, leave)
    assert gone is None
    for change in (first, third):
        assert type(change) is MembersChanged
        assert (change.lost, change.joined) == ([1], [])


def test_a_process_alone_commits_and_restores_without_a_connection():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    state = ElasticState(model, sampler=ElasticSampler(range(3)), epoch=0, seen=[])

    def train(state: ElasticState) -> list[int]:
        state.sampler.record_batch(0, 2)
        state.epoch = 1
        state.commit()
        nn.init.constant_(model.weight, 2.0)
        state.epoch = 2
        for _ in range(2):
            state.seen.append("undone")
            state.restore()
        return state.sampler.processed_indices

    assert len(run_elastic(train, state)) == 2
    assert (state.epoch, model.weight.item(), state.seen) == (1, 1.0, [])


def test_a_latecomer_that_finds_no_state_does_not_train():
    master = MemoryMaster()
    with own_connections(), master.connect(0, 1, min_members=1) as first:
        use(first)
        state = ElasticState(nn.Linear(1, 1))
        state.sync()
        with master.connect(7, 1, min_members=1) as latecomer:
            first.close()
            use(latecomer)
            with pytest.raises(ReplicaLost, match=r"before rank 7 could load it"):
                run_elastic(lambda _: pytest.fail("it trains"), ElasticState(nn.Linear(1, 1)))


def test_a_newcomer_before_the_first_commit_is_a_founding_member(together):
    assert together(1, lambda connection: connection.is_latecomer) == [False]


@pytest.mark.parametrize(
    ("report", "what"),
    [
        ([0, 0, [], "no"], "expected a report of a member, got [0, 0, [], 'no']"),
        ([0, 0, [], False, 1, np.array([99])], "expected samples of the dataset, got index 99 is out of bounds"),
    ],
)
def test_an_invalid_report_from_another_member_is_refused(together, report, what):
    def commit(connection: Connection) -> Any:
        if connection.rank:
            connection.rejoin(None)
            return connection.all_gather(COMMIT, pack(report))
        return ElasticState(nn.Linear(1, 1), sampler=ElasticSampler(range(4))).sync()

    error, _ = together(2, commit)
    assert type(error) is ProtocolError
    assert what in error.message


@pytest.mark.parametrize(
    "report",
    [
        *([0, 0, [[]], False, 0, np.zeros(0, "i8")], [0, 0, [-1], False, 0, np.zeros(0, "i8")]),
        *([0, 0, [], False, 0, np.zeros(0, "f8")], [0, 0, [], False, 0, np.zeros((1, 1), "i8")]),
        *([0, 0, [], False, 0, np.array([-1])], [2**63, 0, [], False, 0, np.zeros(0, "i8")]),
        [0, 0, [], False, 2**63, np.zeros(0, "i8")],
    ],
)
def test_an_impossible_report_is_refused(report):
    with pytest.raises(ProtocolError, match="expected a report of a member, got "):
        Report.unpack(pack(report))


STATE_OF_A_LINEAR = {"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}
NOTHING = {"model": STATE_OF_A_LINEAR, "optimizer": None, "sampler": None}


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (7, "expected a state of model, optimizer, sampler from rank 1, got 7"),
        ({}, "expected a state of model, optimizer, sampler from rank 1, got {}"),
        ({"model": None, "optimizer": None}, "expected a state of model, optimizer, sampler from rank 1"),
        ({**NOTHING, "commit": 1}, "expected a state of model, optimizer, sampler from rank 1"),
        ({**NOTHING, "\x1b[2J": 1}, r"'\x1b[2J': 1"),
        ({**NOTHING, "model": 7}, "the state of rank 1 does not fit: TypeError: "),
        ({**NOTHING, "model": {"\x1b[2J": 1}}, r"does not fit: RuntimeError: Error(s) in loading"),
        ({**NOTHING, "model": {**STATE_OF_A_LINEAR, "weight": torch.zeros(2**10, 0)}}, "does not fit: RuntimeError: "),
    ],
)
def test_the_error_for_a_mismatching_state_contains_no_terminal_escape(together, state, what):
    def commit(connection: Connection) -> Any:
        if connection.rank:
            connection.rejoin(None)
            connection.all_gather(COMMIT, pack([5, 0, [0, 1], False, 0, np.zeros(0, "i8")]))
            connection.all_gather(STATE, pack(state))
            return None
        return ElasticState(nn.Linear(1, 1)).sync()

    error, _ = together(2, commit)
    assert type(error) is ProtocolError
    assert what in error.message
    text = "".join(traceback.format_exception(error))
    assert "\x1b" not in text


@pytest.mark.parametrize("name", ["commit", "restore", "sync", "_members"])
def test_a_value_cannot_have_the_name_of_an_attribute_of_elastic_state(name):
    with pytest.raises(ValueError, match=f"got '{name}'"):
        ElasticState(nn.Linear(1, 1), **{name: 1})
