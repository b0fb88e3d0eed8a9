from server.view.snapshot import events
from support.view_reports import group, member, report


def kinds(before, now):
    return [(event["kind"], event["text"]) for event in events(before, now)]


def test_equal_reports_have_no_event():
    now = report(group(member(0), member(1), rounds_failed=1, lost="x", non_finite=["y"]))
    assert kinds(now, now) == []


def test_the_first_report_tells_only_what_it_says_has_happened():
    assert kinds(None, report(group(member(0)))) == []
    assert kinds(None, report(group(member(0), lost="rank 1 is lost", non_finite=["inf"]))) == [
        ("lost", "rank 1 is lost"),
        ("non-finite", "inf"),
    ]


def test_members_join_leave_and_come_again_in_another_process():
    before = report(group(member(0), member(1)))
    again = member(1) | {"place": "host-1, pid 900"}
    assert kinds(before, report(group(member(0), again, member(2)))) == [
        ("joined", "rank 1 is now host-1, pid 900, before host-1, pid 801"),
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


def test_a_job_that_is_gone_has_ended_or_was_lost():
    before = report(group(member(0)))
    assert kinds(before, report()) == [("ended", "ended")]
    gone = {"job": "digits", "lost": "rank 0 is lost", "seconds": 1.0}
    assert kinds(before, report(ended=[gone])) == [("lost", "rank 0 is lost")]


def test_a_finding_is_told_once():
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


def test_a_group_that_ends_while_its_job_runs_is_not_told_of_with_the_end_of_an_earlier_run():
    broken = {"job": "digits", "epoch": 0, "lost": "rank 0 failed", "seconds": 60.0}
    before = report(group(member(0)), group(member(0), group="pair"))
    assert kinds(before, report(group(member(0)), ended=[broken])) == [("ended", "ended")]
