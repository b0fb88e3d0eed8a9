"""Measure how busy the machine is, and wait until it is quiet."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

SAMPLE_SECONDS = 5.0

# Processors that other programs may use; if they use more, the page says that the machine was busy.
QUIET = 0.3


def busy_processors(seconds: float = SAMPLE_SECONDS) -> float:
    """Returns how many processors all programs used, on average over so many seconds.

    The load average would still contain a benchmark for minutes after its end.
    """
    worked, total = _ticks()
    time.sleep(seconds)
    worked_since, total_since = (now - before for now, before in zip(_ticks(), (worked, total), strict=True))
    return _nr_processors() * worked_since / max(1, total_since)


def wait_until_quiet(most_seconds: float) -> float:
    """Waits for a sample of at most `QUIET` busy processors, or until the time is over; returns the last sample."""
    end = time.monotonic() + most_seconds
    while (busy := busy_processors()) > QUIET and time.monotonic() < end:
        pass
    return busy


class Others:
    """Measures the processors that other programs use: all but this process and its descendants.

    Attributes:
        processors: average number of them between entering and leaving the `with` block.
    """

    def __init__(self) -> None:
        self.processors = 0.0

    def __enter__(self) -> Self:
        self._worked, self._total = _ticks()
        self._ours = _ticks_of_family()
        return self

    def __exit__(self, *_: object) -> None:
        worked, total = _ticks()
        ours = _ticks_of_family() - self._ours
        elapsed = (total - self._total) / _nr_processors()
        self.processors = max(0.0, worked - self._worked - ours) / max(1.0, elapsed)


def _ticks_of_family() -> int:
    """Returns the ticks of this process and its descendants, including ended ones that were waited for."""
    spent, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            _, _, after = path.read_text().rpartition(")")  # a program's name may have spaces
            fields = after.split()
            parents[int(path.parent.name)] = int(fields[1])
            spent[int(path.parent.name)] = sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while descendants := {child for child, parent in parents.items() if parent in family} - family:
        family |= descendants
    return sum(spent.get(each, 0) for each in family)


def _ticks() -> tuple[int, int]:
    """Returns the ticks of all processors together since the system's start: busy, and in total."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    _, _, _, idle, waiting_for_disks, *_ = fields
    return sum(fields) - idle - waiting_for_disks, sum(fields)


def _nr_processors() -> int:
    lines = Path("/proc/stat").read_text().splitlines()
    return sum(line.startswith("cpu") and line[3].isdigit() for line in lines)
