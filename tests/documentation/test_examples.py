"""The demo runs, measures its figures, and would detect missing synchronisation."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from documentation.docs_blocks import blocks_of
from support.paths import ROOT
from support.starter import STARTER, run_script

EXAMPLES = ROOT / "examples"
GETTING_STARTED = ROOT / "docs" / "getting-started.md"

STEPS = 20
LAYERS = 3
PHASES = 2


@pytest.mark.processes
@pytest.mark.long
def test_the_demo_shows_that_synchronised_training_is_training_on_the_whole_batch():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", "--steps", str(STEPS), "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "TERM": "dumb"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr
    _, _, table = done.stderr.partition(f"Accuracy after {STEPS} steps")
    for title in ("1 process", "4 processes, synchronised", "4 processes, unsynchronised", "DataParallelWithCallback"):
        assert title in table
    ways = json.loads(done.stdout)["ways"]
    for way in ("synchronised", "data parallel"):
        assert max(ways[way]["weights"], ways[way]["running_statistics"]) < 1e-5
        assert ways[way]["accuracy"] == pytest.approx(ways["whole batch"]["accuracy"], abs=0.01)
    assert ways["unsynchronised"]["weights"] > 0.01
    assert ways["unsynchronised"]["running_statistics"] > 0.01
    assert ways["synchronised"]["rounds"] == STEPS * LAYERS * PHASES
    assert 0 < ways["synchronised"]["median_round_trip"] < 1
    times = [ways[way]["seconds"] for way in ("synchronised", "unsynchronised")]
    assert "4 processes took {:.1f} s synchronised and {:.1f} s not".format(*times) in " ".join(table.split())


@pytest.mark.parametrize("way", ["synchronised", "data parallel"])
@pytest.mark.parametrize("kind", ["weights", "running_statistics"])
@pytest.mark.parametrize("difference", [0.01, float("nan")])
def test_the_demo_reports_a_difference(monkeypatch, way, kind, difference):
    monkeypatch.syspath_prepend(EXAMPLES)
    import report  # noqa: PLC0415 - the examples are no package, and on the path only here
    import ways  # noqa: PLC0415 - as above

    same = report.Result(0.98, 1e-7, 1e-7, rounds=None, median_round_trip=None, seconds=1.0)
    rows = dict.fromkeys(report.WAYS, same)
    length = ways.Length(600, 100)
    assert report.verdict(rows, length)[0]
    good, sentence = report.verdict(rows | {way: dataclasses.replace(same, **{kind: difference})}, length)
    assert not good
    assert report.TITLES[way] in sentence


def test_the_table_in_getting_started_is_the_one_that_the_demo_prints(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import report  # noqa: PLC0415 - the examples are no package, and on the path only here
    import ways  # noqa: PLC0415 - as above

    (block,) = [block.text for block in blocks_of(GETTING_STARTED) if block.language == "text"]
    lines = block.splitlines()
    cells = [re.split(r"\s{2,}", line)[1:] for line in lines[-len(report.WAYS) :]]
    rows = {way: report.Result(**read_back(*row)) for way, row in zip(report.WAYS, cells, strict=True)}
    console = Console(file=io.StringIO(), width=80)
    report.show(console, rows, ways.Length(600, 100))
    printed = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert printed[1 : 1 + len(lines)] == lines


def read_back(accuracy, weights, statistics, trip, seconds):
    return {
        "accuracy": float(accuracy.removesuffix("%")) / 100,
        "weights": 0.0 if weights == "-" else float(weights),
        "running_statistics": 0.0 if statistics == "-" else float(statistics),
        "rounds": None,
        "median_round_trip": None if trip == "-" else float(trip.removesuffix(" ms")) / 1000,
        "seconds": float(seconds.removesuffix(" s")),
    }


@pytest.fixture
def trained(server, job, tmp_path):
    def run(script, *arguments):
        common = {"WORLD_SIZE": "2", "STATSD_BN_ENDPOINT": server.endpoint, "STATSD_BN_JOB": job}
        outputs, saved = ([tmp_path / f"{rank}.{kind}" for rank in range(2)] for kind in ("txt", "pt"))
        processes = []
        for rank, (output, file) in enumerate(zip(outputs, saved, strict=True)):
            run_arguments = [*arguments, "--save", str(file)], {**common, "RANK": str(rank)}, output
            processes.append(STARTER.Process(target=run_script, args=(EXAMPLES / script, *run_arguments)))
            processes[-1].start()
        try:
            for process in processes:
                process.join(110)
        finally:
            for process in processes:
                process.kill()
        texts = [output.read_text() for output in outputs]
        assert [process.exitcode for process in processes] == [0, 0], texts
        return texts, [torch.load(file) for file in saved]

    return run


@pytest.mark.long
@pytest.mark.processes
def test_elastic_members_end_with_the_same_weights_and_have_learnt(trained, monkeypatch):
    texts, (first, second) = trained("train_elastic.py", "--epochs", "2")
    assert all("epoch 1, batch 45 of 45" in each for each in texts)
    assert all(torch.equal(first[name], second[name]) for name in first)
    monkeypatch.syspath_prepend(EXAMPLES)
    import digits  # noqa: PLC0415 - the examples are no package, and on the path only here

    assert digits.accuracy(first, digits.load()[1]) > 0.85


@pytest.mark.processes
def test_agents_normalise_alike_and_have_learnt(trained):
    texts, (first, second) = trained("train_agent.py", "--iterations", "20")
    assert first["0.count"] == 20 * (64 + 32) * 20
    assert all(torch.equal(first[name], second[name]) for name in first)
    means = [float(mean) for mean in re.findall(r"mean return (\S+)", texts[0])]
    assert means[-1] > means[0] / 3
