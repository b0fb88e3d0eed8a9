import json

from server.view.snapshot import MAX_EVENTS, SnapshotBuilder
from support.view_reports import group, member, report

ROUND = {"round": "layer 'bn1'", "seconds": 2.0, "missing": [1]}


def test_rates_come_from_two_reports():
    watcher = SnapshotBuilder("tcp://x:1")
    first = watcher.update(10.0, report(group(member(0, step=5))))
    assert first["groups"][0]["rounds_per_second"] is None
    assert first["groups"][0]["members"][0]["steps_per_second"] is None
    second = watcher.update(12.0, report(group(member(0, step=9), rounds_done=200)))
    assert second["groups"][0]["rounds_per_second"] == 50
    assert second["groups"][0]["members"][0]["steps_per_second"] == 2


def test_a_new_epoch_has_no_rate_of_the_old_one():
    watcher = SnapshotBuilder("tcp://x:1")
    watcher.update(10.0, report(group(member(0))))
    now = watcher.update(11.0, report(group(member(0), epoch=1, rounds_done=300)))
    assert now["groups"][0]["rounds_per_second"] is None


def test_it_says_who_waits_and_who_is_awaited():
    shown = SnapshotBuilder("x").update(0.0, report(group(member(0), member(1), waiting=[ROUND])))
    doing = [told["doing"] for told in shown["groups"][0]["members"]]
    assert doing == ["waits 2.0 s: layer 'bn1'", "awaited 2.0 s: layer 'bn1'"]
    cut = SnapshotBuilder("x").update(
        0.0, report(group(member(0), member(1), waiting=[ROUND | {"missing_left_out": 3}]))
    )
    assert cut["groups"][0]["members"][0]["doing"] == ""


def test_a_server_that_is_silent_is_told_once_and_its_return_too():
    watcher = SnapshotBuilder("x")
    watcher.update(0.0, report(group(member(0))))
    watcher.fail(1.0, "no answer")
    silent = watcher.fail(2.0, "no answer")
    assert silent["error"] == "no answer"
    assert silent["groups"][0]["job"] == "digits"
    back = watcher.update(3.0, report(group(member(0))))
    assert back["error"] == ""
    assert [(event["time"], event["kind"]) for event in back["events"]] == [(1.0, "silent"), (3.0, "answers")]


def test_events_are_bounded_and_a_snapshot_is_json():
    watcher = SnapshotBuilder("x")
    for number in range(MAX_EVENTS + 5):
        shown = watcher.update(float(number), report(server=str(number)))
    assert len(shown["events"]) == MAX_EVENTS
    assert json.loads(json.dumps(shown)) == shown
