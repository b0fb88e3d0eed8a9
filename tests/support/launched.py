"""Processes of a launcher, with whatever they start themselves: what they say, and that none is left."""

import os
import queue
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

# A process imports torch and starts a server in some seconds; a loaded machine may take far longer.
WAIT_SECONDS = 100.0

# A server stays for 5 s at most when its parent has been killed.
GONE_SECONDS = 15.0

PROC = Path("/proc")
MARK = "STATSD_BN_TEST_MARK"


# For jobs that compile: a compiler holds Python's lock, and on a busy machine a process may stand still for seconds.
PATIENT = {"STATSD_BN_SILENCE_SECONDS": "60"}


class Launched:
    """A command and all that descends from it; a context manager that leaves nothing behind.

    All processes have a mark in their environment, by which they are found wherever they are.
    """

    def __init__(self, command: Sequence[str | Path], environ: dict[str, str], errors: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._errors = errors
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STATSD_BN_")}
        with errors.open("w") as complaints:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                env={**inherited, **environ, MARK: self._mark},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        end_all(self._mark, self.process, self._reader)
        self.process.stdin.close()
        self.process.stdout.close()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def line(self, beginning: str) -> str:
        """The next line that begins so."""
        while True:
            line = self._lines.get(timeout=WAIT_SECONDS)
            assert line is not None, f"expected a line {beginning!r}; errors: {self.errors}"
            if line.startswith(beginning):
                return line

    def tell(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self, seconds: float = WAIT_SECONDS) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(seconds)

    def processes(self, **environ: str) -> list[int]:
        """The ids of its processes with these variables."""
        return _with(**{MARK: self._mark}, **environ)

    def leaves_nothing(self) -> bool:
        """Whether all its processes end, which is waited for."""
        expiry = time.monotonic() + GONE_SECONDS
        while self.processes():
            if time.monotonic() > expiry:
                return False
            time.sleep(0.02)
        return True

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


def end_all(mark: str, process: subprocess.Popen[str], reader: threading.Thread) -> None:
    """Kills a process and all that have its mark, then waits for the thread that reads their pipe.

    Args:
        mark: of all processes that may hold the pipe.
        process: the first of them.
        reader: a daemon thread, so that a pipe that stays open fails a test and does not keep the interpreter.

    Raises:
        TimeoutError: a process is still there, or somebody else holds the pipe. The pipe must not be closed then:
            closing it waits for the thread that reads it.
    """
    process.kill()
    kill_all(mark)
    process.wait(WAIT_SECONDS)
    reader.join(WAIT_SECONDS)
    if reader.is_alive():
        raise TimeoutError(f"all processes of {process.args} were killed, and yet their pipe is open")


def kill_all(mark: str) -> None:
    """Kills all processes with this mark, and those that they have started meanwhile; waits until none is left.

    Raises:
        TimeoutError: some are still there.
    """
    expiry = time.monotonic() + WAIT_SECONDS
    while numbers := _with(**{MARK: mark}):
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if time.monotonic() > expiry:
            raise TimeoutError(f"processes {numbers} were killed {WAIT_SECONDS:g} s ago and have not ended")


def _with(**environ: str) -> list[int]:
    """The ids of the processes with these variables; none where the system has no /proc."""
    entries = PROC.iterdir() if PROC.exists() else ()
    numbers = (int(entry.name) for entry in entries if entry.name.isdigit())
    return [number for number in numbers if _has(number, environ)]


def _has(number: int, environ: dict[str, str]) -> bool:
    try:
        found = (PROC / str(number) / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False  # it has ended meanwhile, or is another user's
    return {f"{name}={value}" for name, value in environ.items()} <= set(found)
