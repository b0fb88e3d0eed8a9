"""`client.join`: members with data of different lengths."""

import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import client
from programs import uneven_programs
from statsd_bn.errors import GroupIncomplete, ReplicaLost, RoundFailed
from statsd_bn.messages import Aggregate, Participation
from support.memory_members import MemoryMaster, in_threads, outcome, wait_until
from support.pure_members import PureWorld

BATCHES = (2, 5, 3)


# Pauses and passes in the protocol, without a layer.


def participation(member, participation):
    member.session.participation = participation
    member.register()


@pytest.fixture
def world() -> PureWorld:
    return PureWorld(3)


def test_rounds_continue_without_a_paused_member(world):
    zero, one, two = world.members
    for member in world.members:
        member.forward(1.0)
        member.backward(1.0)
    participation(one, Participation.PAUSED)
    assert one.registered.missing == 0
    for member in (zero, two):
        member.forward(2.0)
    assert zero.total == two.total == ([0, 2], 4.0)
    participation(two, Participation.PAUSED)
    zero.backward(3.0)
    assert zero.total == ([0], 3.0)


def test_a_round_that_waits_for_a_leaving_member_completes_at_once(world):
    zero, one, two = world.members
    for member in (zero, two):
        member.forward(2.0)
    assert not zero.is_answered
    participation(one, Participation.PAUSED)
    assert zero.total == two.total == ([0, 2], 4.0)


def test_all_rejoin_together_at_a_step_that_no_member_has_begun(world):
    zero, one, two = world.members
    participation(one, Participation.PAUSED)
    participation(one, Participation.REJOINING)
    assert (one.registered.missing, list(one.registered.present)) == (2, [1])
    for _ in range(2):
        for member in (zero, two):
            member.forward(1.0)
        for member in (zero, two):
            member.backward(1.0)
    assert zero.total == ([0, 2], 2.0)
    for member in (zero, two):
        participation(member, Participation.PAUSED)
        participation(member, Participation.REJOINING)
    assert [member.session.first_step for member in world.members] == [2, 2, 2]
    assert {member.session.participation for member in world.members} == {Participation.TAKES_PART}
    for member in world.members:
        member.forward(1.0)
    assert one.total == ([0, 1, 2], 3.0)


def test_a_pass_without_any_batch_counts_as_a_pass(world):
    for first_step in (1, 2, 3):
        for member in world.members:
            participation(member, Participation.PAUSED)
            participation(member, Participation.REJOINING)
        assert [member.session.first_step for member in world.members] == [first_step] * 3


def test_a_repeated_register_does_not_begin_another_pass(world):
    zero = world.members[0]
    zero.session.participation = Participation.REJOINING
    frame = zero.session.register()
    for member in world.members:
        participation(member, Participation.REJOINING)
    for member in world.members[1:]:
        member.forward(1.0)
    world.send(zero, frame)
    assert (zero.registered.missing, zero.registered.first_step) == (0, 1)
    zero.forward(1.0)
    assert world.members[1].total == ([0, 1, 2], 3.0)


def test_a_paused_member_cannot_contribute(world):
    one = world.members[1]
    participation(one, Participation.PAUSED)
    one.forward(1.0)
    assert "rank 1 (place 1) is not one of the participants, ranks 0, 2" in str(one.latest(RoundFailed))


def test_a_strict_group_continues_if_a_paused_member_leaves(world):
    zero, one, two = world.members
    participation(one, Participation.PAUSED)
    world.send(one, one.session.leave(""))
    for member in (zero, two):
        member.forward(1.0)
    assert zero.total == ([0, 2], 2.0)
    participation(two, Participation.REJOINING)
    assert two.latest(ReplicaLost).fields["member"] == 1


def test_a_rank_waiting_for_a_pass_learns_of_a_departure(world):
    zero, one, _ = world.members
    participation(one, Participation.PAUSED)
    participation(zero, Participation.REJOINING)
    world.send(one, one.session.leave(""))
    assert zero.latest(ReplicaLost).fields["member"] == 1


def test_a_rank_waiting_for_a_pass_gets_one_error(world):
    zero, one, two = world.members
    participation(one, Participation.PAUSED)
    participation(two, Participation.PAUSED)
    participation(zero, Participation.REJOINING)
    first, second = (
        world.dispatcher.receive(world.now, b"", member.session.leave("")).replies for member in (one, two)
    )
    assert [to for to, _ in first] == [zero.session.member_token]
    assert second == []


@pytest.mark.parametrize("end", ["cause", "death"])
def test_a_strict_group_breaks_if_a_paused_member_fails(world, end):
    zero, one, _ = world.members
    participation(one, Participation.PAUSED)
    zero.forward(1.0)
    if end == "death":
        world.kill(one)
    else:
        world.send(one, one.session.leave("MemoryError: full"))
    assert zero.latest(ReplicaLost).fields["member"] == 1


def test_the_server_dies_while_one_member_is_paused_and_another_rejoins(world):
    zero, one, two = world.members
    for member in world.members:
        member.forward(1.0)
        member.backward(1.0)
    participation(one, Participation.PAUSED)
    participation(two, Participation.PAUSED)
    participation(two, Participation.REJOINING)
    world.restart()
    world.pass_time(1.5)
    zero.forward(4.0)
    assert zero.total == ([0], 4.0)
    participation(zero, Participation.PAUSED)
    participation(zero, Participation.REJOINING)
    assert two.session.first_step == 0
    participation(one, Participation.REJOINING)
    assert [member.session.first_step for member in world.members] == [2, 2, 2]


def test_a_paused_member_late_at_a_restarted_server_stays_paused(world):
    zero, one, two = world.members
    for member in (zero, one, two):
        member.forward(1.0)
    participation(two, Participation.PAUSED)
    for member in (zero, one):
        member.forward(1.0)
    world.restart()
    for member in (zero, one):
        member.introduce()
    two.introduce()
    assert (two.registered.missing, two.session.participation) == (0, Participation.PAUSED)
    world.restart()
    for member in (two, zero, one):
        member.introduce()
    for member in (zero, one):
        member.forward(2.0)
    assert zero.total == ([0, 1], 4.0)


def test_elastic_members_rejoin_when_all_remaining_do():
    world = PureWorld(3, 1)
    for member in world.members[:2]:
        participation(member, Participation.REJOINING)
    world.kill(world.members[2])
    assert [member.session.first_step for member in world.members[:2]] == [1, 1]


# Passes with layers.


def test_members_with_uneven_data_equal_the_whole_batch_of_the_unpaused_members(members):
    results = members(3, uneven_programs.train_passes, BATCHES)
    expected = uneven_programs.whole_batches(BATCHES)
    for member, (outputs, gradients, state) in enumerate(results):
        assert len(outputs) == uneven_programs.PASSES * BATCHES[member]
        for got, want in zip(outputs + gradients, expected.outputs[member] + expected.gradients[member], strict=True):
            torch.testing.assert_close(torch.from_numpy(got), want, rtol=0, atol=1e-12)
        for got, want in zip(state, expected.states[member], strict=True):
            torch.testing.assert_close(torch.from_numpy(got), want, rtol=0, atol=1e-12)


def test_a_step_after_a_pass_equals_one_on_the_whole_batch(members):
    (first, first_grad), (second, second_grad) = members(2, uneven_programs.step_behind_a_pass)
    x = torch.cat([uneven_programs.batch(member, 50) for member in range(2)]).requires_grad_()
    y = uneven_programs.model_()(x)
    (y**3).sum().backward()
    np.testing.assert_allclose(np.concatenate([first, second]), y.detach().numpy(), rtol=1e-9)
    np.testing.assert_allclose(np.concatenate([first_grad, second_grad]), x.grad.numpy(), rtol=1e-7, atol=1e-12)


def test_averaging_without_a_finished_member_is_logged_once(members):
    first, second = members(2, uneven_programs.average_in_a_pass)
    assert first == []
    assert len(second) == 1
    assert "rank 0 ended their pass in client.join and get no gradients" in second[0]


def test_a_step_before_the_first_pass_fails_while_others_wait_for_the_pass(members):
    errors = members(2, uneven_programs.step_before_a_pass)
    assert all("client.join()" in text for text in errors)


def test_a_rank_that_catches_an_exception_of_its_pass_waits_for_the_next_pass(members):
    assert members(2, uneven_programs.passes_with_a_caught_exception) == [5, 6]


def test_after_a_pass_all_recalibrate_together(members):
    whole = torch.cat([uneven_programs.batch(member, 0) for member in range(2)]).mean((0, 2))
    for nr_batches, mean in members(2, uneven_programs.recalibrate_after_a_pass):
        assert nr_batches == 2
        torch.testing.assert_close(torch.tensor(mean, dtype=torch.float64), whole, rtol=0, atol=1e-12)


def test_a_pass_that_ends_within_a_mini_batch_ends_it(members):
    assert members(2, uneven_programs.mini_batches_that_moved) == [[1, 2], [1, 2]]


@pytest.mark.parametrize(("torchs", "least"), [(True, 1), (False, 1), (False, 2)], ids=["torch's", "ours", "later"])
def test_torchs_join_or_client_join_alone_is_a_mismatch_at_once(members, tmp_path, torchs, least):
    """Under torch's Join the rank with more data waits in a layer, under client.join in a collective of DDP."""
    errors = members(2, uneven_programs.train_under_one_join, torchs, least, str(tmp_path / "rendezvous"))
    assert errors[torchs][0] == "RoundMismatch"
    text = errors[torchs][1]
    assert "in a collective of torch" in text
    where, advice = ("forward of layer '1'", "Run the same layers") if torchs else ("client.join", "with Join([ddp]), ")
    assert where in text
    assert advice in text


def test_a_member_that_gives_up_rejoining_is_paused_again():
    master = MemoryMaster()
    gave_up = threading.Event()

    def impatient():
        with master.connect(0, 2, round_timeout=0.3) as connection:
            connection.pause(None)
            with pytest.raises(GroupIncomplete):
                connection.rejoin(None)
            wait_until(lambda: master.report("world")["members"][0]["participation"] == "paused")
            gave_up.set()
            wait_until(lambda: master.report("world")["members"][1]["participation"] == "rejoining")
            return len(connection.all_gather("all", b""))

    def late():
        with master.connect(1, 2, round_timeout=20.0) as connection:
            assert gave_up.wait(20.0)
            connection.rejoin(None)
            return len(connection.all_gather("all", b""))

    assert in_threads([impatient, late]) == [2, 2]


def test_without_a_connection_join_waits_for_no_rank():
    model = client.convert_model(nn.BatchNorm1d(3))
    with client.join(model):
        model(torch.randn(4, 3))


def test_an_exception_inside_a_pass_reaches_the_others_and_pauses_no_member():
    master = MemoryMaster()

    def member(number):
        with master.connect(number, 2) as connection:
            connection.rejoin(None)
            if number == 1:
                raise MemoryError("full")
            return client.SlavePipe(connection, "bn").run_slave(uneven_programs.ROW)

    lost, failed = in_threads([partial(outcome, partial(member, number)) for number in range(2)])
    assert isinstance(failed, MemoryError)
    assert isinstance(lost, ReplicaLost)
    assert lost.fields["cause"] == "MemoryError: full"


def test_join_does_not_pause_after_an_exception(monkeypatch):
    master = MemoryMaster()
    connection = master.connect(0, 1, min_members=1)
    monkeypatch.setattr("client.training.join.current_connection", lambda: connection)
    with pytest.raises(MemoryError), client.join(client.convert_model(nn.BatchNorm1d(3))):
        raise MemoryError
    assert isinstance(client.SlavePipe(connection, "bn").run_slave(uneven_programs.ROW), Aggregate)
    connection.close()


def test_join_pauses_when_the_generator_around_it_is_closed(monkeypatch):
    master = MemoryMaster()
    connection = master.connect(0, 1, min_members=1)
    monkeypatch.setattr("client.training.join.current_connection", lambda: connection)

    def batches():
        with client.join(client.convert_model(nn.BatchNorm1d(3))):
            yield from range(3)

    reading = batches()
    next(reading)
    assert master.report("world")["members"][0]["participation"] == "takes_part"
    reading.close()
    assert master.report("world")["members"][0]["participation"] == "paused"
    connection.close()


def test_rejoining_members_are_resumed_by_the_next_server(world):
    for member in world.members:
        participation(member, Participation.PAUSED)
    for member in world.members:
        member.session.participation = Participation.REJOINING
    world.restart()
    for member in world.members:
        member.registered = None
        member.introduce()
    assert {member.session.participation for member in world.members} == {Participation.REJOINING}
    assert all(member.registered.missing for member in world.members)
    world.pass_time(0.25)
    assert {(member.session.participation, member.session.first_step) for member in world.members} == {
        (Participation.TAKES_PART, 1)
    }


def test_members_that_do_not_rejoin_are_named_at_the_deadline():
    master = MemoryMaster()
    done = threading.Event()

    def waiting():
        with master.connect(0, 2, round_timeout=0.3) as connection:
            error = outcome(lambda: connection.rejoin(None))
            done.set()
            return error

    def elsewhere():
        with master.connect(1, 2):
            done.wait(timeout=20)

    error, _ = in_threads([waiting, elsewhere])
    assert isinstance(error, GroupIncomplete)
    assert error.fields["missing"] == [1]
    assert str(error).startswith("rank 1 did not come back from client.join within 0.3 s")
