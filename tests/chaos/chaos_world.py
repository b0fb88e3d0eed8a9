"""The processes of the chaos tests: a server to kill, and members that train; each ends with its `with` block."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from programs import chaos_programs
from programs.chaos_programs import READY, Part, Report
from support.starter import STARTER

# Far above the promised times: anything slower hangs.
WAIT_SECONDS = 60.0

# Interval of checks on the members' progress.
LOOK_SECONDS = 0.001

WORLD = 3

# Starting or joining a process polls all others too, and two threads must not reap the same exit code.
_LIFE = threading.Lock()


class Finding(AssertionError):
    """A broken promise of the project."""


def require(condition: object, text: str) -> None:
    """Raises a `Finding` unless the condition is true."""
    if not condition:
        raise Finding(text)


class Server:
    """`python -m server` on one endpoint, which may be killed and restarted; a context manager."""

    def __init__(self, folder: Path, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self.endpoint = endpoint
        self._log = folder / "server.log"
        self._process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._stop()
        finally:
            self._process.kill()
            self._end()

    def restart(self) -> None:
        self._process.kill()
        self._end()
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[str]":
        with self._log.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "server", "--insecure", "--bind", self.endpoint, "--log-level", "error"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        line = process.stdout.readline()
        self.listening = time.monotonic()
        if not line.startswith("listening on "):
            process.kill()
            process.communicate()
            raise Finding(f"the server did not start: {self._log.read_text()}")
        self.endpoint = line.split()[-1]
        return process

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(WAIT_SECONDS)
        require(self._process.poll() == 0, f"the server ended after SIGTERM with {self._process.poll()}")
        require(not self._log.read_text(), f"the server complained: {self._log.read_text()}")

    def _end(self) -> None:
        self._process.wait(WAIT_SECONDS)
        self._process.stdout.close()


@dataclass(frozen=True)
class _Process:
    process: BaseProcess
    pipe: Any
    progress: Any


class Members:
    def __init__(
        self,
        endpoints: Sequence[str],
        job: str,
        steps: int,
        deadline: float = WAIT_SECONDS,
        trouble: tuple[int, str, int] = (-1, "", 0),
    ) -> None:
        self._members: list[_Process] = []
        for member, endpoint in enumerate(endpoints):
            troubles = trouble[1:] if member == trouble[0] else ("", 0)
            part = Part(endpoint, job, member, len(endpoints), deadline, steps, *troubles)
            ours, theirs = STARTER.Pipe()
            progress = STARTER.RawValue("q", 0)
            process = STARTER.Process(target=chaos_programs.take_part, args=(part, theirs, progress), daemon=True)
            with _LIFE:
                process.start()
            theirs.close()
            self._members.append(_Process(process, ours, progress))

    def __enter__(self) -> Self:
        try:
            for member in self.all:
                message = self._receive(member)
                require(message == READY, f"member {member} could not connect: {message}")
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    @property
    def all(self) -> range:
        return range(len(self._members))

    def others(self, *members: int) -> list[int]:
        return [member for member in self.all if member not in members]

    @property
    def steps(self) -> list[int]:
        return [member.progress.value for member in self._members]

    def allow(self, steps: int) -> None:
        for member in self._members:
            with suppress(BrokenPipeError):
                member.pipe.send(steps)

    def wait_until(self, condition: Callable[[list[int]], bool], text: str) -> None:
        expiry = time.monotonic() + WAIT_SECONDS
        while not condition(self.steps):
            ended = [self._receive(member) for member in self.all if self._members[member].pipe.poll()]
            failed = [report.what for report in ended if isinstance(report.what, Exception)]
            require(not failed, f"{text}: got {failed} in step {self.steps}")
            require(time.monotonic() < expiry, f"{text}: still in steps {self.steps} after {WAIT_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)

    def send_signal(self, member: int, number: signal.Signals) -> None:
        os.kill(self._members[member].process.pid, number)

    def report(self, member: int) -> Report:
        message = self._receive(member)
        require(isinstance(message, Report), f"member {member} said {message}")
        return message

    def let_go(self, *members: int) -> None:
        for member in members:
            self._members[member].pipe.send(0)
        for member in members:
            process = self._members[member].process
            _join(process)
            require(process.exitcode == 0, f"member {member} was let go and ended with {process.exitcode}")

    def _receive(self, member: int) -> Any:
        pipe = self._members[member].pipe
        require(pipe.poll(WAIT_SECONDS), f"member {member} said nothing for {WAIT_SECONDS:g} s; steps {self.steps}")
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise Finding(f"member {member} ended without a word") from error

    def _kill(self) -> None:
        for member in self._members:
            member.pipe.close()
            member.process.kill()
        for member in self._members:
            _join(member.process)


def _join(process: BaseProcess) -> None:
    wait([process.sentinel], WAIT_SECONDS)
    with _LIFE:
        process.join(0)


def descendants() -> set[int]:
    """The running descendants of this process; empty without /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The process's name before these fields can contain a bracket.
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}
