"""The client's session, without I/O: round keys that agree on all members, and recognition of answers."""

import numpy as np
import pytest

from client.session.protocol.member import Member
from client.session.protocol.session import Session
from statsd_bn.errors import DuplicateMember, ReplicaLost, RoundMismatch
from statsd_bn.members import NO_MEMBERS, Members
from statsd_bn.messages import Aggregate, Contribution, Failure, Leave, Register, Registered, digest
from statsd_bn.reduction import Rows
from statsd_bn.round_key import BACKWARD
from statsd_bn.wire import decode, encode

TOKEN = b"session0"


def walk(session, forward):
    session.steps.record_phase(forward.of_phase(BACKWARD).phase)


@pytest.fixture
def session():
    return Session(TOKEN, Member("job", "world", 2, 1, 3, 600.0, "here"))


def test_a_session_registers_with_its_identity(session):
    assert decode(session.register()) == Register(TOKEN, "job", "world", 2, 1, 3, 0, 600.0, "here")


def test_a_session_in_a_group_has_the_members_number_in_the_job():
    session = Session(TOKEN, Member("job", "pair", 2, 7, 2, 600.0, "here"))
    message = decode(session.register())
    assert (message.group, message.member, message.world_size) == ("pair", 7, 2)
    assert session.forward_key("a").group == "pair"


def test_a_session_registers_again_with_its_server_and_step(session):
    session.registered(encode(Registered(digest(TOKEN), b"server-0", 2, 0, 0, NO_MEMBERS)))
    walk(session, session.forward_key("a"))
    session.forward_key("a")
    again = decode(session.register())
    assert (again.session, again.server, again.step) == (TOKEN, b"server-0", 1)


def test_a_session_leaves_with_the_cause_cut_to_the_limit(session):
    assert decode(session.leave("boom")) == Leave(TOKEN, "boom")
    cut = decode(session.leave("é" * 5000))
    assert len(cut.cause.encode()) == 4096


def test_forward_rounds_count_the_calls_of_each_layer(session):
    keys = [session.forward_key(layer) for layer in ("a", "b", "a", "a")]
    assert [(key.step, key.layer, key.call) for key in keys] == [(0, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a", 2)]
    assert {(key.job, key.group, key.epoch, key.phase) for key in keys} == {("job", "world", 2, "forward")}


def test_a_step_begins_with_the_first_forward_after_a_backward(session):
    first = session.forward_key("a")
    assert session.forward_key("a").step == 0
    walk(session, first)
    assert session.forward_key("b").step == 1
    assert session.forward_key("a").step == 1
    assert session.forward_key("a").call == 1


def test_a_step_also_begins_after_a_backward_round_of_an_earlier_step(session):
    early = session.forward_key("a")
    walk(session, session.forward_key("b"))
    assert session.forward_key("b").step == 1
    walk(session, early)
    assert session.forward_key("b").step == 2


def test_a_contribution_carries_its_session_and_rows(session):
    rows = Rows((3,), np.arange(4.0).reshape(1, 2, 2))
    key = session.forward_key("a")
    message = decode(session.contribution(key, rows))
    assert isinstance(message, Contribution)
    assert (message.session, message.key, message.attempt, message.rows.counts) == (TOKEN, key, 0, (3,))
    assert message.rows.values.tobytes() == rows.values.tobytes()


def test_a_session_accepts_only_the_aggregate_of_its_round(session):
    mine, other = session.forward_key("a"), session.forward_key("a")
    frame = encode(Aggregate(mine, 2, 6, Members.of(range(3)), np.ones((2, 2))))
    assert session.answer(mine, frame).count == 6
    assert session.answer(other, frame) is None


def test_a_session_accepts_only_registered_as_the_answer_to_register(session):
    answer = Registered(digest(TOKEN), b"server-0", 2, 0, 2, Members.of([1]))
    assert session.registered(encode(answer)) == answer
    key = session.forward_key("a")
    assert session.registered(encode(Aggregate(key, 1, 1, NO_MEMBERS, np.ones((2, 2))))) is None


def test_a_session_ignores_an_answer_for_another_session(session):
    assert session.registered(encode(Registered(b"another0", b"server-0", 2, 0, 0, NO_MEMBERS))) is None


def test_a_failure_of_its_round_is_raised_as_the_masters_error(session):
    key = session.forward_key("a")
    frame = encode(Failure("replica_lost", "member 2 failed", {"member": 2, "cause": "boom"}, key))
    with pytest.raises(ReplicaLost, match="member 2 failed") as caught:
        session.answer(key, frame)
    assert caught.value.fields == {"member": 2, "cause": "boom"}


def test_a_failure_of_another_round_is_not_its_answer(session):
    key, other = session.forward_key("a"), session.forward_key("a")
    assert session.answer(key, encode(Failure("mismatch", "no", {}, other))) is None


def test_a_failure_of_no_round_concerns_every_waiting_session(session):
    with pytest.raises(RoundMismatch):
        session.answer(session.forward_key("a"), encode(Failure("mismatch", "no", {})))


def registered(first_step=0):
    return encode(Registered(digest(TOKEN), b"server-0", 2, first_step, 0, Members.of(range(3))))


@pytest.mark.parametrize("is_said_in_the_round", [True, False])
def test_a_session_accepted_again_at_a_later_step_waits_for_no_earlier_round(session, is_said_in_the_round):
    session.on_unsolicited(registered())
    key = session.forward_key("a")
    if not is_said_in_the_round:
        session.on_unsolicited(registered(first_step=5))
    with pytest.raises(ReplicaLost, match="rank 1 was declared lost, and rejoined at step 5"):
        session.answer(key, registered(first_step=5))
    assert session.forward_key("a").step == 5


def refusal(**others):
    fields = {"job": "job", "group": "world", "member": 1, "place": "elsewhere"} | others
    return encode(Failure("duplicate_member", "there is a rank 1 already", fields))


def test_a_session_that_knows_of_a_duplicate_accepts_no_answer_and_does_not_register_again(session):
    session.on_unsolicited(registered())
    unknown = encode(Failure("unknown_session", "who?", {"digest": digest(TOKEN).hex()}))
    assert session.on_unsolicited(unknown) == session.resync_frames()
    assert session.on_unsolicited(refusal()) == []
    assert session.on_unsolicited(unknown) == []
    key = session.forward_key("a")
    with pytest.raises(DuplicateMember, match="there is a rank 1 already"):
        session.answer(key, encode(Aggregate(key, 2, 6, Members.of(range(3)), np.ones((2, 2)))))
    assert decode(session.register()).results == 0


def test_a_session_that_learnt_of_a_duplicate_in_a_round_accepts_no_later_answer(session):
    session.on_unsolicited(registered())
    key = session.forward_key("a")
    frame = encode(Aggregate(key, 2, 6, Members.of(range(3)), np.ones((2, 2))))
    for reply in (refusal(), frame):
        with pytest.raises(DuplicateMember, match="there is a rank 1 already"):
            session.answer(key, reply)
    assert session.on_unsolicited(encode(Failure("unknown_session", "who?", {"digest": digest(TOKEN).hex()}))) == []


@pytest.mark.parametrize("others", [{"job": "other"}, {"group": "pair"}, {"member": 2}, {}])
def test_a_refusal_of_another_session_or_before_the_group_opens_does_not_affect_a_session(session, others):
    frames = [registered(), refusal(**others)]
    for frame in frames if others else reversed(frames):
        session.on_unsolicited(frame)
    key = session.forward_key("a")
    frame = encode(Aggregate(key, 2, 6, Members.of(range(3)), np.ones((2, 2))))
    assert session.answer(key, frame).count == 6
