"""Child processes of the demo: stopped with it, and shown with their error output when they fail."""

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

# Time for the next line of output before the processes are checked again.
POLL_SECONDS = 0.05


class ChildFailed(Exception):
    """A child failed; the message has its error output."""


class Child:
    """`python ARGUMENTS` as a child process; a context manager that stops it.

    Args:
        name: its name in errors.
        arguments: for the interpreter.
        environ: variables to set besides the inherited ones.
    """

    def __init__(self, name: str, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - __exit__ closes it
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process = subprocess.Popen(  # noqa: S603 - this project's own programs
            [sys.executable, *arguments],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        # Without a reader a full pipe would block the child.
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
        self._errors.close()

    @property
    def running(self) -> bool:
        """Whether the child has not ended."""
        return self._process.poll() is None

    def line(self, seconds: float) -> str | None:
        """Returns the next line of output, or None after `seconds`."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None

    def stop(self) -> None:
        """Terminates the child (SIGTERM, then SIGKILL after 10 s), and waits for its end."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def failure(self) -> str:
        """Returns exit code and error output of a failed child, else an empty text."""
        code = self._process.poll()
        if not code:
            return ""
        self._errors.seek(0)
        output = self._errors.read().decode(errors="replace").strip()
        return f"{self.name} ended with exit code {code}:\n{output or '(no error output)'}"

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line.rstrip("\n"))


@contextmanager
def running_server() -> Iterator[tuple[Child, str]]:
    """Runs `python -m server` with its socket in a temporary folder; yields the process and its endpoint.

    Raises:
        ChildFailed: the server did not start, or did not stop with exit code 0.
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
    """Raises if a child has failed.

    Raises:
        ChildFailed: with the error output of all failed children, since one failure may cause another.
    """
    failures = [failure for child in children if (failure := child.failure())]
    if failures:
        raise ChildFailed("\n\n".join(failures))


def run_group(
    arguments: Sequence[str],
    environs: Sequence[Mapping[str, str]],
    on_line: Callable[[str], None],
    server: Child | None = None,
) -> None:
    """Runs a process for each environment until all have succeeded.

    Args:
        arguments: for the interpreter of each process.
        environs: variables of each process.
        on_line: called with every line that the first process prints.
        server: a further process that must not fail.

    Raises:
        ChildFailed: a process or the server has failed; the others are stopped.
    """
    with ExitStack() as stack:
        members = [
            stack.enter_context(Child(f"process {rank}", arguments, environ)) for rank, environ in enumerate(environs)
        ]
        watched = members if server is None else [server, *members]
        working = True
        while working:
            working = any(member.running for member in members)
            while line := members[0].line(POLL_SECONDS):
                on_line(line)
            check(watched)
