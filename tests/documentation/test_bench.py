"""The tables and plots of the benchmarks are generated from the measurements."""

import os
import subprocess
import sys

import pytest
from bench import plots, quiet
from bench.pages import BEGIN, END, page_of, written
from bench.results import Result
from bench.tables import TABLES

MEASURED = [name for name in TABLES if Result.of(name)]

STEPS = {"members": 2, "unsynchronised": 300.0, "process group": 420.0, "gloo": 400.0}
STEPS |= {"server": 390.0, "server, broadcast": 396.0, "server_in_rounds": 60.0, "server_exchanging": 20.0}
STEPS |= {"memory": 330.0, "memory_in_rounds": 25.0, "memory_exchanging": 9.0}


def found(busy: float = 0.1) -> Result:
    return Result("2026-11-23", "abc1234", busy, "2 processors", "python main.py", STEPS)


@pytest.mark.parametrize("name", MEASURED)
def test_a_page_shows_what_was_measured_and_at_which_commit(name):
    of, text = Result.of(name), page_of(name).read_text()
    assert written(name, text, of) == text
    assert of.caption in text
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


def test_a_busy_machine_is_reported():
    assert "**on a busy machine**, with 1.4 processors in use by others" in found(busy=1.4).caption
    assert "**" not in found(busy=quiet.QUIET).caption


def test_the_work_of_our_children_does_not_count_as_work_of_others(monkeypatch):
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
