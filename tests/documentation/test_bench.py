"""The tables and plots of the benchmarks are what was measured: nobody has written in them."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from xml.etree import ElementTree as ET

import pytest
from bench import kept, plots, quiet
from bench.kept import Kept
from bench.pages import BEGIN, END, page_of, written
from bench.tables import TABLES

MEASURED = [name for name in TABLES if Kept.of(name)]

STEPS = {
    "members": 2,
    "unsynchronised": 300.0,
    "zeromq": 390.0,
    "zeromq, broadcast": 396.0,
    "memory": 330.0,
    "process group": 420.0,
    "gloo": 400.0,
    "zeromq_in_rounds": 60.0,
    "zeromq_exchanging": 20.0,
    "memory_in_rounds": 25.0,
    "memory_exchanging": 9.0,
}


def found(busy: float = 0.1) -> Kept:
    return Kept("2026-11-23", "abc1234", busy, "2 processors", "python main.py", STEPS)


@pytest.mark.parametrize("name", MEASURED)
def test_a_page_shows_what_was_measured(name):
    text = page_of(name).read_text()
    assert written(name, text, Kept.of(name)) == text


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_says_where_it_is_from(name):
    of = Kept.of(name)
    assert of.caption in page_of(name).read_text()
    assert "dirty" not in of.commit


def test_the_plots_show_what_was_measured():
    drawn = plots.drawn()
    assert set(drawn) == set(plots.PLOTS) & set(MEASURED)
    for name, text in drawn.items():
        assert (plots.FOLDER / f"{name}.svg").read_text() == text


def test_a_table_has_each_way_with_its_ratio():
    text = written("train_step", f"before\n{BEGIN}old\n{END}behind\n", found())
    assert "| ours, in shared memory | 330 | 1.100 | 25.0 | 9.0 |\n" in text
    assert "| gloo's textbook | 400 | 1.333 | - | - |\n" in text
    assert text.startswith("before\n")
    assert text.endswith("behind\n")
    assert "old" not in text


def test_a_table_below_another_is_shown_as_soon_as_it_has_rows():
    row = {"shape": "2,8,4,4", "class": "Inherited", "plain": 90.4, "converted": 421.0, "more": 2.6}
    layers = {"layers": []}
    assert "Inherited" not in TABLES["layer"].in_markdown(layers)
    text = TABLES["layer"].in_markdown(layers | {"subclasses": [row]})
    assert "\n\n| shape | class |" in text
    assert text.endswith("| (2, 8, 4, 4) | Inherited | 90 | 421 | 3 |\n")


def test_a_busy_machine_is_told():
    assert "**on a busy machine**, with 1.4 processors in use by others" in found(busy=1.4).caption
    assert "**" not in found(busy=quiet.QUIET).caption


@pytest.mark.parametrize("text", ["", BEGIN, END, END + BEGIN])
def test_a_page_without_marks_is_refused(text):
    with pytest.raises(ValueError, match="expected '<!-- scripts/bench writes this -->' and, behind it"):
        written("train_step", text, found())


def test_a_result_is_kept_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "train_step").mkdir(parents=True)
    assert Kept.of("train_step") is None
    found().keep("train_step")
    assert Kept.of("train_step") == found()
    assert json.loads((tmp_path / "benchmarks" / "train_step" / "results.json").read_text()) == asdict(found())


def test_a_plot_is_a_drawing_with_a_bar_for_each_value():
    title, groups, line = plots.PLOTS["train_step"](STEPS)
    drawing = ET.fromstring(plots.Plot(title, groups, line, "here <&> now").in_svg())  # noqa: S314 - our own
    bars = drawing.findall("{*}rect")
    assert [round(float(bar.get("width")) / float(bars[0].get("width")), 3) for bar in bars] == [
        1.0,
        1.182,
        1.273,
        1.212,
    ]
    assert "here <&> now" in [text.text for text in drawing.findall("{*}text")]
    assert drawing.find("{*}title").text == title


def test_the_busy_processors_are_those_that_work(monkeypatch):
    ticks = iter([(100, 1000), (150, 1100)])
    monkeypatch.setattr(quiet, "_ticks", lambda: next(ticks))
    monkeypatch.setattr(quiet, "_nr_processors", lambda: 4)
    assert quiet.busy_processors(0.0) == 2.0


def test_the_work_of_our_children_is_not_that_of_others(monkeypatch):
    ticks, ours = iter([(100, 1000), (700, 2000)]), iter([100, 500])
    monkeypatch.setattr(quiet, "_ticks", lambda: next(ticks))
    monkeypatch.setattr(quiet, "_ticks_of_family", lambda: next(ours))
    monkeypatch.setattr(quiet, "_nr_processors", lambda: 2)
    with quiet.Others() as others:
        pass
    assert others.processors == pytest.approx(200 / 500)


def test_the_work_of_a_child_counts_while_it_runs_and_after_it_was_waited_for():
    works = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    before = quiet._ticks_of_family()
    with subprocess.Popen([sys.executable, "-c", works], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        running = quiet._ticks_of_family()
    half = 0.5 * os.sysconf("SC_CLK_TCK")
    assert running - before >= half - 1
    assert quiet._ticks_of_family() >= running


def test_a_quiet_machine_is_waited_for(monkeypatch):
    samples = iter([2.0, 0.9, 0.2, 0.0])
    monkeypatch.setattr(quiet, "busy_processors", lambda: next(samples))
    assert quiet.wait_until_quiet(60.0) == 0.2
    samples = iter([2.0, 0.9])
    assert quiet.wait_until_quiet(0.0) == 2.0
