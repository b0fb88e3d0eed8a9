import pytest

from server.view.snapshot import Watcher
from server.view.terminal import as_text
from support.view_reports import figures, group, layer, member, report

EVENTS = 3


def shown(*reports, width=80, height=None):
    watcher = Watcher("tcp://127.0.0.1:4555")
    for number, told in enumerate(reports):
        snapshot = watcher.take(float(number), told)
    return as_text(snapshot, width, height)


def test_a_job_fits_into_80_columns_and_24_lines_with_all_its_facts():
    pace = {"waiting": 0.21, "score": 0.4, "late": {"median": 0.0125, "p99": 0.05}}
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
    for fact in (
        "'digits'",
        "host-2, pid",
        "21%",
        "0.40",
        "12.5",
        "awaited 3.0 s",
        "rank 2 held the others up",
        "step 20",
    ):
        assert fact in text, fact
    assert [line.split()[1] for line in lines[-EVENTS:]] == ["mismatch:", "non-finite:", "straggler:"]
    assert "joined:" not in text
    assert "\x1b" not in text


HOST = "host-b.cluster.example"
LONG_TEXTS = (
    (
        "first non-finite: layer backbone.layer3.0.downsample.1, forward, step 120812, "
        f"rank 2 ({HOST}, pid 81245), 4 of 256 channels (inf)"
    ),
    f"skew: rank 3 ({HOST}, pid 81246): input variance 8x the others' in layer 'backbone.layer3.0.downsample.1'",
    (
        f"straggler: rank 5 ({HOST}, pid 81250) held the others up for 14% of the last minute; where it came last, it "
        "was by up to 41 ms in the median and 82 ms in 99 of 100 rounds"
    ),
)


def test_long_findings_are_whole_in_80_columns_and_24_lines():
    non_finite, *findings = LONG_TEXTS
    told = [{"kind": "skew", "rank": 3, "step": 9, "text": text} for text in findings]
    lost = "rank 7 (host-c.cluster.example, pid 812451) was lost: no sign of life for 3.5 s"
    busy = group(*map(member, range(4)), non_finite=[non_finite], findings=told, lost=lost)
    text = shown(report(busy), height=24)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    for whole in (*LONG_TEXTS, lost):
        assert "".join(whole.split()) in "".join(text.split()), whole


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


def busy_group(number, ranks=12):
    findings = [{"kind": "skew", "rank": rank, "step": 9, "text": f"rank {rank} differs"} for rank in range(8)]
    layers = figures(*(layer(f"layer{at}", 0.01, 0.3, 0.02) for at in range(20)))
    texts = [f"first non-finite: layer bn3, {phase}, step 20, rank 2" for phase in ("forward", "backward")]
    members = map(member, range(ranks))
    job = f"job-{number} with a name that needs one more line for its counts"
    return group(*members, job=job, findings=findings, non_finite=texts, figures=layers, lost="rank 3 was lost")


@pytest.mark.parametrize(
    ("groups", "height"),
    [
        *((groups, height) for groups in (1, 2, 3, 5, 30) for height in (10, 24, 60)),
        pytest.param(200, 24, marks=pytest.mark.slow),
        *(pytest.param(200, height, marks=pytest.mark.long) for height in (10, 60)),
    ],
)
def test_however_much_there_is_to_tell_it_fits_into_the_terminal(groups, height):
    told = [report(*(busy_group(number, ranks) for number in range(groups))) for ranks in (12, 11, 10, 9)]
    lines = shown(*told, height=height).splitlines()
    assert len(lines) <= height
    heads = sum("job-" in line and "group 'world'" in line for line in lines)
    more = [int(line.split()[1]) for line in lines if line.endswith("groups more")]
    assert heads + sum(more) == groups
    assert lines[-1].split()[1] == "left:"


def test_findings_that_have_no_room_are_counted():
    lines = shown(report(busy_group(0)), height=60).splitlines()
    told = [line for line in lines if line.startswith("!")]
    assert [line.split(":")[0] for line in told[1:3]] == ["! first non-finite"] * 2
    assert told[3:] == ["! rank 6 differs", "! rank 7 differs", "! 6 findings more"]


def test_where_not_all_groups_fit_those_with_something_to_tell_come_first():
    calm = [group(member(0), job=f"calm-{number}") for number in range(40)]
    text = shown(report(*calm, group(member(0), job="sick", lost="rank 3 was lost")), height=24)
    assert "job 'sick'" in text
    assert "! broken: rank 3 was lost" in text
