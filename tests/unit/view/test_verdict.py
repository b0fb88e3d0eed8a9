"""The verdict describes a group in one sentence: who, where, how much, since when, and the remedy."""

import pytest

from client.session.protocol.member import DEFAULT_ROUND_TIMEOUT
from server.view.snapshot import SnapshotBuilder, unseen_group
from server.view.verdict import LONG_SECONDS, cards, of_server, verdicts
from support.view_reports import ended, group, member, report, skew, straggler, waiting

NOW = 1000.0
FOUR = [member(rank) for rank in range(4)]
BY = {"rank": 1, "place": "host-1, pid 801", "how": "fails", "cause": "ValueError: loss is nan", "step": 1899}
FAILED = {"lost": "rank 1 (host-1, pid 801) failed with ValueError: loss is nan", "lost_by": BY}
KILLED = {"lost": "rank 1 was lost", "lost_by": BY | {"how": "is lost", "cause": "the connection was lost"}}
LEFT = {"lost": "rank 1 left", "lost_by": BY | {"how": "leaves", "cause": ""}}
NAN = {"layer": "layer3.0.bn1", "phase": "forward", "step": 1871, "ranks": [1], "channels": 4, "of": 256, "what": "NaN"}
WHERE = "forward of layer3.0.bn1, step 1871, in 4 of 256 channels"
LOADS, IS_SILENT = "is in loader.py:41 decode, for 11 s", "has not answered a stack request for 9 s"
AT_LOADER = [*FOUR[:2], member(2, where=LOADS), FOUR[3]]
FROZEN = [*FOUR[:2], member(2, where=IS_SILENT), FOUR[3]]
DIFFERS = (
    "Rank 2's data look different: since step 64 its activations vary 8.5 times as much as the others' in bn1 "
    "(at step 70)"
)
LATE = {"bounds": [1.31, 2.62], "counts": [*[0] * 16, 100], "sum": 130.0}

# A group, and its state, severity, rank and text.
CASES = {
    "healthy": (group(*FOUR), ("healthy", 0, None, "Healthy: all 4 ranks take part, no NaN so far")),
    "healthy, with all known": (
        group(*FOUR, slowest=3, held=0.02, compared_layers=53),
        ("healthy", 0, None, "Healthy: all 4 ranks take part, none is slow, their data look alike, no NaN so far"),
    ),
    "healthy, in its first minute": (
        group(*FOUR, slowest=3, held=0.02, held_seconds=20.0),
        ("healthy", 0, None, "Healthy: all 4 ranks take part, none is slow so far, no NaN so far"),
    ),
    "alone": (group(FOUR[0]), ("healthy", 0, None, "Healthy: 1 rank takes part, no NaN so far")),
    "elastic": (
        group(*FOUR[:3], world_size=4, min_members=2),
        ("healthy", 0, None, "Healthy: 3 ranks take part, no NaN so far"),
    ),
    "forming": (
        group(*FOUR[:2], world_size=4, missing=2),
        ("forming", 1, None, "Waiting for ranks 2-3 to join: 2 of 4 ranks are here"),
    ),
    "waiting": (
        group(*AT_LOADER, waiting=[waiting(12.3, 2, layer="layer3.0.bn1")]),
        ("waiting", 2, 2, f"Waiting for rank 2 (host-2, pid 802) for 12 s in layer3.0.bn1; it {LOADS}"),
    ),
    "frozen": (
        group(*FROZEN, waiting=[waiting(9.6, 2)]),
        ("waiting", 2, 2, f"Waiting for rank 2 (host-2, pid 802) for 10 s in bn1; it {IS_SILENT}"),
    ),
    "waiting for two": (
        group(*FOUR, waiting=[waiting(3.0, 2, 3)]),
        ("waiting", 2, None, "Waiting for ranks 2-3 for 3 s in bn1; the others are at step 7"),
    ),
    "waiting for very many": (
        group(*FOUR, waiting=[waiting(3.0, 2, 3, missing_left_out=60)]),
        ("waiting", 2, None, "Waiting for 62 ranks for 3 s in bn1; the others are at step 7"),
    ),
    "slow": (
        group(FOUR[0], member(1) | {"place": "GPU-A, pid 801"}, *FOUR[2:], slowest=1, held=0.31),
        ("slow", 2, 1, "Rank 1 (GPU-A, pid 801) slows the job down: the others waited 31% of the last minute for it"),
    ),
    "differs": (group(*FOUR, findings=[skew(2)]), ("data", 2, 2, DIFFERS)),
    "a finding that is over": (
        group(*FOUR, findings=[skew(2, cleared=True)]),
        ("healthy", 0, None, "Healthy: all 4 ranks take part, no NaN so far"),
    ),
    "the same data": (
        group(*FOUR, findings=[{**skew(3), "other": 2, "since": 8}]),
        ("data", 2, 3, "Rank 3 has the same data as rank 2: equal in all layers since step 8"),
    ),
    "NaN": (
        group(*FOUR, first_non_finite=NAN),
        ("data", 3, 1, f"Rank 1 brought the first NaN: {WHERE}"),
    ),
    "infinity in two": (
        group(*FOUR, first_non_finite=NAN | {"ranks": [0, 1], "what": "inf and NaN", "of": 0}),
        ("data", 3, None, "Ranks 0-1 brought the first infinity and NaN: forward of layer3.0.bn1, step 1871"),
    ),
    "NaN in many": (
        group(*FOUR, world_size=64, first_non_finite=NAN | {"ranks": [*range(8)], "ranks_left_out": 56}),
        ("data", 3, None, f"Ranks 0-7 and 56 more brought the first NaN: {WHERE}"),
    ),
    "failed": (
        group(FOUR[0], *FOUR[2:], **FAILED),
        ("broken", 3, 1, "Broken: rank 1 (host-1, pid 801) raised ValueError at step 1899: loss is nan"),
    ),
    "killed": (
        group(FOUR[0], *FOUR[2:], **KILLED),
        ("broken", 3, 1, "Broken: rank 1 (host-1, pid 801) was lost at step 1899: the connection was lost"),
    ),
    "left early": (
        group(FOUR[0], *FOUR[2:], **LEFT, rounds_failed=1),
        ("broken", 3, 1, "Broken: rank 1 (host-1, pid 801) left at step 1899, before the others finished"),
    ),
    "left early, between two rounds": (
        group(FOUR[0], *FOUR[2:], **LEFT, refused=True),
        ("broken", 3, 1, "Broken: rank 1 (host-1, pid 801) left at step 1899, before the others finished"),
    ),
    "broken by no rank": (group(*FOUR, lost="the results differ"), ("broken", 3, None, "Broken: the results differ")),
    "finishing": (
        group(FOUR[0], *FOUR[2:], world_size=4, **LEFT),
        ("ended", 1, None, "Finishing: 3 of 4 ranks are still here"),
    ),
    "ended": (
        unseen_group(ended(), report(ended=[ended()]), NOW),
        ("ended", 1, None, "Finished in good order: 2 ranks, 100 rounds"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_group_has_a_verdict(name):
    of, (state, severity, rank, text) = CASES[name]
    first = verdicts(of, NOW)[0]
    assert (first.state, first.severity, first.rank) == (state, severity, rank)
    assert first.text == text
    assert bool(first.advice) == (state != "ended")
    assert (first.advice == "Nothing to do.") == (state == "healthy")


@pytest.mark.parametrize("name", CASES)
def test_the_cards_and_the_flags_agree_with_the_verdict(name):
    of, (_, severity, rank, _) = CASES[name]
    if "over" not in of:
        (of,) = SnapshotBuilder("x").update(NOW, report(of))["groups"]
    found = verdicts(of, NOW)
    rows = cards(of, found)
    assert [card["name"] for card in rows] == ["Ranks", "Speed", "Waiting", "Data", "Numbers"]
    severities = {"unknown": 0, "good": 0, "watch": 2, "bad": 3}
    assert max(severities[card["state"]] for card in rows) == (severity if severity > 1 else 0)
    assert all(card["value"] and card["note"] for card in rows), rows
    flagged = {one["member"]: one["severity"] for one in of["members"] if one.get("flag")}
    assert rank is None or flagged.get(rank, severity) == severity
    assert severity > 1 or not flagged


@pytest.mark.parametrize(
    ("of", "step"),
    [
        (group(*FOUR, findings=[skew(2)]), 64),
        (group(*FOUR, findings=[{**skew(3), "other": 2, "since": 8}]), 8),
        (group(*FOUR, first_non_finite=NAN), 1871),
        (group(*FOUR, slowest=1, held=0.31), None),
        (group(*FOUR, slowest=1, held=0.31, findings=[straggler(1, 30), straggler(2, 40), straggler(1, 90)]), 90),
        (group(*FOUR), None),
    ],
)
def test_a_verdict_has_the_step_since_which_it_holds(of, step):
    assert verdicts(of, NOW)[0].step == step


def test_the_lesser_verdicts_follow_the_first_one():
    of = group(
        *FOUR, **FAILED, first_non_finite=NAN, findings=[skew(2)], waiting=[waiting(9.0, 1)], slowest=1, held=0.5
    )
    first, second, third = verdicts(of, NOW)
    assert first.state == "broken"
    assert second.text == (
        "Rank 1 brought the first NaN: forward of layer3.0.bn1, step 1871, 28 steps earlier, in 4 of 256 channels"
    )
    assert third.text.startswith("Rank 2's data look different")
    (entry,) = SnapshotBuilder("x").update(NOW, report(of))["groups"]
    assert entry["verdict"]["also"] == [second.text, third.text]


def test_the_first_verdict_of_a_job_that_ended_in_good_order_is_its_end():
    of = {**group(*FOUR, findings=[skew(2)], first_non_finite=NAN), "over": {"time": 1.0, "reason": "in good order"}}
    assert [one.state for one in verdicts(of, NOW)] == ["ended", "data", "data"]


@pytest.mark.parametrize(
    ("seconds", "late", "is_reported"),
    [(0.9, {}, False), (1.1, {}, True), (2.0, {"late_seconds": LATE}, False), (3.0, {"late_seconds": LATE}, True)],
)
def test_only_an_unusual_wait_is_reported(seconds, late, is_reported):
    of = group(*FOUR, waiting=[waiting(seconds, 2)], **late)
    assert (verdicts(of, NOW)[0].state == "waiting") == is_reported


def test_a_wait_is_reported_with_the_usual_delay():
    of = group(*FOUR, waiting=[waiting(3.0, 2)], late_seconds=LATE)
    usual = "In 99 of 100 rounds the last rank is at most about 1 s late."
    ends = f"The others raise RoundTimeout after their round_timeout, {DEFAULT_ROUND_TIMEOUT:g} s by default."
    advice = f"look at what rank 2 does now. {usual} {ends}"
    assert verdicts(of, NOW)[0].advice == f"If this wait lasts 10 s or more, {advice}"
    of = group(*FOUR, waiting=[waiting(LONG_SECONDS, 2)], late_seconds=LATE)
    assert verdicts(of, NOW)[0].advice == f"L{advice[1:]}"


def test_the_cards_of_ranks_and_speed_show_who_holds_the_job_up():
    def states(**more):
        of = group(*FOUR, rounds_per_second=9.0, **more)
        return [(card["note"], card["state"]) for card in cards(of, verdicts(of, NOW))[:2]]

    usual = "100 rounds so far"
    assert states() == [("all take part", "good"), (usual, "good")]
    assert states(waiting=[waiting(3.0, 1, 2)])[0] == ("2 awaited", "watch")
    assert states(slowest=1, held=0.31) == [("all take part", "good"), ("slowed down by rank 1", "watch")]
    trips = {"counts": [0, 10], "sum": 1e-3}
    assert states(round_trip_seconds=trips)[1] == ("0.04 ms round trip, 0.04 ms p99 so far", "good")


def test_a_silent_server_has_a_short_endpoint_and_the_remedy_of_its_error():
    needs_key = "authentication refused at tcp://a:1: the server expects a key, and this client has none"
    verdict = of_server(f"{needs_key}; pass connect(curve=...)", NOW)
    assert verdict.text == f"The server does not answer: {needs_key}"
    assert verdict.advice.startswith("Pass connect(curve=...). Ranks wait for ")
    verdict = of_server("no server listens at ipc:///tmp/a/bn.socket (connection refused)", NOW)
    assert verdict.text == "The server does not answer: no server listens at ipc://.../bn.socket (connection refused)"
    assert verdict.advice.startswith("Look at the server's log, and start it again. Ranks wait for ")


def test_a_share_of_less_than_a_minute_is_provisional():
    def summary(held):
        of = group(*FOUR, rounds_per_second=9.0, slowest=1, held=held, held_seconds=20.4)
        first, speed, waits, *_ = verdicts(of, NOW)[0].state, *cards(of, verdicts(of, NOW))[1:]
        return first, speed["state"], waits["value"], waits["note"], waits["state"]

    note = "the others waited {} of 20 s for {}"
    assert summary(0.4) == ("healthy", "good", "Rank 1 so far", note.format("40%", "rank 1"), "unknown")
    assert summary(0.02) == ("healthy", "good", "No slow rank so far", note.format("2%", "any rank"), "unknown")


def test_a_young_job_says_when_its_slow_rank_is_known():
    def note(*members, **more):
        of = group(*members, **more)
        return cards(of, verdicts(of, NOW))[2]["note"]

    assert note(*FOUR) == "needs 40 s of rounds"
    assert note(*FOUR, slowest_in=11.2) == "known after 12 s more of rounds"
    assert note(FOUR[0]) == "the job has one rank"
    assert note(*FOUR, **KILLED, slowest_in=11.2) == "the job was too short"


def test_the_start_of_a_slow_rank_is_that_of_the_window_that_shows_it():
    def slow_since(*seen):
        builder = SnapshotBuilder("x")
        for second, slowest, held, length in seen:
            known = {"slowest": slowest, "held": held, "held_seconds": length} if slowest is not None else {}
            verdict = builder.update(NOW + second, report(group(*FOUR, **known)))["groups"][0]["verdict"]
        return verdict["state"], verdict["since"], verdict["from_start"]

    young, even = (0, None, 0.0, 0.0), (60, 1, 0.02, 60.0)
    assert slow_since(young, (40, 1, 0.3, 10.0), (90, 1, 0.3, 60.0)) == ("slow", NOW + 30, True)
    assert slow_since(young, even, (120, 1, 0.3, 60.0)) == ("slow", NOW + 60, False)
    assert slow_since(young, (90, 2, 0.3, 60.0), (150, 1, 0.3, 60.0)) == ("slow", NOW + 90, False), "another rank"
    assert slow_since((0, 1, 0.3, 60.0), (9, 1, 0.3, 60.0)) == ("slow", None, True), "slow before the first report"
    assert slow_since(young, even) == ("healthy", None, False)


def test_a_rate_covers_four_seconds_and_is_zero_while_a_round_is_open():
    builder = SnapshotBuilder("x")

    def rates(second, rounds, **more):
        step = rounds // 10
        of = group(*[one | {"step": step} for one in FOUR], rounds_done=rounds, **more)
        (entry,) = builder.update(NOW + second, report(of))["groups"]
        return entry["rounds_per_second"], entry["members"][0]["steps_per_second"]

    assert rates(0, 0) == (None, None)
    assert rates(1, 20) == (20.0, 2.0), "a first rate does not wait"
    assert rates(4, 400) == (100.0, 10.0)
    assert rates(5, 400) == (100.0, 10.0), "the next rate is due after four seconds"
    assert rates(6, 400, waiting=[waiting(2.0, 1)]) == (0.0, 0.0)
    assert rates(8, 480) == (20.0, 2.0)


def test_no_rate_spans_a_restart_of_the_server():
    builder = SnapshotBuilder("x")
    for second in range(9):
        builder.update(NOW + second, report(group(*FOUR, rounds_done=100 * second)))
    rates = []
    for second in range(9, 15):
        groups = [] if second < 11 else [group(*FOUR, rounds_done=100 * (second - 2))]
        (entry,) = builder.update(NOW + second, report(*groups, server="new"))["groups"]
        rates.append(entry["rounds_per_second"])
    assert rates == [100.0, 100.0, None, 100.0, 100.0, 100.0]
    assert entry["trend"]["rounds_per_second"] == [100.0, 100.0]


def test_all_ranks_of_a_broken_job_reach_the_step_of_the_lost_one():
    (entry,) = SnapshotBuilder("x").update(NOW, report(group(FOUR[0], *FOUR[2:], world_size=4, **KILLED)))["groups"]
    assert {one["step"] for one in entry["members"]} == {BY["step"]}


def test_a_broken_job_has_stopped():
    builder = SnapshotBuilder("x")
    builder.update(NOW, report(group(*FOUR)))
    of = group(FOUR[0], *FOUR[2:], world_size=4, **KILLED, rounds_done=120)
    (entry,) = builder.update(NOW + 2, report(of))["groups"]
    assert entry["cards"][1] == {"name": "Speed", "value": "Stopped", "note": "after 120 rounds", "state": "unknown"}
    assert {one["steps_per_second"] for one in entry["members"]} == {None}
    doing = [one["doing"] for one in entry["members"]]
    assert doing == ["ends with the job", "was lost", *["ends with the job"] * 2]
    assert [event["text"] for event in builder.update(NOW + 3, report(of))["events"]] == [entry["verdict"]["text"]]


def test_a_silent_rank_is_dated_by_its_last_sign_of_life():
    builder = SnapshotBuilder("x")
    builder.update(NOW, report(group(*FOUR)))
    silent = {"lost": "rank 1 was lost", "lost_by": KILLED["lost_by"] | {"cause": "no sign of life for 3.5 s"}}
    (entry,) = builder.update(NOW + 9, report(group(FOUR[0], *FOUR[2:], world_size=4, **silent)))["groups"]
    assert entry["verdict"]["since"] == NOW + 9 - 3.5


def test_a_broken_job_broke_no_later_than_it_ended():
    builder = SnapshotBuilder("x")
    builder.update(NOW, report(group(*FOUR)))
    over = ended(seconds=1.5, **KILLED)
    (entry,) = builder.update(NOW + 1, report(ended=[over]))["groups"]
    assert entry["verdict"]["since"] == entry["over"]["time"] == NOW - 0.5


def test_a_long_wait_is_always_reported():
    late = {"counts": [*[0] * 20, 100], "sum": 1e4}
    of = group(*FOUR, waiting=[waiting(LONG_SECONDS, 2)], late_seconds=late)
    assert verdicts(of, NOW)[0].state == "waiting"


def test_the_verdict_is_about_the_oldest_round():
    of = group(*FOUR, waiting=[waiting(2.0, 1), waiting(5.0, 3, layer="bn2")])
    assert verdicts(of, NOW)[0].text.startswith("Waiting for rank 3 (host-3, pid 803) for 5 s in bn2")


def test_html_in_a_name_stays_plain_text():
    hostile = "<img src=x onerror=alert(1)>"
    text = verdicts(group(*FOUR, waiting=[waiting(2.0, 1, layer=hostile)]), NOW)[0].text
    assert hostile in text
