"""A launcher's process with all its descendants: their output, and a check that none is left."""

import errno
import fcntl
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

# A process imports torch and starts a server in some seconds; a loaded machine may take far longer.
WAIT_SECONDS = 100.0

# Limit for the end of all processes. A server runs for at most 5 s after its parent was killed.
GONE_SECONDS = 15.0

PROC = Path("/proc")
MARK = "STATSD_BN_TEST_MARK"


# For jobs that compile: a compiler holds Python's lock, and a busy machine may deschedule a process for seconds.
PATIENT = {"STATSD_BN_SILENCE_SECONDS": "60"}


class Launched:
    """A command and its descendants, found by a mark in their environment; `__exit__` kills all of them."""

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
        """Wait for the next line with this beginning, and return it."""
        while True:
            line = self._lines.get(timeout=WAIT_SECONDS)
            assert line is not None, f"expected a line {beginning!r}; errors: {self.errors}"
            if line.startswith(beginning):
                return line

    def write_line(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self, seconds: float = WAIT_SECONDS) -> int:
        return self.process.wait(seconds)

    def processes(self, **environ: str) -> list[int]:
        """The ids of its processes that have these environment variables."""
        return _with(**{MARK: self._mark}, **environ)

    def leaves_nothing(self) -> bool:
        """Waits for the end of all its processes; returns whether they ended in time."""
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
    """Kill a process and all others with its mark, and join its reader; TimeoutError if any survives."""
    process.kill()
    kill_all(mark)
    process.wait(WAIT_SECONDS)
    reader.join(WAIT_SECONDS)
    if reader.is_alive():
        raise TimeoutError(f"all processes of {process.args} were killed, and yet their pipe is open")


def kill_all(mark: str) -> None:
    """Kill all processes with this mark and their new children, and wait until none is left."""
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
        return False  # it has ended, or is another user's
    return {f"{name}={value}" for name, value in environ.items()} <= set(found)


def run_to_its_end(command: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    """Run a command and return its output; raises if it times out or returns an error."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        env={**environ, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            output, _ = process.communicate(timeout=WAIT_SECONDS)
        finally:
            kill_all(mark)  # torchrun starts its ranks in separate sessions
    assert process.returncode == 0, output
    return output


# Below the ephemeral ports (from 32768 on Linux), which the kernel may give to another socket before a program listens.
PORTS = range(20_000, 32_000)


def free_port(address: str = "127.0.0.1") -> int:
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as one:
            try:
                one.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder filled by `make`; concurrent callers wait for it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the folder that all workers share
    folder, made = base / name, base / f"{name} is made"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # a failed call may have left files
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
