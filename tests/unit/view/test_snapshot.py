import json

import pytest

from server.view.snapshot import MAX_EVENTS, MAX_OVER, MAX_TRENDS, SnapshotBuilder, events
from support.view_reports import ended, figures, group, layer, member, report, skew, straggler, waiting

ROUND = waiting(2.0, 1)


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
    snapshot = SnapshotBuilder("x").update(0.0, report(group(member(0), member(1), waiting=[ROUND])))
    doing = [one["doing"] for one in snapshot["groups"][0]["members"]]
    assert doing == ["waits 2 s in bn1", "the others wait 2 s for it in bn1"]
    cut = SnapshotBuilder("x").update(
        0.0, report(group(member(0), member(1), waiting=[ROUND | {"missing_left_out": 3}]))
    )
    assert cut["groups"][0]["members"][0]["doing"] == "takes part"


def test_a_silent_server_is_reported_once_and_so_is_its_return():
    watcher = SnapshotBuilder("x")
    watcher.update(1.0, report(group(member(0))))
    watcher.fail(4.0, "no answer")
    silent = watcher.fail(5.0, "no answer")
    assert silent["error"] == "no answer"
    assert silent["groups"][0]["job"] == "digits"
    back = watcher.update(6.0, report(group(member(0))))
    assert back["error"] == ""
    timeline = [(event["time"], event["kind"]) for event in back["events"]]
    assert timeline == [(1.0, "silent"), (6.0, "answers")], "the silence is dated by the last answer"


def test_events_are_bounded_and_a_snapshot_is_json():
    watcher = SnapshotBuilder("x")
    for number in range(MAX_EVENTS + 5):
        snapshot = watcher.update(float(number), report(server=str(number)))
    assert len(snapshot["events"]) == MAX_EVENTS
    assert json.loads(json.dumps(snapshot)) == snapshot


def kinds(before, now):
    return [(event["kind"], event["text"]) for event in events(before, now)]


def test_equal_reports_have_no_event():
    now = report(group(member(0), member(1), rounds_failed=1, lost="x", non_finite=["y"]))
    assert kinds(now, now) == []


def test_the_first_report_gives_only_its_own_events():
    assert kinds(None, report(group(member(0)))) == []
    first = {"layer": "bn1", "phase": "forward", "step": 3, "ranks": [0], "channels": 1, "of": 4, "what": "inf"}
    assert kinds(None, report(group(member(0), lost="rank 1 is lost", first_non_finite=first))) == [
        ("lost", "Broken: rank 1 is lost"),
        ("non-finite", "Rank 0 brought the first infinity: forward of bn1, step 3, in 1 of 4 channels"),
    ]


def test_members_join_leave_and_come_again_in_another_process():
    before = report(group(member(0), member(1)))
    again = member(1) | {"place": "host-1, pid 900"}
    assert kinds(before, report(group(member(0), again, member(2)))) == [
        ("joined", "Rank 2 (host-2, pid 802) joined"),
        ("joined", "Rank 1 (host-1, pid 900, before host-1, pid 801) started again"),
    ]
    assert kinds(before, report(group(member(0)))) == [("left", "Rank 1 (host-1, pid 801) left")]
    away = member(1) | {"participation": "paused"}
    assert kinds(before, report(group(member(0), away))) == [("left", "Rank 1 (host-1, pid 801) paused")]


def test_ranks_that_do_the_same_are_counted_together():
    ranks = [member(rank) for rank in range(8)]
    (event,) = events(report(), report(group(*ranks)))
    assert (event["kind"], event["text"], event["rank"]) == ("joined", "8 ranks joined", None)
    (event,) = events(report(group(*ranks[1:])), report(group(*ranks)))
    assert (event["text"], event["rank"]) == ("Rank 0 (host-0, pid 800) joined", 0)


def test_members_that_a_report_has_no_room_for_have_not_left():
    assert kinds(report(group(member(0), member(1))), report(group(member(0), members_left_out=1))) == []


def test_rounds_that_failed_count_anew_in_each_epoch():
    before = report(group(member(0), rounds_failed=2))
    assert kinds(before, report(group(member(0), rounds_failed=3))) == [("mismatch", "1 round failed")]
    assert kinds(before, report(group(member(0), rounds_failed=2, epoch=1))) == [("mismatch", "2 rounds failed")]


def test_a_server_that_started_again_has_lost_no_job():
    now = report(server="efgh")
    assert kinds(report(group(member(0))), now) == [("restart", "The server restarted")]


def test_a_missing_job_has_ended_or_was_lost():
    before = report(group(member(0)))
    assert kinds(before, report()) == [("ended", "Finished in good order")]
    assert kinds(before, report(ended=[ended(lost="rank 0 is lost")])) == [("lost", "Broken: rank 0 is lost")]


def test_a_finding_is_reported_once():
    finding = straggler(2)
    with_finding = report(group(member(0), findings=[finding]))
    assert kinds(report(group(member(0))), with_finding) == [("straggler", "Rank 2 held the others up (at step 7)")]
    assert kinds(with_finding, report(group(member(0), findings=[finding | {"text": "still"}]))) == []


def test_of_several_runs_of_one_name_the_latest_end_counts():
    well, broken = ended(epoch=1), ended(lost="rank 0 failed", seconds=60.0)
    before = report(group(member(0)))
    assert kinds(before, report(ended=[well, broken])) == [("ended", "Finished in good order")]
    assert kinds(before, report(ended=[broken, well])) == [("lost", "Broken: rank 0 failed")]


def test_a_group_that_ends_in_a_running_job_does_not_get_the_end_of_an_earlier_run():
    broken = ended(lost="rank 0 failed", seconds=60.0)
    before = report(group(member(0)), group(member(0), group="pair"))
    assert kinds(before, report(group(member(0)), ended=[broken])) == [("ended", "Finished in good order")]


def snapshot_at(watcher, now, *groups, **more):
    return watcher.update(now, report(*groups, **more))


def test_an_ended_group_is_kept_for_ten_minutes_with_its_last_state():
    watcher = SnapshotBuilder("x")
    snapshot_at(watcher, 0.0, group(member(0), member(1), figures=figures(layer("bn1", 0.1, 0.2))))
    for now in (1.0, 600.0):
        (kept,) = snapshot_at(watcher, now, ended=[ended(seconds=now - 0.5)])["groups"]
        assert kept["over"] == {"time": 0.5, "reason": "in good order"}
        assert kept["verdict"]["state"] == "ended"
        assert [one["member"] for one in kept["members"]] == [0, 1]
        assert kept["figures"]["layers"]
    now = snapshot_at(watcher, 601.0)
    assert now["groups"] == []
    assert now["verdict"]["text"].startswith("No job yet")


def test_a_job_that_runs_again_replaces_the_ended_one():
    watcher = SnapshotBuilder("x")
    snapshot_at(watcher, 0.0, group(member(0)))
    snapshot_at(watcher, 1.0, ended=[ended()])
    (again,) = snapshot_at(watcher, 2.0, group(member(0), epoch=1), ended=[ended()])["groups"]
    assert "over" not in again
    assert len(snapshot_at(watcher, 3.0, group(member(0), epoch=1), ended=[ended()])["groups"]) == 1


def test_a_job_that_ended_before_the_view_began_is_shown():
    (kept,) = snapshot_at(SnapshotBuilder("x"), 100.0, ended=[ended(lost="rank 1 was lost", seconds=40.0)])["groups"]
    assert kept["over"] == {"time": 60.0, "reason": "rank 1 was lost"}
    assert (kept["verdict"]["state"], kept["verdict"]["severity"]) == ("broken", 3)


def test_a_broken_group_keeps_its_reason_and_the_time():
    by = {"rank": 1, "place": "host-1, pid 801", "how": "fails", "cause": "ValueError: loss is nan", "step": 9}
    lost = {"lost": "rank 1 (host-1, pid 801) failed", "lost_by": by}
    watcher = SnapshotBuilder("x")
    snapshot_at(watcher, 0.0, group(member(0), member(1)))
    (broken,) = snapshot_at(watcher, 1.0, group(member(0), **lost))["groups"]
    assert broken["lost_by"] == {**by, "time": 1.0}
    (kept,) = snapshot_at(watcher, 2.0, ended=[ended(seconds=0.25, **lost)])["groups"]
    assert kept["verdict"]["text"] == broken["verdict"]["text"]
    assert kept["lost_by"] == {**by, "time": 1.75}


def test_a_restarted_server_waits_for_the_ranks_that_it_does_not_know_yet():
    watcher, of = SnapshotBuilder("x"), group(member(0), member(1))
    snapshot_at(watcher, 0.0, of)
    (away,) = snapshot_at(watcher, 1.0, server="efgh")["groups"]
    assert away["verdict"]["text"] == "The server restarted 0 ms ago: waiting for all ranks to return"
    assert [one["member"] for one in away["members"]] == [0, 1]
    (back,) = snapshot_at(watcher, 3.0, of, server="efgh")["groups"]
    restarted = "the server restarted 2 s ago after 1 s without an answer"
    assert back["verdict"]["text"] == f"Healthy again: {restarted}, 2 of 2 ranks are back"
    assert back["verdict"]["advice"] == "Nothing to do: the ranks have sent again what was lost."
    (later,) = snapshot_at(watcher, 62.0, of, server="efgh")["groups"]
    assert later["verdict"]["text"].startswith("Healthy: all 2 ranks")


def test_a_group_that_does_not_return_after_a_restart_is_over():
    watcher = SnapshotBuilder("x")
    snapshot_at(watcher, 0.0, group(member(0)))
    snapshot_at(watcher, 1.0, server="efgh")
    (kept,) = snapshot_at(watcher, 61.0, server="efgh")["groups"]
    assert kept["over"]["time"] == 61.0


def test_all_groups_of_a_silent_server_report_its_silence():
    watcher = SnapshotBuilder("x")
    snapshot_at(watcher, 5.0, group(member(0)))
    silent = watcher.fail(9.0, "no answer")
    assert (silent["time"], silent["answered"]) == (9.0, 5.0)
    verdict = silent["groups"][0]["verdict"]
    assert (verdict["state"], verdict["severity"], verdict["since"]) == ("silent", 3, 5.0)
    assert verdict["text"] == "The server does not answer: no answer"


def test_a_verdict_has_the_time_at_which_it_was_first_true():
    watcher, healthy = SnapshotBuilder("x"), group(member(0), member(1))
    differs = group(member(0), member(1), findings=[skew(1)])
    assert snapshot_at(watcher, 0.0, healthy)["groups"][0]["verdict"]["since"] is None
    times = [snapshot_at(watcher, now, differs)["groups"][0]["verdict"]["since"] for now in (1.0, 2.0)]
    times += [snapshot_at(watcher, now, healthy)["groups"][0]["verdict"]["since"] for now in (3.0, 4.0)]
    assert times == [1.0, 1.0, 3.0, 3.0]
    waits = group(member(0), member(1), waiting=[waiting(2.0, 1)])
    assert snapshot_at(watcher, 5.0, waits)["groups"][0]["verdict"]["since"] == 3.0


def test_a_finding_has_the_present_numbers_of_its_layer():
    watcher, members = SnapshotBuilder("x"), [member(rank) for rank in range(3)]
    bn1 = {
        "name": "bn1",
        "eta2": 0.2,
        "parts": [0.01, 0.17, 0.02],
        "means": [0.0, 3.0, 0.2],
        "variances": [1.0, 8.0, 3.0],
    }

    def find(finding, *layers):
        of = group(*members, findings=[finding], figures=figures(*layers))
        (found,) = snapshot_at(watcher, 0.0, of)["groups"]
        return found["findings"][0], found["verdict"]["text"]

    finding, text = find(skew(1), layer("bn0", 0.0, 0.0, 0.0), bn1)
    assert {name: finding[name] for name in ("variance", "part", "usual")} == pytest.approx(
        {"variance": 4.0, "part": 0.17, "usual": 0.015}
    )
    assert finding["shift"] == pytest.approx(2.9 / 2**0.5)
    start = "Rank 1's data look different: since step 64 its activations vary"
    assert text == f"{start} 4 times as much as the others' in bn1 (now)"
    finding, text = find(skew(1), layer("bn0", 0.0, 0.0, 0.0))
    assert finding["variance"] == 8.5
    assert text == f"{start} 8.5 times as much as the others' in bn1 (at step 70)"
    assert find(skew(1, cleared=True), bn1)[0]["variance"] == 8.5


@pytest.mark.parametrize("name", ["means", "variances"])
def test_a_finding_keeps_its_numbers_where_the_figures_of_its_layer_overflow(name):
    of = layer("bn1", 0.1, 0.2, 0.1) | {name: [1.0, float("inf"), float("inf")]}
    world = group(*(member(rank) for rank in range(3)), findings=[skew(1)], figures=figures(of))
    (found,) = SnapshotBuilder("x").update(0.0, report(world))["groups"]
    assert found["findings"] == [skew(1)]


def test_a_verdict_keeps_the_time_of_its_step_beyond_the_history():
    watcher, of = SnapshotBuilder("x"), {"findings": [skew(1, since=70)]}
    for second in range(0, 100, 4):
        snapshot_at(watcher, float(second), group(member(0, step=10 * second), member(1)))
    for second in (100, 104, 1000):
        (found,) = snapshot_at(watcher, float(second), group(member(0, step=10 * second), member(1), **of))["groups"]
        verdict = found["verdict"]
        assert (verdict["step"], verdict["since"]) == (70, 100.0)
        assert verdict["step_time"] == pytest.approx(7.0)


def test_trends_are_bounded_in_whichever_order_a_server_reports_its_groups():
    watcher, groups = SnapshotBuilder("x"), [group(member(0), job=f"job {number}") for number in range(2 * MAX_TRENDS)]
    for second in range(0, 24, 4):
        snapshot = snapshot_at(watcher, float(second), *groups[:: 1 if second < 12 else -1])
    assert [bool(one["trend"]["seconds"]) for one in snapshot["groups"]] == [True] * MAX_TRENDS + [False] * MAX_TRENDS


def test_nothing_is_kept_of_jobs_that_ended_long_ago():
    watcher = SnapshotBuilder("x")
    for number in range(200):
        of = group(member(0), job=f"job {number}", figures=figures(layer("bn1", 0.1)))
        snapshot = snapshot_at(watcher, 10.0 * number, of)
    assert len(snapshot["groups"]) == 1 + MAX_OVER
    assert len(watcher._watched) <= 1 + MAX_OVER


def test_members_have_flags_shares_and_round_trips():
    trip = {"median": 0.002, "p99": 0.006}
    of = group(member(0, round_trip=trip), member(1), findings=[skew(1)], slowest=0, held=0.25)
    first, second = snapshot_at(SnapshotBuilder("x"), 0.0, of)["groups"][0]["members"]
    assert (first["flag"], first["severity"], first["share"]) == ("slow", 2, 0.25)
    assert (first["median"], first["p99"]) == (0.002, 0.006)
    assert (second["flag"], second["severity"], second["share"]) == ("differs", 2, 0.0)
    assert (second["median"], second["p99"], second["late"]) == (None, None, None)
