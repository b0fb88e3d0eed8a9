"""A master of one's own: a server that this process starts as its child, for the members of its own job.

The client imports nothing of the server, so the child is `python -m server`, the one that lies beside this package. It
ends with this process, however that ends, and as soon as all members have left (`--parent`). One that is killed is
started again where it was, which costs the members a moment and not a bit. Its keys go through a pipe: they stand in no
file and in no list of arguments.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from client.launch.restarts import Restarts
from statsd_bn.errors import ConfigurationError, ServerUnreachable
from statsd_bn.keys import ServerKeys
from statsd_bn.private_folder import SOCKET, make_job_folder, make_private, remove_job_folder

logger = logging.getLogger("statsd_bn.client")

# The server imports no torch and listens within a second; a loaded machine may take longer.
START_SECONDS = 60.0

# A server that is told to stop needs as long as its answers may take to leave, a second.
STOP_SECONDS = 5.0

# From when on the wait for the other members at the end of this process is worth a warning.
WARN_SECONDS = 10.0

# Where `client` and `server` lie; a program named server in the script's folder is none of ours.
PACKAGES = Path(__file__).parents[2]

# Of the script's variables, those that would make this server another one than its arguments say.
NOT_INHERITED = {"STATSD_BN_BIND", "STATSD_BN_CURVE", "STATSD_BN_INSECURE", "STATSD_BN_SECRET"}

_started: list["OwnMaster"] = []


class OwnMaster:
    """A running server; a thread waits for its end, so that no zombie is left, and starts it again if it failed.

    Args:
        bind: where it listens, a ZeroMQ endpoint; None: in a folder that only this user can enter, made for it.
        keys: its keys, and that of the client that it lets in; None: it asks for none.
        patience: how long the members may take to leave when this process is at its end, in seconds.

    Attributes:
        endpoint: where it listens, with the port that it has picked.

    Raises:
        ServerUnreachable: it did not start.
    """

    def __init__(self, bind: str | None = None, *, keys: ServerKeys | None = None, patience: float) -> None:
        self._owner = os.getpid()
        self._patience = patience
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
        threading.Thread(target=self._watch, name="statsd_bn master", daemon=True).start()

    def stop(self) -> None:
        """Tells it to stop, and insists if it does not."""
        self._stopping.set()
        self._process.terminate()
        if not self._has_ended.wait(STOP_SECONDS):
            self._process.kill()

    def wait_for_members(self) -> None:
        """Waits until all members have left, as long as they may take."""
        # A forked child inherits the list of masters, and none of them.
        if os.getpid() != self._owner:
            return
        quietly = min(WARN_SECONDS, self._patience)
        if not self._has_ended.wait(quietly):
            logger.warning(
                "this process is through, but its server waits for the members that are not, up to %g s", self._patience
            )
            self._has_ended.wait(self._patience - quietly)

    def _start(self, bind: str, *options: str) -> str:
        """Returns where it listens, as soon as it does."""
        if self._folder:
            # A server that ends in good order removes it.
            make_private(self._folder)
        keys = ["--curve", "-"] if self._keys else []
        return self._run(["--bind", bind, "--parent", str(self._owner), *keys, *options])

    def _run(self, arguments: Sequence[str]) -> str:
        # In a session of its own: Ctrl-C at the terminal is for the members, which then say goodbye.
        self._process = subprocess.Popen(  # noqa: S603 - this project's own program
            _command(*arguments),
            env=_environment(),
            stdin=subprocess.PIPE if self._keys else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if self._stopping.is_set():
            # Whoever stopped it knew only the process before.
            self._process.terminate()
        try:
            if self._keys:
                _hand_over(self._process, self._keys)
            return _endpoint(self._process)
        except BaseException:
            _end(self._process)
            raise

    def _watch(self) -> None:
        """Waits for its end, and starts it again where it was as long as it ends otherwise than it should.

        All in one thread, which is there from the beginning: at the interpreter's end Python 3.12 starts none.
        """
        restarts = Restarts()
        try:
            problem, has_listened = self._problem(), True
            while problem and not self._stopping.is_set():
                pause = restarts.pause(time.monotonic(), has_listened=has_listened)
                if pause is None:
                    logger.error("%s; its members wait for it in vain", problem)
                    break
                logger.warning("%s; it is started again%s", problem, f" in {pause:g} s" if pause else "")
                if not self._stopping.wait(pause):
                    problem, has_listened = self._problem_again()
        finally:
            self._remove_folder()
            with suppress(ValueError):
                _started.remove(self)
            self._has_ended.set()

    def _problem(self) -> str:
        """Waits for its end; returns what was wrong with that, empty if nothing was."""
        code = self._process.wait()
        return f"the server that this process had started {_ending(code)}" if code else ""

    def _problem_again(self) -> tuple[str, bool]:
        """As `_problem`, of one that is started again, and True; or why it did not start, and False."""
        try:
            self._start(self.endpoint, "--again")
        except (OSError, ServerUnreachable, ConfigurationError) as error:
            return str(error), False
        return self._problem(), True

    def _remove_folder(self) -> None:
        """Removes what a server leaves behind that was killed."""
        if self._folder:
            with suppress(OSError):
                (self._folder / SOCKET).unlink(missing_ok=True)
            remove_job_folder(self._folder)


def wait_for_members() -> None:
    """Waits until the members have left whom a server of this process serves, as long as they may take."""
    for master in _started.copy():  # each leaves the list when it ends
        master.wait_for_members()


def _command(*arguments: str) -> list[str]:
    # -P: what lies in the script's folder is not to be found.
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
    """Returns where a server listens, as soon as it says so.

    Raises:
        ServerUnreachable: it said something else, or nothing in time.
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
            f"after {seconds:.1f} s; what it had to say is in the error output of this process",
            endpoint="",
            seconds=seconds,
        )
    return endpoint


def _first_line(process: subprocess.Popen[str]) -> str:
    """Returns what it says first; empty if it ends before, or says nothing in time."""
    if process.stdout is None:
        return ""
    with process.stdout as output:
        if not wait([output.fileno()], START_SECONDS):
            return ""
        said = output.readline()
    if not said:
        # It is about to end, and how is worth telling.
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
    # One that has ended already is told of by its exit code.
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(keys.text())


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
