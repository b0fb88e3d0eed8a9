"""Child processes that never outlive the demo, and whose errors are shown to whoever runs it."""

import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

STOP_SECONDS = 10.0

# The server imports no torch and listens within a second; a loaded machine may take longer.
START_SECONDS = 60.0

# How long a look at one child may take until the next one has its turn.
LOOK_SECONDS = 0.05


class ChildFailed(Exception):
    """A child ended otherwise than it should; the message has what it said."""


class Child:
    """`python ARGUMENTS` as a child process; a context manager that stops it.

    Args:
        name: what to call it in an error.
        arguments: for the interpreter.
        environ: variables to set besides the inherited ones.
    """

    def __init__(self, name: str, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - __exit__ closes it
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process = subprocess.Popen(  # noqa: S603 - this project's own programs
            [sys.executable, *arguments],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        # Without a reader a child that says much would wait for ever with its pipe full.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._complaints.close()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def line(self, seconds: float) -> str | None:
        """Returns the next line of its output, or None if there is none within `seconds`."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None

    def stop(self) -> None:
        """Asks it to end (SIGTERM), insists if it does not (SIGKILL), and waits until it has ended."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def failure(self) -> str:
        """Returns how it ended and what it said, or nothing if it is running or has ended with exit code 0."""
        code = self._process.poll()
        if not code:
            return ""
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip()
        return f"{self.name} ended with exit code {code} and said:\n{said or '(nothing)'}"

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line.rstrip("\n"))


@contextmanager
def running_server() -> Iterator[tuple[Child, str]]:
    """Runs `python -m server` in a folder of its own; gives it and its endpoint.

    Raises:
        ChildFailed: it did not start, or did not stop with exit code 0.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        Child("the server", ["-m", "server", "--bind", f"ipc://{folder}/server", "--log-level", "warning"]) as server,
    ):
        line = server.line(START_SECONDS) or ""
        check([server])
        if not line.startswith("listening on "):
            raise ChildFailed(f"the server: expected 'listening on ENDPOINT' within {START_SECONDS:g} s, got {line!r}")
        yield server, line.removeprefix("listening on ")
        server.stop()
        check([server])


def check(children: Sequence[Child]) -> None:
    """Does nothing while all are running or have ended well.

    Raises:
        ChildFailed: with what each child said that has failed, since one may have failed for another's failure.
    """
    failures = [failure for child in children if (failure := child.failure())]
    if failures:
        raise ChildFailed("\n\n".join(failures))


def run_group(
    arguments: Sequence[str],
    environs: Sequence[Mapping[str, str]],
    tell: Callable[[str], None],
    server: Child | None = None,
) -> None:
    """Runs a process per environment until all have ended well.

    Args:
        arguments: for the interpreter, the same for all.
        environs: a process's own variables.
        tell: called with every line that the first process prints.
        server: what they depend on, watched as they are.

    Raises:
        ChildFailed: one of them, or the server, has ended otherwise; the rest are stopped.
    """
    with ExitStack() as stack:
        members = [
            stack.enter_context(Child(f"process {rank}", arguments, environ)) for rank, environ in enumerate(environs)
        ]
        watched = members if server is None else [server, *members]
        working = True
        while working:
            working = any(member.running for member in members)
            while line := members[0].line(LOOK_SECONDS):
                tell(line)
            check(watched)
