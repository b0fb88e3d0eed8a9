"""A server that this process starts as a child process for its own job.

It ends when this process ends or is killed, or when all members have left (`--parent`). A killed server restarts at
the same endpoint, which delays the members and changes no result. It reads its keys from a pipe.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from statsd_bn.endpoints import SOCKET, make_job_folder, make_private_folder, remove_job_folder
from statsd_bn.errors import ConfigurationError, ServerUnreachable
from statsd_bn.keys import ServerKeys
from statsd_bn.text import log_line

logger = logging.getLogger("statsd_bn.client")

START_SECONDS = 60.0  # the server listens within a second, on a busy machine later
STOP_SECONDS = 5.0  # after SIGTERM a server sends its last replies, which takes up to a second
WARN_SECONDS = 10.0  # at its end, this process warns after waiting this long for the other members

# The folder of `client` and `server`, first in PYTHONPATH: another folder there may have a module named server.
PACKAGES = Path(__file__).parents[2]

# The first failures within the window restart the server at once. Then the pauses double: the cause may be transient.
WINDOW_SECONDS = 60.0
IMMEDIATE_RESTARTS = 3
FIRST_PAUSE_SECONDS = 1.0
MAX_FAILURES = 8  # within the window; the pauses until then add up to 31 s
MAX_FAILED_STARTS = 3  # consecutive starts in which the server did not begin to listen

# Variables of the training script that are not for this server, which gets endpoint and keys in other ways.
NOT_INHERITED = {"STATSD_BN_BIND", "STATSD_BN_CURVE", "STATSD_BN_INSECURE", "STATSD_BN_SECRET"}

_started: list["ServerProcess"] = []


class ServerProcess:
    """A running server at `endpoint`; a thread reaps the child and restarts it after a failure.

    Without `bind` it listens on a socket in a new folder that only this user can enter. Raises ServerUnreachable.
    """

    def __init__(self, bind: str | None = None, *, keys: ServerKeys | None = None, leave_timeout: float) -> None:
        self._owner, self._leave_timeout, self._keys = os.getpid(), leave_timeout, keys
        self._folder: Path | None = None
        self._stopping, self._has_stopped = threading.Event(), threading.Event()
        try:
            if bind is None:
                self._folder = make_job_folder()
            self.endpoint = self._start(bind or f"ipc://{self._folder}/{SOCKET}")
        except BaseException as error:
            self._remove_folder()
            if isinstance(error, OSError):
                raise ServerUnreachable(f"cannot start a server: {error}", endpoint=bind or "") from error
            raise
        _started.append(self)
        threading.Thread(target=self._watch, name="statsd_bn server", daemon=True).start()

    def stop(self) -> None:
        """Stops the server; kills it after `STOP_SECONDS`."""
        self._stopping.set()
        self._process.terminate()
        if not self._has_stopped.wait(STOP_SECONDS):
            self._process.kill()

    def wait_for_members(self) -> None:
        """Waits until all members have left, up to `leave_timeout` seconds."""
        # A forked child inherits `_started`, but not the servers in it.
        if os.getpid() != self._owner:
            return
        silent = min(WARN_SECONDS, self._leave_timeout)
        if not self._has_stopped.wait(silent):
            text = "waiting up to %g s for the other members before stopping the server of this process"
            logger.warning(text, self._leave_timeout)
            self._has_stopped.wait(self._leave_timeout - silent)

    def _start(self, bind: str, *options: str) -> str:
        """Starts the server; returns its endpoint once it listens."""
        self._make_folder()
        keys = ["--curve", "-"] if self._keys else []
        # In a new session: Ctrl-C at the terminal must interrupt only the members, which then leave.
        self._process = process = subprocess.Popen(  # noqa: S603 - this project's own program
            _command("--bind", bind, "--parent", str(self._owner), *keys, *options),
            env=_environment(),
            stdin=subprocess.PIPE if self._keys else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if self._stopping.is_set():
            # `stop` was called during a restart, and terminated only the previous process.
            process.terminate()
        try:
            if self._keys and process.stdin:
                # After a broken pipe, `_read_endpoint` reports the exit code.
                with suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(self._keys.text())
            return _read_endpoint(process)
        except BaseException:
            process.terminate()
            if not _has_exited(process):
                process.kill()
                process.wait()
            raise

    def _watch(self) -> None:
        """Restarts the server after each failure, until a normal exit, also while the interpreter shuts down."""
        try:
            restarts, problem, has_listened = Restarts(), self._exit_problem(), True
            while problem and not self._stopping.is_set():
                pause = restarts.pause(time.monotonic(), has_listened=has_listened)
                if pause is None:
                    logger.error("%s; it is not restarted again, so its members will time out", problem)
                    break
                logger.warning("%s; restarting it%s", problem, f" in {pause:g} s" if pause else "")
                # Without the folder members conclude that the job has ended. If this fails, the next start reports why.
                with suppress(ConfigurationError):
                    self._make_folder()
                if self._stopping.wait(pause):
                    break
                try:
                    self._start(self.endpoint, "--again")
                    problem, has_listened = self._exit_problem(), True
                except (OSError, ServerUnreachable, ConfigurationError) as error:
                    problem, has_listened = log_line(error), False
        finally:
            self._remove_folder()
            with suppress(ValueError):
                _started.remove(self)
            self._has_stopped.set()

    def _exit_problem(self) -> str:
        """Waits for the server to exit; returns the problem, or "" after a normal exit."""
        code = self._process.wait()
        return f"the server that this process started {_format_exit(code)}" if code else ""

    def _make_folder(self) -> None:
        """Creates the folder if it is missing: a server that ends without being killed has removed it."""
        if self._folder:
            make_private_folder(self._folder)

    def _remove_folder(self) -> None:
        """Removes the files of a killed server."""
        if self._folder:
            with suppress(OSError):
                (self._folder / SOCKET).unlink(missing_ok=True)
            remove_job_folder(self._folder)


class Restarts:
    """The failures of one server."""

    def __init__(self) -> None:
        self._failures: deque[float] = deque()
        self._failed_starts = 0

    def pause(self, now: float, *, has_listened: bool) -> float | None:
        """Records a failure; returns the seconds until the next start, or None for no further start."""
        self._failed_starts = 0 if has_listened else self._failed_starts + 1
        self._failures.append(now)
        while self._failures[0] < now - WINDOW_SECONDS:
            self._failures.popleft()
        if self._failed_starts >= MAX_FAILED_STARTS or len(self._failures) > MAX_FAILURES:
            return None
        beyond = len(self._failures) - IMMEDIATE_RESTARTS
        return FIRST_PAUSE_SECONDS * 2 ** (beyond - 1) if beyond > 0 else 0.0


def wait_for_members() -> None:
    """Waits until the members of all servers of this process have left, up to the timeout."""
    for server in _started.copy():  # a server removes itself from the list
        server.wait_for_members()


def _command(*arguments: str) -> list[str]:
    # -P: do not import from the script's folder.
    return [sys.executable, "-P", "-m", "server", *arguments]


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    path = [str(PACKAGES), inherited.get("PYTHONPATH", "")]
    return {
        **inherited,
        "STATSD_BN_LOG_LEVEL": inherited.get("STATSD_BN_LOG_LEVEL") or "warning",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def _read_endpoint(process: subprocess.Popen[str]) -> str:
    """Reads the endpoint that a starting server prints; raises ServerUnreachable for other output or none in time."""
    assert process.stdout is not None  # noqa: S101 - a pipe
    started, line = time.monotonic(), ""
    with process.stdout as output:
        if wait([output.fileno()], START_SECONDS) and not (line := output.readline()):
            _has_exited(process)  # it is exiting
    _, is_listening, endpoint = line.rstrip("\n").partition("listening on ")
    if is_listening:
        return endpoint
    seconds, code = time.monotonic() - started, process.poll()
    how = "printed no endpoint" if code is None else _format_exit(code)
    raise ServerUnreachable(
        f"cannot start a server: expected it to listen within {START_SECONDS:g} s, but it {how} after "
        f"{seconds:.1f} s; see its messages on the stderr of this process",
        endpoint="",
        seconds=seconds,
    )


def _has_exited(process: subprocess.Popen[str]) -> bool:
    """Returns whether a process that is about to exit does so in time."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    return process.returncode is not None


def _format_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
