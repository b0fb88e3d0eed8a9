"""Rounds in the dispatcher, its report, and its state after a restart."""

from dataclasses import replace

import numpy as np
import pytest

from server.security.quota import CONTRIBUTION_BYTES, FUTURE_BYTES, GROUP_BYTES, MEMBER_BYTES, ROUND_BYTES
from statsd_bn import limits
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Heartbeat, Registered, Result, Status, StatusRequest, digest
from statsd_bn.wire import encode
from support.dispatcher_play import SERVER, Play, codes, peer, read
from support.strategies import KEY, contribution, key, rows, session_of

STRANGER = b"stranger"


@pytest.fixture
def play() -> Play:
    return Play()


def test_two_jobs_with_the_same_layer_names_do_not_touch_each_other(play):
    for job in ("left", "right"):
        play.open(job=job)
    assert play.contribute(0, 1.0, key(job="left")) == {}
    assert play.contribute(0, 10.0, key(job="right")) == {}
    right = play.contribute(1, 20.0, key(job="right"))
    assert {peer_id: answer.values.item() for peer_id, answer in right.items()} == {b"right 0": 30.0, b"right 1": 30.0}
    left = play.contribute(1, 2.0, key(job="left"))
    assert {peer_id: answer.values.item() for peer_id, answer in left.items()} == {b"left 0": 3.0, b"left 1": 3.0}


def test_an_unknown_session_gets_an_error_for_its_round(play):
    play.open()
    answers = play.send(contribution(0, session=STRANGER), b"who")
    assert codes(answers) == {b"who": "unknown_session"}
    assert answers[b"who"].key == KEY
    assert digest(STRANGER).hex() in answers[b"who"].message
    assert play.contribute(0) == {}


def test_a_later_epoch_of_a_group_adds_no_group(play):
    for number in range(limits.MAX_GROUPS):
        play.join(0, job=f"{number:05d}")
    answers = play.join(0, job="01023", epoch=1)
    assert isinstance(answers[peer(0, "01023")], Registered)
    assert len(answers) == 1


def test_stop_sends_an_error_to_waiting_members_of_every_job(play):
    for job in ("left", "right"):
        play.open(job=job)
        play.contribute(1, 1.0, key(job=job))
    answers = read(play.dispatcher.stop())
    assert codes(answers) == dict.fromkeys([b"left 1", b"right 1"], "master_stopped")
    assert play.dispatcher.stop() == []


def test_stop_sends_an_error_to_members_that_wait_for_a_group_to_open(play):
    play.join(0, 3)
    play.join(2, 3)
    answers = read(play.dispatcher.stop())
    assert codes(answers) == dict.fromkeys([peer(0), peer(2)], "master_stopped")
    failure = answers[peer(0)]
    text = "the server stopped before the group was complete\n  in job 'job', group 'world'"
    assert (failure.key, failure.message) == (None, text)


def test_a_status_report_shows_the_work_of_the_server(play):
    play.open(place="host 1")
    play.contribute(0, rows(1.0, 2.0))
    play.dispatcher.receive(play.now, b"", b"garbage")
    play.now += 2.5
    status = play.send(StatusRequest(), b"anybody")[b"anybody"]
    assert isinstance(status, Status)
    where = {"layer": KEY.layer, "phase": KEY.phase, "step": KEY.step}
    members = [
        {"member": member, "place": "host 1", "participation": "takes_part", "step": 0, "replicas": replicas}
        for member, replicas in ((0, 2), (1, 0))
    ]
    group = {"job": "job", "group": "world", "epoch": 0, "world_size": 2, "min_members": 0, "members": members}
    group |= {"missing": 0, "lost": "", "rounds_done": 0, "rounds_failed": 0, "non_finite": []}
    group["kept_bytes"] = GROUP_BYTES + 2 * MEMBER_BYTES + ROUND_BYTES + 2 * FUTURE_BYTES + CONTRIBUTION_BYTES + 16
    group["waiting"] = [{"round": str(KEY), "seconds": 2.5, "missing": [1], **where}]
    refusals = ("over_limits", "strangers", "refused_connections", "flooding_connections", "dropped_answers")
    counts = {"seconds": 2.5, "received": 5, "bad_frames": 1, **dict.fromkeys(refusals, 0)}
    assert status.report == {"server": SERVER.hex(), **counts, "ended": [], "groups": [group]}


@pytest.mark.parametrize(
    ("min_members", "latest"), [(0, [255, 255]), (1, [255, 151])], ids=["strict, in lockstep", "elastic"]
)
@pytest.mark.parametrize("transport", ["server", "shared_memory"])
def test_the_report_shows_the_latest_known_step_of_a_member(play, transport, min_members, latest):
    """In shared memory heartbeats report the step; a rank of a strict group is in the latest step of any."""
    play.open(min_members=min_members)
    for member, step in ((1, 151), (0, 255)):
        if transport == "server":
            play.contribute(member, key=key(step=step))
        else:
            heartbeat = Heartbeat(session_of(member), step, 2 * step, transport, "", 0)
            play.dispatcher.receive(play.now, b"beacon", encode(heartbeat))
    assert [member["step"] for member in play.report["groups"][0]["members"]] == latest
    play.leave(1, cause="OutOfMemoryError: 2 GiB")
    assert play.report["groups"][0]["lost"].endswith("" if min_members else "step 255")


# After a restart, before the last member returns.

BEFORE = {"server": b"server-9", "step": 1, "known": Members.of(range(3))}
LATE = key(step=1)


@pytest.fixture
def returning(play) -> Play:
    for member in range(2):
        play.join(member, 3, **BEFORE)
    return play


def kept_bytes(play: Play) -> int:
    (group,) = play.report["groups"]
    return group["kept_bytes"]


def test_a_repeated_message_is_kept_once_and_answered_at_the_latest_address(returning):
    returning.contribute(0, 1.0, LATE)
    once = kept_bytes(returning)
    for attempt in range(1, 9):
        returning.send(replace(contribution(0, 1.0, LATE), attempt=attempt), b"socket %d" % attempt)
    assert kept_bytes(returning) == once
    returning.contribute(1, 2.0, LATE)
    returning.join(2, 3, **BEFORE)
    answers = returning.contribute(2, 3.0, LATE)
    assert set(answers) == {b"socket 8", peer(1), peer(2)}
    assert answers[b"socket 8"].values.item() == 6.0


def test_different_rows_for_an_open_round_are_refused_and_the_first_are_used(returning):
    returning.contribute(0, 1.0, LATE)
    assert codes(returning.contribute(0, 5.0, LATE)) == {peer(0): "conflict"}
    returning.contribute(1, 2.0, LATE)
    returning.join(2, 3, **BEFORE)
    assert returning.contribute(2, 3.0, LATE)[peer(0)].values.item() == 6.0


def test_a_member_with_many_rounds_takes_no_room_from_another(returning):
    for call in range(limits.MAX_OPEN_ROUNDS):
        assert returning.contribute(0, 1.0, key(step=1, call=call)) == {}
    assert codes(returning.contribute(0, 1.0, key(step=1, call=limits.MAX_OPEN_ROUNDS))) == {peer(0): "limit"}
    assert returning.contribute(1, 1.0, LATE) == {}


def test_results_that_were_not_announced_are_not_kept(play):
    play.join(0, 3, **BEFORE, results=1)

    def kept_bytes_after(layer: str) -> int:
        aggregate = Aggregate(key(layer, step=1), 1, 1, Members.of(range(3)), np.zeros((1, 1)))
        assert play.send(Result(session_of(0), aggregate), peer(0)) == {}
        return kept_bytes(play)

    assert 0 < kept_bytes_after("bn") == kept_bytes_after("bn") == kept_bytes_after("another")


def test_membership_news_go_to_the_address_from_which_a_member_last_registered(returning):
    returning.send(contribution(0, 1.0, LATE), b"another socket")
    answers = returning.join(2, 3, **BEFORE)
    assert isinstance(answers[peer(0)], Registered)
