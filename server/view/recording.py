"""Recording: snapshots in a file of SQLite, to look at after the run."""

import json
import math
import sqlite3
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from server.view.snapshot import Snapshot
from statsd_bn.errors import ConfigurationError

# What the file says it is, so that another program's database is not written into ("stbn").
APPLICATION_ID = 0x7374626E
FIRST_BYTES = b"SQLite format 3\x00"

# Figures are averages over some ten seconds, and the largest part of a snapshot.
FIGURES_SECONDS = 10.0

# How long to wait for whoever reads the file meanwhile: the page waits too.
BUSY_SECONDS = 0.5

# A snapshot's number says what came first, and not its time: a clock may be set back.
ALL = "SELECT rowid, snapshot FROM snapshots ORDER BY rowid"
LAST = "SELECT rowid, snapshot FROM snapshots ORDER BY rowid DESC LIMIT 1"
FIGURES = (
    "SELECT figures FROM figures JOIN snapshots ON snapshots.rowid = figures.snapshot "
    "WHERE figures.snapshot <= ? AND time > ? ORDER BY figures.snapshot DESC LIMIT 1"
)


class Recorder:
    """Appends snapshots to a file, each durable before the next one.

    Events stand in a table of their own, each once, and not in the snapshots. So do the figures of the groups, packed
    and one set in FIGURES_SECONDS. Both have the number of their snapshot.

    Args:
        path: of the file; it is made, or added to.

    Raises:
        ConfigurationError: it is not a recording, or cannot be written.
    """

    def __init__(self, path: str) -> None:
        try:
            self._base = sqlite3.connect(path, BUSY_SECONDS, check_same_thread=False)
            known = self._base.execute("PRAGMA application_id").fetchone()[0]
            tables = self._base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and known != APPLICATION_ID:
                self._base.close()
                raise ConfigurationError(f"--record: expected a recording or a new file, got {path!r}")
            self._base.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._base.execute("CREATE TABLE IF NOT EXISTS snapshots (time REAL, snapshot TEXT)")
            self._base.execute("CREATE TABLE IF NOT EXISTS events (snapshot INTEGER, event TEXT)")
            self._base.execute("CREATE TABLE IF NOT EXISTS figures (snapshot INTEGER PRIMARY KEY, figures BLOB)")
            self._base.commit()
        except sqlite3.Error as error:
            raise ConfigurationError(f"--record: cannot write {path!r}: {error}") from error
        self._events = 0
        self._last_figures = -math.inf
        self._fails = False

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot. One that cannot be written, as on a full disk, is left out; the first of several warns."""
        try:
            self._write(snapshot)
        except sqlite3.Error as error:
            if not self._fails:
                sys.stderr.write(f"statsd_bn view: --record: leaves out what it cannot write: {error}\n")
            self._fails = True
        else:
            self._fails = False

    def _write(self, snapshot: Snapshot) -> None:
        total = sum(snapshot["counts"].values())
        events = snapshot["events"]
        new = events[max(0, len(events) - (total - self._events)) :]
        is_recent = self._last_figures <= snapshot["time"] < self._last_figures + FIGURES_SECONDS
        figures = [] if is_recent else _figures(snapshot)
        with self._base:
            text = _text(snapshot, events=[], groups=[_without_figures(group) for group in snapshot["groups"]])
            row = self._base.execute("INSERT INTO snapshots VALUES (?, ?)", (snapshot["time"], text))
            number = row.lastrowid or 0
            if figures:
                packed = zlib.compress(json.dumps(figures, separators=(",", ":"), default=list).encode())
                self._base.execute("INSERT INTO figures VALUES (?, ?)", (number, packed))
            self._base.executemany("INSERT INTO events VALUES (?, ?)", [(number, json.dumps(event)) for event in new])
        # Only now: what could not be written comes with the next one.
        self._events = total
        self._last_figures = snapshot["time"] if figures else self._last_figures

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


def recorded(path: str, *, last: bool = False) -> Iterator[Snapshot]:
    """The snapshots of a recording, from the first to the last, each with the events and the last figures until then.

    Args:
        path: of the file. That of a day has 86,400 snapshots, which take gigabytes all together.
        last: give the last one alone.

    Raises:
        ConfigurationError: this is not a recording.
    """
    try:
        with closing(sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True)) as base:
            rows = base.execute("SELECT snapshot, event FROM events ORDER BY rowid")
            events = [(number, json.loads(event)) for number, event in rows]
            for number, text in base.execute(LAST if last else ALL):
                snapshot: Snapshot = json.loads(text)
                told = [event for at, event in events if at <= number]
                groups = _with_figures(base, number, snapshot["time"], snapshot["groups"])
                yield {**snapshot, "events": told, "groups": groups}
    except (sqlite3.Error, zlib.error, ValueError) as error:
        raise ConfigurationError(f"expected a recording of --record, got {path!r}: {error}") from error


def _with_figures(
    base: sqlite3.Connection, number: int, now: float, groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    # Those that are older are of a group that has none any more.
    row = base.execute(FIGURES, (number, now - 2 * FIGURES_SECONDS)).fetchone()
    known = {tuple(name): figures for *name, figures in json.loads(zlib.decompress(row[0]))} if row else {}
    return [{**group, "figures": known[_name(group)]} if _name(group) in known else group for group in groups]


def _figures(snapshot: Snapshot) -> list[list[Any]]:
    return [[*_name(group), group["figures"]] for group in snapshot["groups"] if "figures" in group]


def _without_figures(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "figures"}


def _name(group: dict[str, Any]) -> tuple[str, str, int]:
    return group["job"], group["group"], group["epoch"]


def _text(snapshot: Snapshot, **other: object) -> str:
    return json.dumps({**snapshot, **other}, separators=(",", ":"))
