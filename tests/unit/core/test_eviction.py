"""Eviction: registrations alone keep nobody out."""

from typing import Any

from server.core.dispatcher import Dispatcher
from server.limits.access import ANYBODY, Tenant
from server.limits.quota import Quota
from statsd_bn.messages import Failure, Message, Registered
from statsd_bn.wire import decode, encode
from support.strategies import contribution, key, register, rows, session_of

FULL = 16


class Play:
    """A dispatcher that is soon full."""

    def __init__(self, **quota: float) -> None:
        self.dispatcher = Dispatcher(b"server-0", 0.0, quota=Quota(**{"max_groups": FULL, **quota}))

    def say(self, peer: bytes, message: Message, **given: Any) -> dict[bytes, Any]:
        return {
            whom: decode(frame) for whom, frame in self.dispatcher.receive(0.0, peer, encode(message), **given).replies
        }

    def begin(self, number: int, peer: bytes, tenant: Tenant = ANYBODY, **given: Any) -> dict[bytes, Any]:
        """A group that waits for a second member."""
        job = given.pop("job", f"{number:05d}")
        return self.say(peer, register(0, session=b"%08d" % number, job=job, **given), tenant=tenant)

    def train(self, job: str = "train") -> None:
        for member in (0, 1):
            self.say(b"honest %d" % member, register(member, job=job))
        for member in (0, 1):
            self.say(b"honest %d" % member, contribution(member, key=key(job=job)))

    @property
    def jobs(self) -> set[str]:
        return {group["job"] for group in self.dispatcher.report(0.0)["groups"]}


def test_whoever_fills_the_server_alone_makes_way_for_a_newcomer():
    play = Play()
    for number in range(10 * FULL):
        play.begin(number, b"crowd")
    answers = play.begin(9999, b"honest", job="honest")
    assert isinstance(answers[b"honest"], Registered)
    assert answers[b"crowd"].code == "limit"
    assert "honest" in play.jobs


def test_who_began_fewer_keeps_its_group_while_the_crowd_goes_round():
    play = Play()
    play.begin(9999, b"honest", job="honest")
    for number in range(10 * FULL):
        play.begin(number, b"crowd")
    assert "honest" in play.jobs
    assert len(play.jobs) == FULL * 7 // 8


def test_a_group_that_completed_a_round_is_safe():
    play = Play()
    play.train()
    for number in range(10 * FULL):
        play.begin(number, b"peer %d" % number)
    assert "train" in play.jobs


def test_a_job_at_work_finds_room_for_groups_of_its_hosts_where_a_new_job_does_not():
    play = Play()
    play.train()
    for number in range(10 * FULL):
        play.begin(number, b"peer %d" % number)
    before = play.jobs
    answers = play.say(b"honest 0", register(0, job="train", group="host", session=b"pair---0"))
    assert set(answers) == {b"honest 0"}
    assert play.jobs == before


def test_a_crowd_of_groups_at_work_over_one_connection_gives_way_as_well():
    play = Play()
    for number in range(FULL):
        job, session = f"{number:05d}", b"%08d" % number
        play.say(b"crowd", register(0, 1, job=job, session=session))
        play.say(b"crowd", contribution(0, key=key(job=job), session=session))
    assert isinstance(play.begin(9999, b"honest", job="honest")[b"honest"], Registered)


def test_a_server_full_of_work_of_many_refuses_a_newcomer():
    play = Play()
    for number in range(FULL * 7 // 8):
        job, session = f"{number:05d}", b"%08d" % number
        play.say(b"peer %d" % number, register(0, 1, job=job, session=session))
        play.say(b"peer %d" % number, contribution(0, key=key(job=job), session=session))
    (answer,) = play.begin(9999, b"one more", job="honest").values()
    assert (answer.code, answer.fields) == ("limit", {"limit": FULL, "what": "groups"})


def test_where_jobs_are_few_a_whole_job_gives_way():
    play = Play(max_jobs=2)
    for number in range(4):
        play.begin(number, b"crowd", job="crowd", group=f"group {number}")
    play.train()
    answers = play.begin(9999, b"honest", job="honest")
    assert isinstance(answers[b"honest"], Registered)
    assert play.jobs == {"train", "honest"}


def test_a_tenant_with_many_keys_leaves_as_many_groups_as_it_has():
    keys = [Tenant(f"key {number}", f"secret {number}", ("*",), "team") for number in range(4)]
    bob = Tenant("bob", "key of bob", ("*",))
    play = Play()
    answers = []
    for number in range(4 * FULL):
        answers += play.begin(number, b"team", tenant=keys[number % 4]).values()
    assert sum(isinstance(answer, Registered) for answer in answers) == FULL // 2
    assert {answer.code for answer in answers if isinstance(answer, Failure)} == {"limit"}
    assert isinstance(play.say(b"bob", register(0), tenant=bob)[b"bob"], Registered)


def test_with_keys_nobody_gives_way():
    tenants = [Tenant(f"name {number}", f"key {number}", ("*",)) for number in range(2 * FULL)]
    play = Play()
    for number, tenant in enumerate(tenants):
        play.say(b"peer", register(0, job=f"{number:05d}", session=b"%08d" % number), tenant=tenant)
    assert len(play.jobs) == FULL * 7 // 8
    assert "00000" in play.jobs


def test_no_tenant_gives_way_to_another_one_that_wants_to_keep_more():
    wide = contribution(0, rows(1.0, channels=60_000), key(job="large"))
    one, other = Tenant("one", "key of one", ("*",)), Tenant("other", "key of another", ("*",))
    play = Play(max_server_bytes=900_000, max_tenant_bytes=900_000)
    for member in (0, 1):
        play.say(b"one %d" % member, register(member, job="large"), tenant=one)
    assert play.say(b"one 0", wide, tenant=one) == {}
    for member in (0, 1):
        session = b"other00%d" % member
        play.say(b"other %d" % member, register(member, job="small", session=session), tenant=other)
    asked = [contribution(0, rows(1.0, channels=60_000), key(job="small", step=step), b"other000") for step in (0, 1)]
    answers = [play.say(b"other 0", message, tenant=other) for message in asked]
    assert [answer[b"other 0"].code for answer in answers] == ["limit", "limit"]
    assert play.jobs == {"large", "small"}


def test_a_group_that_was_replaced_by_a_later_epoch_is_counted_once():
    play = Play()
    for epoch in range(3):
        play.say(b"peer", register(0, epoch=epoch, session=session_of(epoch)))
    assert play.jobs == {"job"}
    assert set(play.dispatcher._registry.founders) == {("job", "world")}
