"""Recording: snapshots in a file of SQLite, to look at after the run."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from server.view.snapshot import Snapshot
from statsd_bn.errors import ConfigurationError

# What the file says it is, so that another program's database is not written into ("stbn").
APPLICATION_ID = 0x7374626E
FIRST_BYTES = b"SQLite format 3\x00"


class Recorder:
    """Appends snapshots to a file, each durable before the next one.

    Events stand in a table of their own, each once, and not in the snapshots.

    Args:
        path: of the file; it is made, or added to.

    Raises:
        ConfigurationError: it is not a recording, or cannot be written.
    """

    def __init__(self, path: str) -> None:
        try:
            self._base = sqlite3.connect(path, check_same_thread=False)
            known = self._base.execute("PRAGMA application_id").fetchone()[0]
            tables = self._base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and known != APPLICATION_ID:
                self._base.close()
                raise ConfigurationError(f"--record: expected a recording or a new file, got {path!r}")
            self._base.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._base.execute("CREATE TABLE IF NOT EXISTS snapshots (time REAL, snapshot TEXT)")
            self._base.execute("CREATE TABLE IF NOT EXISTS events (time REAL, event TEXT)")
            self._base.commit()
        except sqlite3.Error as error:
            raise ConfigurationError(f"--record: cannot write {path!r}: {error}") from error
        self._last_event = 0.0

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot."""
        new = [event for event in snapshot["events"] if event["time"] > self._last_event]
        self._last_event = max((event["time"] for event in new), default=self._last_event)
        with self._base:
            self._base.execute("INSERT INTO snapshots VALUES (?, ?)", (snapshot["time"], _text(snapshot, events=[])))
            self._base.executemany("INSERT INTO events VALUES (?, ?)", [(e["time"], json.dumps(e)) for e in new])

    def close(self) -> None:
        """Close the file."""
        self._base.close()


def is_recording(path: str) -> bool:
    """Whether this is a file of SQLite."""
    file = Path(path)
    try:
        with file.open("rb") as opened:
            return opened.read(len(FIRST_BYTES)) == FIRST_BYTES
    except OSError:
        return False


def recorded(path: str) -> Iterator[Snapshot]:
    """The snapshots of a recording, from the first to the last, each with the events until then.

    Raises:
        ConfigurationError: this is not a recording.
    """
    try:
        with closing(sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True)) as base:
            events = [json.loads(row[0]) for row in base.execute("SELECT event FROM events ORDER BY time")]
            for (text,) in base.execute("SELECT snapshot FROM snapshots ORDER BY time"):
                snapshot: Snapshot = json.loads(text)
                yield {**snapshot, "events": [event for event in events if event["time"] <= snapshot["time"]]}
    except (sqlite3.Error, ValueError) as error:
        raise ConfigurationError(f"expected a recording of --record, got {path!r}: {error}") from error


def _text(snapshot: Snapshot, **other: object) -> str:
    return json.dumps({**snapshot, **other}, separators=(",", ":"))
