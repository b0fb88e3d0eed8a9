"""A server that this process starts as its child, for the members of its own job.

The client imports nothing from the server, so the child is `python -m server`, from the folder beside this package. It
ends when this process does, however that ends, and when all members have left (`--parent`). If it is killed it is
started again at the same endpoint; that costs the members a moment and changes no result. Its keys go through a pipe,
so that they are in no file and in no list of arguments.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from statsd_bn.endpoints import SOCKET, make_job_folder, make_private, remove_job_folder
from statsd_bn.error_text import in_log
from statsd_bn.errors import ConfigurationError, ServerUnreachable
from statsd_bn.keys import ServerKeys

logger = logging.getLogger("statsd_bn.client")

# The server imports no torch and listens within a second; a loaded machine may take longer.
START_SECONDS = 60.0

# A server that is told to stop first sends its last answers, which takes up to a second.
STOP_SECONDS = 5.0

# Warn when this process has waited this long at its end for the other members.
WARN_SECONDS = 10.0

# The folder of `client` and `server`, so that a program named server in the script's folder is not taken instead.
PACKAGES = Path(__file__).parents[2]

# Failures longer ago than this do not count.
WINDOW_SECONDS = 60.0

# After so many failures within the window the server starts at once. Then the pauses double, so that the cause has time
# to pass.
AT_ONCE = 3
FIRST_PAUSE_SECONDS = 1.0

# After more failures than this within the window the next server would fail too. The pauses until then add up to 31 s.
AT_MOST = 8

# A server that failed to listen so often in a row will not listen the next time.
STARTS = 3

# Variables of the training script that would change what the server's arguments say.
NOT_INHERITED = {"STATSD_BN_BIND", "STATSD_BN_CURVE", "STATSD_BN_INSECURE", "STATSD_BN_SECRET"}

_started: list["ServerProcess"] = []


class ServerProcess:
    """A running server; a thread waits for its end, so that no zombie is left, and starts it again if it failed.

    Args:
        bind: the ZeroMQ endpoint to listen at; None: a new folder that only this user can enter.
        keys: its keys, and the key of the one client that it lets in; None: no keys.
        leave_timeout: how long the members may take to leave when this process ends, in seconds.

    Attributes:
        endpoint: where it listens, with the port that it chose.

    Raises:
        ServerUnreachable: it did not start.
    """

    def __init__(self, bind: str | None = None, *, keys: ServerKeys | None = None, leave_timeout: float) -> None:
        self._owner = os.getpid()
        self._leave_timeout = leave_timeout
        self._keys = keys
        self._folder: Path | None = None
        self._stopping = threading.Event()
        self._has_ended = threading.Event()
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
        """Stops the server, and kills it if it does not stop."""
        self._stopping.set()
        self._process.terminate()
        if not self._has_ended.wait(STOP_SECONDS):
            self._process.kill()

    def wait_for_members(self) -> None:
        """Waits until all members have left, or the timeout is over."""
        # A forked child inherits the list, but the servers are its parent's.
        if os.getpid() != self._owner:
            return
        quietly = min(WARN_SECONDS, self._leave_timeout)
        if not self._has_ended.wait(quietly):
            logger.warning(
                "this process has finished, but its server waits up to %g s for members that have not",
                self._leave_timeout,
            )
            self._has_ended.wait(self._leave_timeout - quietly)

    def _start(self, bind: str, *options: str) -> str:
        """Starts the server; returns its endpoint once it listens."""
        self._make_folder()
        keys = ["--curve", "-"] if self._keys else []
        return self._run(["--bind", bind, "--parent", str(self._owner), *keys, *options])

    def _run(self, arguments: Sequence[str]) -> str:
        # In a session of its own: Ctrl-C at the terminal must reach only the members, which then leave.
        self._process = subprocess.Popen(  # noqa: S603 - this project's own program
            _command(*arguments),
            env=_environment(),
            stdin=subprocess.PIPE if self._keys else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if self._stopping.is_set():
            # `stop` was called during a restart, and reached only the earlier process.
            self._process.terminate()
        try:
            if self._keys:
                _hand_over(self._process, self._keys)
            return _endpoint(self._process)
        except BaseException:
            _end(self._process)
            raise

    def _watch(self) -> None:
        """Waits for the server to end, and starts it again each time that it failed.

        One thread does all of this, because Python 3.12 starts no thread while the interpreter ends.
        """
        restarts = Restarts()
        try:
            problem, has_listened = self._problem(), True
            while problem and not self._stopping.is_set():
                pause = restarts.pause(time.monotonic(), has_listened=has_listened)
                if pause is None:
                    logger.error("%s; it is not started again, so its members wait in vain", problem)
                    break
                logger.warning("%s; it is started again%s", problem, f" in {pause:g} s" if pause else "")
                # Members take it for the end if the folder is gone. What is wrong with it is told at the start.
                with suppress(ConfigurationError):
                    self._make_folder()
                if not self._stopping.wait(pause):
                    problem, has_listened = self._problem_again()
        finally:
            self._remove_folder()
            with suppress(ValueError):
                _started.remove(self)
            self._has_ended.set()

    def _problem(self) -> str:
        """Waits for the server to end; returns what went wrong, or "" after a normal end."""
        code = self._process.wait()
        return f"the server that this process started {_ending(code)}" if code else ""

    def _problem_again(self) -> tuple[str, bool]:
        """Starts the server again; returns what went wrong, and whether it had listened."""
        try:
            self._start(self.endpoint, "--again")
        except (OSError, ServerUnreachable, ConfigurationError) as error:
            return in_log(error), False
        return self._problem(), True

    def _make_folder(self) -> None:
        """Makes the folder again if a server has removed it, as one does that ends in good order."""
        if self._folder:
            make_private(self._folder)

    def _remove_folder(self) -> None:
        """Removes what a killed server leaves behind."""
        if self._folder:
            with suppress(OSError):
                (self._folder / SOCKET).unlink(missing_ok=True)
            remove_job_folder(self._folder)


class Restarts:
    """The failures of one server; the caller tells the time."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque()
        self._failed_starts = 0

    def pause(self, now: float, *, has_listened: bool) -> float | None:
        """Records a failure; returns the seconds until the next start, or None for no further start."""
        self._failed_starts = 0 if has_listened else self._failed_starts + 1
        self._ends.append(now)
        while self._ends[0] < now - WINDOW_SECONDS:
            self._ends.popleft()
        if self._failed_starts >= STARTS or len(self._ends) > AT_MOST:
            return None
        beyond = len(self._ends) - AT_ONCE
        return FIRST_PAUSE_SECONDS * 2 ** (beyond - 1) if beyond > 0 else 0.0


def wait_for_members() -> None:
    """Waits until the members of all servers of this process have left, or the timeout is over."""
    for server in _started.copy():  # each leaves the list when it ends
        server.wait_for_members()


def _command(*arguments: str) -> list[str]:
    # -P: do not import from the script's folder.
    return [sys.executable, "-P", "-m", "server", *arguments]


def _environment() -> Mapping[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    path = [str(PACKAGES), inherited.get("PYTHONPATH", "")]
    return {
        **inherited,
        "STATSD_BN_LOG_LEVEL": inherited.get("STATSD_BN_LOG_LEVEL") or "warning",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def _endpoint(process: subprocess.Popen[str]) -> str:
    """Reads the endpoint that a starting server prints.

    Raises:
        ServerUnreachable: it printed something else, or nothing in time.
    """
    started = time.monotonic()
    said = _first_line(process)
    _, is_listening, endpoint = said.rstrip("\n").partition("listening on ")
    if not is_listening:
        seconds = time.monotonic() - started
        code = process.poll()
        how = "said nothing" if code is None else _ending(code)
        raise ServerUnreachable(
            f"cannot start a server: expected it to listen within {START_SECONDS:g} s, and it {how} "
            f"after {seconds:.1f} s; its messages are in the error output of this process",
            endpoint="",
            seconds=seconds,
        )
    return endpoint


def _first_line(process: subprocess.Popen[str]) -> str:
    """Reads the server's first line; "" if it ends first, or prints nothing in time."""
    if process.stdout is None:
        return ""
    with process.stdout as output:
        if not wait([output.fileno()], START_SECONDS):
            return ""
        said = output.readline()
    if not said:
        # It is about to end; wait, to report its exit code.
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    return said


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _hand_over(process: subprocess.Popen[str], keys: ServerKeys) -> None:
    # If it has ended already its exit code is reported.
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(keys.text())


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
