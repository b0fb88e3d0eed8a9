import sqlite3

import pytest

from server.__main__ import main
from server.view.recording import Recorder, is_recording, recorded
from server.view.snapshot import Watcher
from statsd_bn.errors import ConfigurationError
from support.view_reports import group, member, report


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
