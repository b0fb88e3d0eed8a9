from server.view.snapshot import Watcher
from server.view.terminal import TOLD_EVENTS, as_text
from support.view_reports import figures, group, layer, member, report


def shown(*reports, width=80):
    watcher = Watcher("tcp://127.0.0.1:4555")
    for number, told in enumerate(reports):
        snapshot = watcher.take(float(number), told)
    return as_text(snapshot, width)


def test_a_job_fits_into_80_columns_and_24_lines_with_all_its_facts():
    pace = {"waiting": 0.21, "score": 0.4}
    waiting = [{"round": "layer 'bn1', forward, step 5", "seconds": 3.0, "missing": [2]}]
    text = shown(
        report(group(*(member(rank) for rank in range(3)))),
        report(
            group(
                *(member(rank, **pace) for rank in range(4)),
                waiting=waiting,
                rounds_failed=1,
                non_finite=["first non-finite: layer bn3, forward, step 20, rank 2"],
                findings=[{"kind": "straggler", "rank": 2, "step": 9, "text": "rank 2 held the others up"}],
            )
        ),
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    for fact in ("'digits'", "host-2, pid", "21%", "0.40", "awaited 3.0 s", "rank 2 held the others up", "step 20"):
        assert fact in text, fact
    assert [line.split()[1] for line in lines[-TOLD_EVENTS:]] == ["mismatch:", "non-finite:", "straggler:"]
    assert "joined:" not in text
    assert "\x1b" not in text


def test_the_five_most_skewed_layers_are_told_with_the_rank_that_brings_most():
    layers = [layer(f"layer{number}." + "x" * 60 * (number == 6), 0.01, number / 10, 0.02) for number in range(7)]
    text = shown(report(group(*map(member, range(3)), figures=figures(*layers))))
    told = [line for line in text.splitlines() if "skew" in line]
    assert [line.split(":")[0].strip() for line in told] == [
        f"skew 0.{number}30, rank 1 brings 0.{number}00" for number in (6, 5, 4, 3, 2)
    ]
    assert [line.split(": ")[1].strip()[:7] for line in told] == [f"layer{number}." for number in (6, 5, 4, 3, 2)]
    assert max(map(len, text.splitlines())) <= 80


def test_names_are_neither_markup_nor_control_a_terminal():
    bad = group(member(0) | {"place": "[red]\x1b[2Jhost"}, job="[bold]\x1b]0;x\x07")
    text = shown(report(bad), width=200)
    assert "[bold]" in text
    assert "[red]" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_a_long_name_of_a_job_hides_none_of_its_counts():
    text = shown(report(group(member(0), job="x" * 70)))
    assert "1 of 1 ranks" in text.replace("\n", " ")


def test_many_ranks_are_counted_and_the_awaited_one_is_shown():
    waiting = [{"round": "layer 'bn1'", "seconds": 3.0, "missing": [77]}]
    text = shown(report(group(*(member(rank) for rank in range(100)), waiting=waiting)))
    assert "host-77" in text
    assert "and 90 ranks more" in text
