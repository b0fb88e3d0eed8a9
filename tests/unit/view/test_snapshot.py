import json

from server.view.snapshot import MAX_EVENTS, SnapshotBuilder, events
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


def test_a_snapshot_lists_waiting_and_awaited_members():
    shown = SnapshotBuilder("x").update(0.0, report(group(member(0), member(1), waiting=[ROUND])))
    doing = [told["doing"] for told in shown["groups"][0]["members"]]
    assert doing == ["waits 2.0 s: layer 'bn1'", "awaited 2.0 s: layer 'bn1'"]
    cut = SnapshotBuilder("x").update(
        0.0, report(group(member(0), member(1), waiting=[ROUND | {"missing_left_out": 3}]))
    )
    assert cut["groups"][0]["members"][0]["doing"] == ""


def test_a_silent_server_is_reported_once_and_so_is_its_return():
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


def kinds(before, now):
    return [(event["kind"], event["text"]) for event in events(before, now)]


def test_equal_reports_have_no_event():
    now = report(group(member(0), member(1), rounds_failed=1, lost="x", non_finite=["y"]))
    assert kinds(now, now) == []


def test_the_first_report_gives_only_its_own_events():
    assert kinds(None, report(group(member(0)))) == []
    assert kinds(None, report(group(member(0), lost="rank 1 is lost", non_finite=["inf"]))) == [
        ("lost", "rank 1 is lost"),
        ("non-finite", "inf"),
    ]


def test_members_join_leave_and_come_again_in_another_process():
    before = report(group(member(0), member(1)))
    again = member(1) | {"place": "host-1, pid 900"}
    assert kinds(before, report(group(member(0), again, member(2)))) == [
        ("joined", "rank 1 moved from host-1, pid 801 to host-1, pid 900"),
        ("joined", "rank 2 (host-2, pid 802) joined"),
    ]
    assert kinds(before, report(group(member(0)))) == [("left", "rank 1 (host-1, pid 801) left")]
    away = member(1) | {"participation": "paused"}
    assert kinds(before, report(group(member(0), away))) == [("left", "rank 1 (host-1, pid 801) is away")]


def test_members_that_a_report_has_no_room_for_have_not_left():
    assert kinds(report(group(member(0), member(1))), report(group(member(0), members_left_out=1))) == []


def test_rounds_that_failed_count_anew_in_each_epoch():
    before = report(group(member(0), rounds_failed=2))
    assert kinds(before, report(group(member(0), rounds_failed=3))) == [("mismatch", "1 round failed")]
    assert kinds(before, report(group(member(0), rounds_failed=2, epoch=1))) == [("mismatch", "2 rounds failed")]


def test_a_server_that_started_again_has_lost_no_job():
    now = report(server="efgh")
    assert kinds(report(group(member(0))), now) == [("restart", "the server started again as efgh")]


def test_a_missing_job_has_ended_or_was_lost():
    before = report(group(member(0)))
    assert kinds(before, report()) == [("ended", "ended")]
    gone = {"job": "digits", "lost": "rank 0 is lost", "seconds": 1.0}
    assert kinds(before, report(ended=[gone])) == [("lost", "rank 0 is lost")]


def test_a_finding_is_reported_once():
    finding = {"kind": "straggler", "rank": 2, "step": 7, "text": "rank 2 held the others up"}
    told = report(group(member(0), findings=[finding]))
    assert kinds(report(group(member(0))), told) == [("straggler", "rank 2 held the others up")]
    assert kinds(told, report(group(member(0), findings=[finding | {"text": "still"}]))) == []


def test_of_several_runs_of_one_name_the_latest_end_counts():
    well = {"job": "digits", "epoch": 1, "lost": "", "seconds": 1.0}
    broken = {"job": "digits", "epoch": 0, "lost": "rank 0 failed", "seconds": 60.0}
    before = report(group(member(0)))
    assert kinds(before, report(ended=[well, broken])) == [("ended", "ended")]
    assert kinds(before, report(ended=[broken, well])) == [("lost", "rank 0 failed")]


def test_a_group_that_ends_in_a_running_job_does_not_get_an_earlier_runs_end():
    broken = {"job": "digits", "epoch": 0, "lost": "rank 0 failed", "seconds": 60.0}
    before = report(group(member(0)), group(member(0), group="pair"))
    assert kinds(before, report(group(member(0)), ended=[broken])) == [("ended", "ended")]
