"""An elastic job continues without lost members, admits new ones, and reports the members of each aggregate."""

import threading
from contextlib import ExitStack
from functools import partial

import pytest
import torch

import client
from client.ops import native
from client.ops.exchange import Exchange
from client.ops.functional import Slice, batch_norm, plain_batch_norm
from client.ops.native import NativeExchange
from client.transports.server import SlavePipe
from programs.elastic_training_programs import SAMPLES, started
from statsd_bn.errors import RegistrationRefused, ReplicaLost, RoundTimeout, WorldSizeMismatch
from statsd_bn.members import NO_MEMBERS
from statsd_bn.messages import NO_SERVER
from support.memory_members import MemoryMaster, in_threads
from support.pure_members import PureWorld, backward, forward


@pytest.fixture
def world() -> PureWorld:
    """Four members, of which two must remain."""
    return PureWorld(4, 2)


def step(members, value=1.0):
    """A whole step of one layer; member n contributes (n + 1) * value."""
    for member in members:
        member.forward((member.number + 1) * value)
    totals = [member.total for member in members]
    for member in members:
        member.backward(value)
    assert all(total == totals[0] for total in totals)
    return totals[0]


def test_the_group_opens_when_all_initial_members_are_there(world):
    assert step(world.members) == ([0, 1, 2, 3], 10.0)
    alone = PureWorld(0, 1)
    alone.world_size = 2
    first = alone.join(0)
    assert first.registered.missing == 1


def test_the_others_continue_without_a_lost_member(world):
    step(world.members)
    survivors = [world.members[n] for n in (0, 1, 3)]
    world.kill(world.members[2])
    assert step(survivors) == ([0, 1, 3], 7.0)


def test_a_round_that_waits_for_a_lost_member_is_completed_at_once(world):
    survivors = world.members[:3]
    forward(survivors, 1.0)
    assert not any(member.is_answered for member in survivors)
    world.kill(world.members[3])
    assert [member.total for member in survivors] == [([0, 1, 2], 3.0)] * 3


def test_contributions_of_a_lost_member_stay(world):
    world.members[3].forward(8.0)
    world.kill(world.members[3])
    survivors = world.members[:3]
    forward(survivors, 1.0)
    assert [member.total for member in survivors] == [([0, 1, 2, 3], 11.0)] * 3
    backward(survivors, 1.0)
    assert [member.total for member in survivors] == [([0, 1, 2], 3.0)] * 3


def test_the_others_continue_without_a_member_that_left(world):
    gone = world.members.pop(0)
    world.send(gone, gone.session.leave("MemoryError: full"))
    assert step(world.members) == ([1, 2, 3], 9.0)


def test_a_newcomer_starts_at_a_step_that_no_member_has_begun(world):
    step(world.members)
    world.kill(world.members[2])
    old = [world.members[n] for n in (0, 1, 3)]
    forward(old, 1.0)
    newcomer = world.join(2)
    assert newcomer.registered.first_step == 2
    assert (newcomer.session.first_step, list(newcomer.registered.present)) == (2, [0, 1, 2, 3])
    backward(old, 1.0)
    assert [member.total for member in old] == [([0, 1, 3], 3.0)] * 3
    assert step([*old, newcomer]) == ([0, 1, 2, 3], 10.0)
    assert newcomer.key.step == 2


def test_a_newcomer_may_have_a_rank_beyond_the_initial_ones(world):
    step(world.members)
    newcomer = world.join(7)
    assert newcomer.registered.first_step == 1
    assert step([*world.members[:4], newcomer]) == ([0, 1, 2, 3, 7], 18.0)


def test_two_newcomers_at_the_same_step(world):
    step(world.members)
    newcomers = [world.join(4), world.join(5)]
    assert [newcomer.session.first_step for newcomer in newcomers] == [1, 1]
    assert step(world.members) == ([0, 1, 2, 3, 4, 5], 21.0)


def test_with_too_few_members_the_rest_wait_for_newcomers(world):
    survivor = world.members[0]
    world.kill(*world.members[1:])
    survivor.forward(5.0)
    assert not survivor.is_answered
    survivor.ask_again()
    assert survivor.pending.message.endswith("for enough ranks (1 of min_members 2 are there)")
    newcomer = world.join(1)
    assert survivor.total == ([0], 5.0)
    survivor.backward(1.0)
    assert newcomer.session.first_step == 1
    assert step([survivor, newcomer]) == ([0, 1], 3.0)


def test_with_too_few_members_the_rest_time_out_at_the_deadline(world):
    survivor = world.members[0]
    world.kill(*world.members[1:])
    survivor.forward(5.0)
    world.pass_time(59.0)
    assert not survivor.answers or not isinstance(survivor.answers[-1], Exception)
    world.pass_time(2.0)
    error = survivor.latest(RoundTimeout)
    assert "enough ranks (1 of min_members 2 are there) did not arrive within 60 s" in str(error)
    assert error.fields["missing"] == []


def test_a_lost_member_gets_an_error_and_may_join_again(world):
    step(world.members)
    frozen, others = world.members[3], world.members[:3]
    world.silent.add(frozen)
    world.pass_time(4.0)
    assert step(others) == ([0, 1, 2], 6.0)
    world.silent.remove(frozen)
    frozen.forward(1.0)
    error = frozen.latest(ReplicaLost)
    assert (error.fields["member"], error.fields["cause"][:18]) == (3, "no sign of life fo")
    frozen.register()
    assert frozen.latest(ReplicaLost).fields["member"] == 3
    again = world.join(3)
    assert step([*others, again]) == ([0, 1, 2, 3], 10.0)


def test_a_member_refuses_an_aggregate_without_its_own_rows(world):
    """No rank normalises with statistics that leave its own slice out."""
    forward(world.members[:3], 1.0)
    world.kill(world.members[3])
    late = world.members[3]
    frame = world.dispatcher.receive(
        world.now, b"", world.members[0].session.contribution(world.members[0].key, world.members[0].rows, 1)
    ).replies[0][1]
    late.key = world.members[0].key
    late.receive(frame)
    assert "ranks 0-2 continued without it" in str(late.latest(ReplicaLost))


@pytest.mark.parametrize("min_members", [0, 1])
def test_members_of_another_policy_are_refused(min_members):
    world = PureWorld(2, 2)
    stranger = world.join(1, min_members=min_members)
    text = '"elastic" with min_members 1' if min_members else '"strict"'
    error = stranger.latest(RegistrationRefused)
    assert f'expected policy "elastic" with min_members 2, as ranks 0-1 asked for, got {text}' in error.message


def test_the_sizes_must_agree_in_an_elastic_group_too():
    world = PureWorld(2, 1)
    assert world.join(3, world_size=5).latest(WorldSizeMismatch).fields["expected"] == 2


def test_newcomers_join_the_world_only():
    world = PureWorld(2, 1, group="pair")
    world.kill(world.members[1])
    error = world.join(1, group="pair").latest(RegistrationRefused)
    assert "new ranks can join only the group 'world'" in str(error)


# Restarts of the server.


def test_the_survivors_continue_with_a_restarted_server(world):
    step(world.members)
    world.kill(world.members[2])
    old = [world.members[n] for n in (0, 1, 3)]
    step(old)
    world.restart()
    forward(old, 1.0)
    world.pass_time(1.0)
    assert [member.total for member in old] == [([0, 1, 3], 3.0)] * 3
    assert world.join(2).registered.first_step == 3


def test_a_member_that_died_with_the_server_is_waited_for_briefly(world):
    step(world.members)
    dead, old = world.members[3], world.members[:3]
    world.silent.add(dead)
    world.restart()
    forward(old, 1.0)
    world.pass_time(3.0)
    assert not any(member.is_answered for member in old)
    old[0].ask_again()
    assert old[0].pending.message.endswith("waiting for rank 3 to reconnect to the restarted server")
    world.pass_time(1.0)
    assert [member.total for member in old] == [([0, 1, 2], 3.0)] * 3
    world.silent.remove(dead)
    dead.forward(1.0)
    assert "registered too late" in str(dead.latest(ReplicaLost))


def test_after_a_restart_all_get_the_answer_that_one_member_has_received_before(world):
    for member in world.members:
        member.forward(float(member.number))
    ahead, behind = world.members[0], world.members[1:3]
    for member in behind:
        member.answers.clear()
    world.silent.add(world.members[3])
    world.restart()
    ahead.backward(1.0)
    for member in behind:
        member.ask_again()
    world.pass_time(4.0)
    assert [member.total for member in behind] == [([0, 1, 2, 3], 6.0)] * 2
    backward(behind, 1.0)
    assert [member.total for member in (ahead, *behind)] == [([0, 1, 2], 3.0)] * 3


def test_a_newcomer_without_a_round_keeps_its_first_step(world):
    step(world.members)
    old, newcomer = world.members[:4], world.join(4)
    assert newcomer.session.first_step == 1
    world.restart()
    forward(old, 1.0)
    world.pass_time(1.0)
    assert not any(member.is_answered for member in old)
    newcomer.forward(1.0)
    assert [member.total for member in (*old, newcomer)] == [([0, 1, 2, 3, 4], 5.0)] * 5


def test_a_member_that_leaves_during_recovery_is_not_waited_for(world):
    world.restart()
    dying, *others = world.members
    forward(world.members, 1.0)
    world.send(dying, dying.session.leave("MemoryError: full"))
    world.silent.add(dying)
    world.pass_time(1.0)
    assert [member.total for member in others] == [([1, 2, 3], 3.0)] * 3


def test_an_initial_member_unaware_of_the_opening_starts_with_the_others():
    """The server died while it announced the opening: one member knows of the opening, the other registers anew."""
    world = PureWorld(2, 1)
    informed = world.members[0]
    world.silent.update(world.members)
    world.restart()
    world.silent.clear()
    uninformed = world.members[1]
    uninformed.session._server, uninformed.session.members = NO_SERVER, NO_MEMBERS
    informed.forward(1.0)
    uninformed.register()
    world.pass_time(1.0)
    assert uninformed.session.first_step == 0
    uninformed.forward(1.0)
    assert informed.total == uninformed.total == ([0, 1], 2.0)


def test_a_member_back_after_the_others_finished_does_not_train_alone(world):
    frozen, others = world.members[3], world.members[:3]
    world.silent.add(frozen)
    world.restart()
    forward(others, 1.0)
    world.pass_time(4.0)
    assert [member.total for member in others] == [([0, 1, 2], 3.0)] * 3
    for member in others:
        world.send(member, member.session.leave(""))
    world.silent.update(others)
    world.silent.remove(frozen)
    frozen.forward(1.0)
    assert "registered too late" in str(frozen.latest(ReplicaLost))
    newcomer = world.join(0)
    assert newcomer.registered.missing == 3, "a new run of the job begins"
    world.kill(newcomer)
    world.silent.remove(newcomer)
    newcomer.register()
    assert (newcomer.answers, newcomer.registered.missing) == ([], 3)


def test_a_member_whose_results_are_lost_repeatedly_is_lost_too(world):
    step(world.members)
    mute, others = world.members[3], world.members[:3]
    world.restart()
    world.silent.add(mute)
    forward(others, 1.0)
    for _ in range(8):
        for frame in (mute.session.register(), mute.session.heartbeat()):
            world.dispatcher.receive(world.now, mute.session.member_token, frame)
        world.pass_time(0.5)
    assert [member.total for member in others] == [([0, 1, 2], 3.0)] * 3
    world.silent.remove(mute)
    mute.forward(1.0)
    assert "its results did not arrive" in mute.latest(ReplicaLost).fields["cause"]


def test_a_member_lost_before_the_restart_stays_lost():
    world = PureWorld(2, 1)
    step(world.members)
    ahead, frozen = world.members
    frozen.forward(1.0)
    world.silent.add(frozen)
    world.pass_time(4.0)
    step([ahead])
    step([ahead])
    world.restart()
    world.silent.remove(frozen)
    frozen.ask_again()
    world.pass_time(1.0)
    frozen.ask_again()
    assert "had continued without it" in frozen.latest(ReplicaLost).fields["cause"]
    assert step([ahead]) == ([0], 1.0)


def test_a_member_that_waits_for_min_members_is_not_reported_missing():
    world = PureWorld(3, 3)
    step(world.members)
    world.kill(*world.members[1:])
    rest, newcomer = world.members[0], world.join(1)
    newcomer.forward(1.0)
    world.pass_time(30.0)
    rest.forward(1.0)
    world.pass_time(31.0)
    error = newcomer.latest(RoundTimeout)
    assert "enough ranks (2 of min_members 3 are there)" in str(error)
    assert error.fields["missing"] == []


def test_a_member_that_fails_during_recovery_is_not_waited_for():
    world = PureWorld(2, 1)
    first, second = world.members
    world.restart()
    first.forward(1.0)
    world.send(first, first.session.leave("MemoryError: full"))
    world.silent.add(first)
    second.forward(1.0)
    world.pass_time(4.0)
    assert second.total == ([1], 1.0)


def test_the_only_member_of_an_elastic_job_still_sends_its_rows(server, job):
    layer = client.convert_model(torch.nn.BatchNorm1d(2))
    given = {"job": job, "policy": "elastic", "round_timeout": 20.0}
    with client.connect(server.endpoint, rank=0, world_size=1, **given) as connection:
        layer(torch.randn(3, 2))
        assert (connection.rounds, connection.members) == (1, [0])


# The gradient.


@pytest.mark.parametrize("kind", [Exchange, *([NativeExchange] if native.core else [])])
def test_after_a_loss_between_forward_and_backward_the_gradient_is_that_of_the_survivors_loss(kind):
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(size, 3, 4, generator=generator, dtype=torch.float64) for size in (2, 5, 3)]
    factors = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in xs]
    master = MemoryMaster()
    forward_done = threading.Barrier(3)

    def member(number: int) -> torch.Tensor:
        connection = master.connect(number, 3, min_members=1)
        x = xs[number].clone().requires_grad_()
        exchange, mine = kind(SlavePipe(connection, "bn"), "bn", 1e-5, "plus"), Slice(x, None, None)
        y = batch_norm([mine], exchange)[0] if kind is Exchange else plain_batch_norm(exchange, x, None, None)
        forward_done.wait(timeout=20)
        if number == 1:
            connection.close(cause="MemoryError: full")
            return torch.zeros(0)
        (y * factors[number]).sum().backward()
        assert list(connection.members) == [0, 2]
        connection.close()
        return x.grad

    gradients = in_threads([lambda number=number: member(number) for number in range(3)])
    whole = torch.cat(xs).requires_grad_()
    slices = torch.nn.functional.batch_norm(whole, None, None, training=True).split([len(x) for x in xs])
    sum((slices[number] * factors[number]).sum() for number in (0, 2)).backward()
    expected = whole.grad.split([len(x) for x in xs])
    for number in (0, 2):
        torch.testing.assert_close(gradients[number], expected[number], rtol=0, atol=1e-13)
    assert expected[1].abs().max() > 0.01, "the survivors' loss depends on the lost member's slice, too"


def test_a_newcomer_that_registers_between_two_restarts_starts_after_the_others():
    world = PureWorld(2, 1)
    forward(world.members, 1.0)
    world.restart()
    newcomer = world.join(2)
    assert newcomer.registered.missing == 1
    world.restart()
    world.pass_time(1.5)
    newcomer.register()
    assert newcomer.session.first_step == 1


def test_a_member_replaced_before_the_opening_joins_as_a_newcomer():
    world = PureWorld(0, 1)
    world.world_size = 2
    late = world.join(0)
    world.silent.add(late)
    world.restart()
    for number in (1, 2):
        world.join(number)
    world.silent.remove(late)
    late.register()
    assert (late.registered.missing, late.session.first_step) == (0, 1)


def test_a_newcomer_starts_after_a_result_reported_by_a_member_that_left():
    world = PureWorld(2, 1)
    forward(world.members, 1.0)
    world.kill(world.members[1])
    world.restart()
    newcomer = world.join(1)
    world.members[0].introduce()
    world.send(world.members[0], world.members[0].session.leave(""))
    world.silent.add(world.members[0])
    world.pass_time(1.0)
    assert (newcomer.registered.missing, newcomer.session.first_step) == (0, 1)


EPOCHS = 8


def test_after_a_kill_and_with_a_newcomer_all_end_with_the_same_bits_and_no_sample_lost_or_repeated(server, job):
    with ExitStack() as stack:
        start = partial(started, server.endpoint, job, world_size=3, epochs=EPOCHS)
        first, killed, third, newcomer = (stack.enter_context(start(member=member)) for member in range(4))
        for member in (first, killed, third):
            member.go()
        # Members commit after batches 3, 6 and so on, so the kill undoes the work since batch 6.
        killed.wait_for_batch(8)
        killed.process.kill()
        # At batch 20 the other two know of the kill.
        first.wait_for_batch(20)
        newcomer.go()
        results = [member.result() for member in (first, third, newcomer)]
    for bits, times_learnt, batches in results:
        assert bits == results[0][0]
        assert times_learnt == [float(EPOCHS)] * SAMPLES
        assert batches > 0
