"""What one member brings for several: as if each had contributed itself, and all or nothing."""

import numpy as np
import pytest

from server.core.dispatcher import Dispatcher
from server.limits.access import ANYBODY, Tenant
from server.limits.quota import Quota
from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Carried, Failure, Heartbeat, Leave, Pending, Register, StatusRequest
from statsd_bn.round_key import GATHER, RoundKey
from statsd_bn.rows import Rows
from statsd_bn.wire import decode, encode
from support.strategies import KEY, contribution, key, register, session_of

WORLD = 5
ALICE, BOB = Tenant("alice", "key of alice", ("*",)), Tenant("bob", "key of bob", ("*",))


def rows_of(member: int, replicas: int = 1, channels: int = 3) -> Rows:
    chance = np.random.default_rng(member)
    return Rows((member + 1,) * replicas, chance.standard_normal((replicas, 2, channels)) * 10.0**member)


def carried(speaker: int, *members: int, key: RoundKey = KEY, rows=rows_of) -> Carried:
    parts = [rows(member) for member in members]
    sessions = b"".join(session_of(member) for member in members)
    together = Rows(tuple(count for part in parts for count in part.counts), np.concatenate([p.values for p in parts]))
    return Carried(session_of(speaker), sessions, key, together)


class Server:
    """A dispatcher to which messages are said; each member has a socket of its own."""

    def __init__(
        self, quota: Quota | None = None, tenants: dict[int, Tenant] | None = None, members: int = WORLD
    ) -> None:
        self.dispatcher = Dispatcher(b"server-0", 0.0, quota)
        self.tenants = tenants or {}
        for member in range(members):
            self.say(member, register(member, WORLD))

    def say(self, member: int, message) -> dict[bytes, list]:
        tenant = self.tenants.get(member, ANYBODY)
        found: dict[bytes, list] = {}
        for peer, frame in self.dispatcher.receive(1.0, b"socket %d" % member, encode(message), tenant).replies:
            found.setdefault(peer, []).append(decode(frame))
        return found

    @property
    def waiting(self) -> list[dict]:
        (group,) = self.dispatcher.report(1.0)["groups"]
        return group["waiting"]


def by_themselves(rows=rows_of, key: RoundKey = KEY) -> Aggregate:
    server = Server()
    *_, last = [server.say(member, contribution(member, rows(member), key)) for member in range(WORLD)]
    return last[b"socket 0"][0]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("hosts", [[(1, 0, 1, 2), (4, 3, 4)], [(0, 4, 0, 2), (3, 1, 3)], [(2, 4, 3, 2, 1, 0)]])
def test_the_sum_is_that_of_the_same_rows_from_each(replicas, hosts):
    def rows(member):
        return rows_of(member, replicas)

    server = Server()
    *first, last = [server.say(host[0], carried(*host, rows=rows)) for host in hosts]
    assert not any(first)
    assert {peer: len(told) for peer, told in last.items()} == {b"socket %d" % host[0]: 1 for host in hosts}
    expected = by_themselves(rows)
    for (aggregate,) in last.values():
        assert encode(aggregate) == encode(expected)


def test_some_may_be_carried_and_others_speak_for_themselves():
    server = Server()
    server.say(3, contribution(3, rows_of(3)))
    server.say(1, carried(1, 0, 1, 2))
    told = server.say(4, contribution(4, rows_of(4)))
    assert set(told) == {b"socket 1", b"socket 3", b"socket 4"}
    assert told[b"socket 1"][0].values.tobytes() == by_themselves().values.tobytes()


def test_one_that_was_carried_may_ask_itself_and_is_told_itself():
    server = Server()
    server.say(1, carried(1, 0, 1, 2))
    again = contribution(0, rows_of(0))
    assert server.say(0, again) == {}
    told = server.say(4, carried(4, 3, 4))
    assert set(told) == {b"socket 0", b"socket 1", b"socket 4"}
    assert [type(one) for one in server.say(2, contribution(2, rows_of(2)))[b"socket 2"]] == [Aggregate]


def test_other_rows_than_those_that_were_carried_are_a_conflict():
    server = Server()
    server.say(1, carried(1, 0, 1, 2))
    told = server.say(2, contribution(2, rows_of(3)))
    assert set(told) == {b"socket 1", b"socket 2"}
    for (failure,) in told.values():
        assert (failure.code, failure.fields["member"]) == ("conflict", 2)


def test_where_one_has_spoken_for_itself_only_the_speaker_counts():
    server = Server()
    server.say(0, contribution(0, rows_of(0)))
    assert server.say(1, carried(1, 0, 1, 2)) == {}
    assert server.waiting[0]["missing"] == [2, 3, 4]


def test_what_is_carried_twice_counts_once():
    server = Server()
    server.say(1, carried(1, 0, 1, 2))
    server.say(2, carried(2, 0, 1, 2))
    told = server.say(4, carried(4, 3, 4))
    assert set(told) == {b"socket 1", b"socket 2", b"socket 4"}
    assert {one.count for (one,) in told.values()} == {1 + 2 + 3 + 4 + 5}


def test_a_round_that_has_ended_is_answered_to_the_speaker():
    server = Server()
    server.say(4, carried(4, 0, 1, 2, 3, 4))
    (again,) = server.say(1, carried(1, 0, 1))[b"socket 1"]
    assert again.values.tobytes() == by_themselves().values.tobytes()


def test_rows_that_do_not_fit_end_the_round_for_all():
    server = Server()
    server.say(1, carried(1, 0, 1, 2))
    told = server.say(4, carried(4, 3, 4, rows=lambda member: rows_of(member, channels=4)))
    assert {peer: one.code for peer, (one,) in told.items()} == dict.fromkeys([b"socket 1", b"socket 4"], "mismatch")


def test_counts_beyond_what_is_exact_end_the_round():
    def most(member):
        return Rows((limits.MAX_COUNT,), rows_of(member).values)

    server = Server()
    server.say(1, carried(1, 0, 1, rows=most))
    (failure,) = server.say(4, carried(4, 3, 4, rows=most))[b"socket 4"]
    assert failure.code == "round_failed"


def test_bytes_are_not_carried():
    server = Server()
    server.say(1, carried(1, 0, 1, key=key(phase=GATHER), rows=lambda _: Rows((0,), np.ones((1, 1, 2)))))
    assert server.waiting[0]["missing"] == [0, 2, 3, 4]


def test_what_only_the_speaker_may_bring_counts_as_if_it_had_come_alone():
    server, other = Server(), Server()
    bytes_ = key(phase=GATHER)
    server.say(1, carried(1, 0, 1, key=bytes_, rows=lambda _: Rows((0,), np.ones((1, 1, 2000)))))
    other.say(1, contribution(1, Rows((0,), np.ones((1, 1, 2000))), bytes_))
    assert server.dispatcher.account.held == other.dispatcher.account.held


def test_whoever_was_carried_counts_as_waiting():
    server = Server()
    server.say(1, carried(1, 0, 1, 2, key=key("even")))
    server.say(4, carried(4, 3, 4, key=key("odd")))
    told = [decode(frame) for _, frame in server.dispatcher.tick(2.0)]
    assert [one.code for one in told if isinstance(one, Failure)] == ["mismatch"] * 2
    assert [row["members"] for row in told[0].fields["table"]] == [[0, 1, 2], [3, 4]]


def test_only_the_speaker_has_said_that_it_is_alive():
    server = Server()
    for now in range(2, 7):
        server.dispatcher.receive(float(now), b"socket 1", encode(carried(1, 0, 1, 2, key=key(call=now))))
        for alive in (2, 3, 4):
            server.dispatcher.receive(float(now), b"socket %d" % alive, encode(Heartbeat(session_of(alive))))
        server.dispatcher.tick(float(now))
    told = server.say(1, contribution(1, rows_of(1), key("next")))[b"socket 1"]
    assert (told[0].code, told[0].fields["member"]) == ("replica_lost", 0)


def test_an_elastic_group_carries_nobody():
    """A number may be another process's by then."""
    server = Server(members=0)
    for member in range(WORLD):
        server.say(member, register(member, WORLD, min_members=1))
    assert server.say(1, carried(1, 0, 1)) == {}
    assert server.waiting[0]["missing"] == [0, 2, 3, 4]


def test_while_a_group_recovers_the_speaker_waits_and_nobody_else():
    server = Server(members=0)
    known = Members.of(range(WORLD))
    for member in (0, 1):
        server.say(member, register(member, WORLD, server=b"server-9", known=known, step=3, first_step=0))
    assert server.say(1, carried(1, 0, 1)) == {}
    for member in (2, 3, 4):
        server.say(member, register(member, WORLD, server=b"server-9", known=known, step=3, first_step=0))
    assert server.waiting[0]["missing"] == [0, 2, 3, 4]


def test_two_rounds_at_once_are_two_threads():
    server = Server()
    server.say(1, carried(1, 0, 1, key=key("one")))
    server.say(1, carried(1, 0, 1, key=key("two")))
    sessions = server.dispatcher._registry.sessions
    assert [sessions[session_of(member)].contributor.threads for member in (0, 1, 2)] == [2, 2, 1]


def test_before_the_group_is_open_nobody_is_carried():
    server = Server(members=3)
    (failure,) = server.say(1, carried(1, 0, 1))[b"socket 1"]
    assert failure.code == "unknown_session"


def test_a_session_that_is_not_known_speaks_for_itself():
    server = Server()
    message = carried(1, 0, 1)
    strange = Carried(message.session, b"stranger" + session_of(1), KEY, message.rows)
    assert server.say(1, strange) == {}
    assert server.waiting[0]["missing"] == [0, 2, 3, 4]
    for member in (0, 2, 3, 4):
        told = server.say(member, contribution(member, rows_of(member)))
    assert told[b"socket 1"][0].values.tobytes() == by_themselves().values.tobytes()


def test_a_speaker_that_is_not_known_is_told_so():
    server = Server()
    message = carried(1, 0, 1)
    strange = Carried(b"stranger", session_of(0) + b"stranger", KEY, message.rows)
    assert server.say(1, strange)[b"socket 1"][0].code == "unknown_session"
    assert server.waiting == []


def test_whoever_does_not_bring_its_own_rows_is_refused():
    """Also where the same members were carried before."""
    server = Server()
    server.say(1, carried(1, 0, 1, key=key("before")))
    (failure,) = server.say(2, carried(2, 0, 1))[b"socket 2"]
    assert (failure.code, failure.key) == (ProtocolError.code, None)


def test_no_error_shows_a_session():
    """They are secrets, and errors stand in logs."""
    secret = b"a secret"
    with pytest.raises(ProtocolError, match="all different, got 16 bytes") as refused:
        Carried(secret, secret + secret, KEY, rows_of(1))
    assert "secret" not in str(refused.value)


def test_a_session_of_another_group_is_refused():
    server = Server()
    for member in (0, 1):
        other = Register(b"pair-%d--" % member, "job", "pair", 0, member, 2, 0, 600.0, f"place {member}")
        server.say(member, other)
    message = carried(1, 0, 1)
    mixed = Carried(message.session, b"pair-0--" + session_of(1), KEY, message.rows)
    (failure,) = server.say(1, mixed)[b"socket 1"]
    assert failure.code == ProtocolError.code


def test_a_session_of_another_key_is_refused():
    server = Server(tenants={0: ALICE, 1: BOB, 2: BOB, 3: BOB, 4: BOB})
    (failure,) = server.say(1, carried(1, 0, 1))[b"socket 1"]
    assert (failure.code, failure.fields) == ("authentication", {"reason": "foreign session"})
    assert server.waiting == []
    assert server.say(1, carried(1, 2, 1)) == {}
    (failure,) = server.say(0, carried(1, 2, 1))[b"socket 0"]
    assert failure.code == "authentication", "nor may another key repeat it"


def test_one_that_has_left_is_not_carried_any_more():
    server = Server()
    server.say(1, carried(1, 0, 1))
    server.say(0, Leave(session_of(0), "it failed"))
    (failure,) = server.say(1, carried(1, 0, 1, key=key("next")))[b"socket 1"]
    assert failure.code == "replica_lost"


def test_limits_hold_for_each_member():
    server = Server(Quota(max_replicas=1, max_channels=3))
    assert server.say(1, carried(1, 0, 1)) == {}
    for rows in (lambda member: rows_of(member, replicas=2), lambda member: rows_of(member, channels=4)):
        (failure,) = server.say(1, carried(1, 0, 1, key=key("next"), rows=rows))[b"socket 1"]
        assert failure.code == "limit"
        assert failure.key == key("next")


def test_what_is_carried_is_accounted_for_until_it_is_forgotten():
    server = Server()
    other = Server()
    for number in range(3 * limits.KEPT_ROUNDS):
        for member in range(WORLD):
            other.say(member, contribution(member, rows_of(member), key(call=number)))
        server.say(1, carried(1, 0, 1, 2, key=key(call=number)))
        server.say(4, carried(4, 3, 4, key=key(call=number)))
    assert server.dispatcher.account.held == other.dispatcher.account.held


def test_where_there_is_no_room_nothing_is_begun():
    server = Server(Quota(max_tenant_bytes=25_000))
    (failure,) = server.say(1, carried(1, 0, 1, rows=lambda member: rows_of(member, channels=2000)))[b"socket 1"]
    assert failure.code == "limit"
    assert server.waiting == []


def test_the_speaker_came_last():
    server = Server()
    server.say(1, carried(1, 0, 1, 2))
    server.say(4, carried(4, 3, 4))
    (group,) = server.dispatcher.report(1.0)["groups"]
    assert {one["member"]: one.get("last", 0) for one in group["members"]} == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1}
    assert not isinstance(server.say(0, StatusRequest())[b"socket 0"][0], Pending)
