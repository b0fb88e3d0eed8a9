"""Tenants: a key can neither see nor change another key's jobs."""

import re
from dataclasses import replace
from typing import Any

import pytest

from server.core.dispatcher import Dispatcher
from server.security.access import ANONYMOUS, OPERATOR, REVOKED, Principal
from server.security.quota import Quota
from statsd_bn import messages
from statsd_bn.errors import ConfigurationError
from statsd_bn.keys import check_name
from statsd_bn.messages import Failure, Heartbeat, Leave, Registered, StatusRequest, digest
from statsd_bn.wire import decode, encode
from support.strategies import contribution, key, register, rows, session_of

ALICE = Principal("alice", "key of alice", ("a-*", "shared"))
BOB = Principal("bob", "key of bob", ("b-*", "shared"))
MINE = {"job": "a-1"}
PRINCIPALS = {tenant.key: tenant for tenant in (ALICE, BOB)}


class World:
    """A dispatcher with alice's members 0 and 1 in job a-1; a round waits for member 1."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(b"server-0", 0.0)
        for member in (0, 1):
            self.send(register(member, **MINE), ALICE, b"alice %d" % member)
        self.send(contribution(0, 1.0, key(**MINE)), ALICE, b"alice 0")

    def send(self, message: messages.Message, tenant: Principal, peer: bytes = b"bob") -> dict[bytes, Any]:
        replies = self.dispatcher.receive(0.0, peer, encode(message), tenant).replies
        return {peer_id: decode(frame) for peer_id, frame in replies}

    @property
    def group(self) -> dict[str, Any]:
        (group,) = self.dispatcher.report(0.0)["groups"]
        return group


@pytest.fixture
def world() -> World:
    return World()


def test_a_key_may_join_the_jobs_that_match_its_patterns():
    jobs = ("a-1", "shared", "b-1", "A-1", "shared2", "a")
    assert [ALICE.may_access(job) for job in jobs] == [True, True] + [False] * 4
    assert ANONYMOUS.may_access("whatever")


def test_the_refusal_of_a_foreign_job_names_the_job_and_the_key(world):
    (answer,) = world.send(register(0, session=b"session9", **MINE), BOB).values()
    assert answer.code == "refused"
    assert "'a-1'" in answer.message
    assert "'bob'" in answer.message
    assert "b-* or shared" in answer.message
    assert len(world.group["members"]) == 2


def test_a_later_epoch_of_a_foreign_job_replaces_nothing(world):
    (answer,) = world.send(register(0, session=b"session9", epoch=1, **MINE), BOB).values()
    assert answer.code == "refused"
    assert world.group["epoch"] == 0


AGGREGATE = messages.Aggregate(key(**MINE), 1, 1, register().known, rows(1.0).values[0])
SAID = [
    messages.Heartbeat(session_of(1, "a-1")),
    messages.Leave(session_of(1, "a-1"), "boom"),
    contribution(1, 5.0, key(**MINE)),
    messages.Result(session_of(1, "a-1"), AGGREGATE),
    register(1, job="b-1", session=session_of(1, "a-1")),
]


@pytest.mark.parametrize("message", SAID, ids=lambda message: type(message).__name__)
def test_only_the_key_that_registered_a_session_may_use_it(world, message):
    answers = world.send(message, BOB)
    assert set(answers) == {b"bob"}
    assert isinstance(answers[b"bob"], messages.Failure)
    assert (answers[b"bob"].code, answers[b"bob"].fields) == ("authentication", {"reason": "foreign session"})
    # alice's round continues, and she gets its answers.
    answers = world.send(contribution(1, 2.0, key(**MINE)), ALICE, b"alice 1")
    assert set(answers) == {b"alice 0", b"alice 1"}
    assert answers[b"alice 0"].values.item() == 3.0


def test_a_foreign_heartbeat_keeps_nobody_alive():
    world = World()
    for now in (1.0, 2.0, 3.0):
        for session in (session_of(0, "a-1"), session_of(1, "a-1")):
            world.dispatcher.receive(now, b"bob", encode(messages.Heartbeat(session)), BOB)
        world.dispatcher.tick(now)
    assert len(world.group["members"]) == 2
    world.dispatcher.tick(3.6)
    assert world.dispatcher.report(3.6)["groups"] == []


@pytest.mark.parametrize("message", [*SAID, register(0, job="new")], ids=lambda message: type(message).__name__)
def test_the_operator_may_only_request_the_status(world, message):
    operator = Principal(OPERATOR, "its key", read_only=True)
    before = world.group
    (answer,) = world.send(message, operator).values()
    assert (answer.code, answer.message.count("only ask")) == ("refused", 1)
    assert world.group == before
    assert world.send(messages.StatusRequest(), operator)[b"bob"].report["groups"] == [before]
    with pytest.raises(ConfigurationError):
        check_name(OPERATOR)


def test_the_status_shows_a_tenant_its_jobs_only(world):
    world.send(register(0, job="shared"), ALICE, b"alice")
    world.send(register(0, job="b-1"), BOB)
    seen = {
        tenant.name: [group["job"] for group in world.send(messages.StatusRequest(), tenant)[b"bob"].report["groups"]]
        for tenant in (ALICE, BOB, ANONYMOUS)
    }
    assert seen == {"alice": ["a-1", "shared"], "bob": ["shared", "b-1"], "anybody": ["a-1", "shared", "b-1"]}


def test_a_revoked_member_is_lost_with_the_reason(world):
    world.send(register(0, job="b-1"), BOB)
    replies = world.dispatcher.revoke(1.0, {BOB.key: BOB})
    answers = {peer_id: decode(frame) for peer_id, frame in replies}
    assert answers[b"alice 0"].code == "replica_lost"
    assert answers[b"alice 0"].fields["cause"] == REVOKED
    assert [group["job"] for group in world.dispatcher.report(1.0)["groups"]] == ["b-1"]


def test_a_key_that_loses_a_job_loses_its_members_there(world):
    world.send(register(0, job="shared"), ALICE, b"alice")
    narrowed = {ALICE.key: Principal("alice", ALICE.key, ("shared",)), BOB.key: BOB}
    world.dispatcher.revoke(1.0, narrowed)
    assert [group["job"] for group in world.dispatcher.report(1.0)["groups"]] == ["shared"]


def test_a_member_with_a_valid_key_is_not_expelled(world):
    assert world.dispatcher.revoke(1.0, PRINCIPALS) == []
    assert len(world.group["members"]) == 2


def test_only_the_revoked_member_of_a_job_is_lost(world):
    for member, tenant in ((0, ALICE), (1, BOB)):
        world.send(register(member, job="shared", min_members=1), tenant, tenant.name.encode())
    world.dispatcher.revoke(1.0, {ALICE.key: ALICE})
    groups = {group["job"]: group for group in world.dispatcher.report(1.0)["groups"]}
    assert [member["member"] for member in groups["shared"]["members"]] == [0]
    assert [member["member"] for member in groups["a-1"]["members"]] == [0, 1]


def begin(dispatcher: Dispatcher, tenant: Principal, **given: Any) -> messages.Message:
    """The answer to the first member of a new group."""
    ((_, frame),) = dispatcher.receive(0.0, b"peer", encode(register(0, **given)), tenant).replies
    return decode(frame)


def test_a_tenant_leaves_room_for_others():
    dispatcher = Dispatcher(b"server-0", 0.0, quota=Quota(max_tenant_groups=2))
    answers = [begin(dispatcher, ALICE, job="shared", group=f"{n}", session=b"alice %02d" % n) for n in range(4)]
    assert [type(answer) for answer in answers] == [Registered, Registered, Failure, Failure]
    assert (answers[3].code, answers[3].fields) == ("limit", {"limit": 2, "what": "groups of a tenant"})
    assert isinstance(begin(dispatcher, BOB, job="shared", group="bob's", session=b"of bob 0"), Registered)
    dispatcher.receive(0.0, b"peer", encode(Leave(b"alice 00", "")), ALICE)
    assert isinstance(begin(dispatcher, ALICE, job="shared", group="4", session=b"alice 04"), Registered)


def test_the_keys_of_a_tenant_together_take_at_most_half_of_the_groups():
    keys = [Principal(f"key {number}", f"secret {number}", ("*",), "team") for number in range(4)]
    dispatcher = Dispatcher(b"server-0", 0.0, quota=Quota(max_groups=16))
    answers = [begin(dispatcher, keys[n % 4], job=f"{n:05d}", session=b"%08d" % n) for n in range(32)]
    assert [type(answer) for answer in answers] == [Registered] * 8 + [Failure] * 24
    assert isinstance(begin(dispatcher, Principal("another", "its key", ("*",)), job="another"), Registered)


TOKENS = [session_of(member) for member in range(3)]


def test_no_frame_and_no_line_of_the_log_holds_a_token(caplog):
    caplog.set_level("DEBUG")
    dispatcher, replies = Dispatcher(b"server-0", 0.0), []

    def send(now, message, peer=b"peer"):
        replies.extend(dispatcher.receive(now, peer, encode(message)).replies)

    for member in range(2):
        send(0.0, register(member))
    send(0.1, register(1, session=TOKENS[0]))  # one session as two members
    send(0.1, register(2, world_size=3))
    send(0.1, register(1, session=TOKENS[2]))  # two sessions as one member
    send(0.2, contribution(0))
    send(0.2, replace(contribution(0), attempt=1))
    send(0.2, contribution(0, 7.0))
    send(0.2, contribution(2))
    send(0.2, Heartbeat(TOKENS[2]))
    send(0.3, StatusRequest())
    replies += dispatcher.probes(1.0)
    send(0.4, Leave(TOKENS[1], "ValueError: wrong"))
    send(0.5, contribution(1))
    send(0.5, register(1))
    replies += dispatcher.tick(60.0) + dispatcher.shutdown_notices() + dispatcher.stop()
    frames = [frame for _, frame in replies]
    codes = {answer.code for answer in map(decode, frames) if isinstance(answer, Failure)}
    assert {"protocol", "world_size", "duplicate_member", "conflict", "unknown_session", "refused"} <= codes
    data = b"\0".join([*frames, caplog.text.encode()])
    assert [token for token in TOKENS if token in data or token.hex().encode() in data] == []


def test_the_receiver_of_a_members_answers_cannot_act_as_that_member():
    """A stranger took over the connection from which the member registered, and reads its answers."""
    dispatcher = Dispatcher(b"server-0", 0.0)
    dispatcher.receive(0.0, b"stolen", encode(register(0)))
    answers = dict(dispatcher.receive(0.0, b"one", encode(register(1))).replies)
    answer = decode(answers[b"stolen"])
    assert isinstance(answer, Registered)
    for eight in re.findall(b"(?=(.{8}))", answers[b"stolen"], re.DOTALL):
        for forged in (contribution(0, session=eight), Heartbeat(eight)):
            ((_, refusal),) = dispatcher.receive(0.1, b"stolen", encode(forged)).replies
            assert decode(refusal).code == "unknown_session"
        dispatcher.receive(0.1, b"stolen", encode(Leave(eight, "")))
    assert len(dispatcher.report(0.2)["groups"][0]["members"]) == 2


def test_a_digest_is_computed_as_the_protocol_says():
    assert digest(bytes(range(1, 9))).hex() == "8dd34fc67738a407"
    assert digest(bytes(8)) != bytes(8)
