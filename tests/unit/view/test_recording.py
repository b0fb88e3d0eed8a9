import json
import sqlite3
import tracemalloc

import numpy as np
import pytest

from server.__main__ import main
from server.view.recording import FIGURES_SECONDS, Recorder, is_recording, recorded
from server.view.snapshot import Watcher
from statsd_bn.errors import ConfigurationError
from support.view_reports import figures, group, layer, member, report


def recording(path):
    watcher = Watcher("tcp://x:1")
    snapshots = [watcher.take(1.0, report(group(member(0)))), watcher.take(2.0, report(group(member(0), member(1))))]
    snapshots.append(watcher.take(3.0, report(group(member(0), member(1)))))
    recorder = Recorder(str(path))
    for snapshot in snapshots:
        recorder.add(snapshot)
    recorder.close()
    return snapshots


def test_what_was_recorded_comes_back(tmp_path):
    snapshots = recording(tmp_path / "run.db")
    assert list(recorded(str(tmp_path / "run.db"))) == snapshots
    assert len(snapshots[2]["events"]) == 1


def test_figures_are_kept_once_in_ten_seconds_and_come_back_until_the_next(tmp_path):
    path, watcher = str(tmp_path / "run.db"), Watcher("tcp://x:1")
    recorder = Recorder(path)
    times = [1.0, 2.0, FIGURES_SECONDS + 1.0, FIGURES_SECONDS + 2.0]
    for now in times:
        of_now = figures(layer("bn1", now / 100, 0.0))
        recorder.add(watcher.take(now, report(group(figures=of_now), group(job="other"))))
    recorder.add(watcher.take(4 * FIGURES_SECONDS, report(group(), group(job="other"))))
    recorder.close()
    groups = [snapshot["groups"] for snapshot in recorded(path)]
    told = [first["figures"]["layers"][0]["parts"][0] for first, _ in groups[:-1]]
    assert told == [0.01, 0.01, 0.11, 0.11]
    assert "figures" not in groups[-1][0], "they are old"
    assert all("figures" not in other for _, other in groups)


def test_a_clock_that_is_set_back_loses_nothing(tmp_path):
    path, watcher = str(tmp_path / "run.db"), Watcher("tcp://x:1")
    recorder = Recorder(path)
    for number, now in enumerate((7200.0, 3600.0, 3601.0)):
        told = report(group(*map(member, range(number + 1)), figures=figures(layer("bn1", now / 1e4, 0.0))))
        recorder.add(watcher.take(now, told))
    recorder.close()
    found = list(recorded(path))
    assert [snapshot["time"] for snapshot in found] == [7200.0, 3600.0, 3601.0]
    assert [len(snapshot["events"]) for snapshot in found] == [0, 1, 2]
    shown = [snapshot["groups"][0]["figures"]["layers"][0]["parts"][0] for snapshot in found]
    assert shown == [0.72, 0.36, 0.36]
    assert [snapshot["time"] for snapshot in recorded(path, last=True)] == [3601.0]


@pytest.mark.parametrize("arguments", [["--json"], ["--json", "--once"]])
def test_a_long_recording_is_not_read_into_memory(tmp_path, capfd, arguments):
    path, watcher = str(tmp_path / "run.db"), Watcher("tcp://x:1")
    recorder = Recorder(path)
    of_one = figures(*(layer(f"bn{number}", *[0.01] * 16) for number in range(20)))
    for now in range(100):
        recorder.add(watcher.take(float(now), report(group(figures=of_one))))
    recorder.close()
    tracemalloc.start()
    try:
        assert main(["view", path, *arguments]) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    said = capfd.readouterr().out.splitlines()
    assert len(said) == (1 if "--once" in arguments else 100)
    assert json.loads(said[-1])["time"] == 99.0
    assert peak < 1_000_000  # all together take 4 MB


def test_what_cannot_be_written_is_left_out_with_a_warning_but_no_event_is(tmp_path, capsys):
    path, watcher = str(tmp_path / "run.db"), Watcher("tcp://x:1")
    recorder = Recorder(path)
    recorder.add(watcher.take(1.0, report(group(member(0)))))
    reader = sqlite3.connect(path)
    assert reader.execute("SELECT time FROM snapshots").fetchone() == (1.0,)
    reader.execute("BEGIN IMMEDIATE")  # as long as another process holds the file
    for now in (2.0, 3.0):
        recorder.add(watcher.take(now, report(group(member(0), member(1)))))
    reader.close()
    recorder.add(watcher.take(4.0, report(group(member(0), member(1)))))
    recorder.close()
    found = list(recorded(path))
    assert [snapshot["time"] for snapshot in found] == [1.0, 4.0]
    assert [event["text"] for event in found[-1]["events"]] == ["rank 1 (host-1, pid 801) joined"]
    text = "statsd_bn view: --record: leaves out what it cannot write: database is locked\n"
    assert capsys.readouterr().err == text


def test_a_minute_of_figures_takes_little_room(tmp_path):
    """Of a ResNet-50 on 16 ranks; one set is 30 kB as JSON, and there is one each second."""
    sizes = []
    for each in (1, 60):
        path, rng = tmp_path / f"{each}.db", np.random.default_rng(0)
        recorder, watcher = Recorder(str(path)), Watcher("tcp://x:1")
        for second in range(60):
            layers = [layer(f"layer{number}.bn", *rng.random(16).round(6).tolist()) for number in range(53)]
            told = {"figures": figures(*layers)} if second % each == 0 else {}
            recorder.add(watcher.take(float(second), report(group(**told))))
        recorder.close()
        sizes.append(path.stat().st_size)
    assert sizes[0] - sizes[1] < 5 * 15_000


@pytest.mark.parametrize("flag", ["--http", "--record", "--name", "--curve"])
def test_what_a_recording_cannot_be_shown_with_is_refused(tmp_path, capsys, flag):
    recording(tmp_path / "run.db")
    assert main(["view", str(tmp_path / "run.db"), flag, "x"]) == 2
    assert f"{flag}: expected an endpoint to watch, got the recording" in " ".join(capsys.readouterr().err.split())


def test_view_shows_a_recording_again(tmp_path, capsys):
    recording(tmp_path / "run.db")
    assert main(["view", str(tmp_path / "run.db")]) == 0
    assert "rank 1 (host-1, pid 801) joined" in capsys.readouterr().out
    assert main(["view", str(tmp_path / "run.db"), "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_foreign_database_is_left_alone(tmp_path):
    path = tmp_path / "other.db"
    base = sqlite3.connect(path)
    base.execute("CREATE TABLE mine (x)")
    base.commit()
    base.close()
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="expected a recording or a new file"):
        Recorder(str(path))
    assert path.read_bytes() == before
    with pytest.raises(ConfigurationError, match="expected a recording of --record"):
        list(recorded(str(path)))
    assert not is_recording(str(tmp_path / "none"))


def test_the_key_for_servers_does_not_keep_a_recording_from_being_viewed(tmp_path, monkeypatch, capsys):
    recording(tmp_path / "run.db")
    monkeypatch.setenv("STATSD_BN_CURVE", "/keys/secret")
    assert main(["view", str(tmp_path / "run.db"), "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["endpoint"] == "tcp://x:1"
    assert main(["view", str(tmp_path / "run.db"), "--curve", "/keys/other"]) == 2
