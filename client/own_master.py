"""A master of one's own: a server that this process starts as its child, for the members of its own job.

The client imports nothing of the server, so the child is `python -m server`, the one that lies beside this package. It
ends with this process, however that ends, and as soon as all members have left (`--parent`). One that is killed is
started again where it was, which costs the members a moment and not a bit.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from statsd_bn import keys
from statsd_bn.errors import ServerUnreachable

logger = logging.getLogger("statsd_bn.client")

# The server imports no torch and listens within a second; a loaded machine may take longer.
START_SECONDS = 60.0

# A server that is told to stop needs as long as its answers may take to leave, a second.
STOP_SECONDS = 5.0

# From when on the wait for the other members at the end of this process is worth a warning.
WARN_SECONDS = 10.0

# How often a server is started again: whatever kills more of them would kill the next one too.
RESTARTS = 3

# The name of the client whose keys all members of the job share, and where they lie in the folder of all keys.
MEMBER = "member"
MEMBERS_KEYS = f"{keys.SECRET_FOLDER}/{keys.secret_name(MEMBER)}"

# Where `client` and `server` lie; a program named server in the script's folder is none of ours.
PACKAGES = Path(__file__).parents[1]

# Of the script's variables, those that would make this server another one than its arguments say.
NOT_INHERITED = {"STATSD_BN_BIND", "STATSD_BN_CURVE", "STATSD_BN_INSECURE"}

_started: list["OwnMaster"] = []


class OwnMaster:
    """A running server; a thread waits for its end, so that no zombie is left, and starts it again if it failed.

    Args:
        bind: where it listens, a ZeroMQ endpoint.
        with_keys: whether it lets in only those who have keys that are made for it alone.
        patience: how long the members may take to leave when this process is at its end, in seconds.

    Attributes:
        endpoint: where it listens, with the port that it has picked.
        key_file: what the file of the members' keys held; empty without keys. No file is left.

    Raises:
        ServerUnreachable: it did not start.
    """

    def __init__(self, bind: str, *, with_keys: bool, patience: float) -> None:
        self._owner = os.getpid()
        self._patience = patience
        self._is_stopped = False
        self._has_ended = threading.Event()
        try:
            self._keys = _new_keys() if with_keys else {}
            self.key_file = self._keys.get(MEMBERS_KEYS, "")
            self.endpoint = self._start(bind)
        except (OSError, subprocess.SubprocessError) as error:
            raise ServerUnreachable(f"cannot start a server: {error}", endpoint=bind) from error
        _started.append(self)
        threading.Thread(target=self._watch, name="statsd_bn master", daemon=True).start()

    def stop(self) -> None:
        """Tells it to stop, and insists if it does not."""
        self._is_stopped = True
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
        """Returns where it listens, as soon as it does; until then it has its keys in a folder."""
        arguments = ["--bind", bind, "--parent", str(self._owner), *options]
        if not self._keys:
            return self._run(arguments)
        with tempfile.TemporaryDirectory(prefix="statsd_bn-") as folder:
            _write(self._keys, Path(folder))
            return self._run([*arguments, "--curve", folder])

    def _run(self, arguments: Sequence[str]) -> str:
        # In a session of its own: Ctrl-C at the terminal is for the members, which then say goodbye.
        self._process = subprocess.Popen(  # noqa: S603 - this project's own program
            _command(*arguments),
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if self._is_stopped:
            # Whoever stopped it knew only the process before.
            self._process.terminate()
        try:
            return _endpoint(self._process)
        except BaseException:
            _end(self._process)
            raise

    def _watch(self) -> None:
        """Waits for its end, and starts it again where it was as long as it ends otherwise than it should.

        All in one thread, which is there from the beginning: at the interpreter's end Python 3.12 starts none.
        """
        try:
            problem = self._problem()
            for _ in range(RESTARTS):
                if not problem or self._is_stopped:
                    break
                logger.warning("%s; it is started again", problem)
                problem = self._problem_again()
            if problem and not self._is_stopped:
                logger.error("%s; its members wait for it in vain", problem)
        finally:
            with suppress(ValueError):
                _started.remove(self)
            self._has_ended.set()

    def _problem(self) -> str:
        """Waits for its end; returns what was wrong with that, empty if nothing was."""
        code = self._process.wait()
        return f"the server that this process had started {_ending(code)}" if code else ""

    def _problem_again(self) -> str:
        """As `_problem`, of one that is started again; or why it did not start."""
        try:
            self._start(self.endpoint, "--again")
        except (OSError, ServerUnreachable) as error:
            return str(error)
        return self._problem()


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


def _new_keys() -> Mapping[str, str]:
    """Makes the keys of a server and of its members; returns the files' texts by their paths in the server's folder."""
    with tempfile.TemporaryDirectory(prefix="statsd_bn-") as name:
        subprocess.run(  # noqa: S603 - this project's own program
            _command("keygen", name, "--client", MEMBER),
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=START_SECONDS,
            check=True,
        )
        folder = Path(name)
        files = (path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in files}


def _write(files: Mapping[str, str], folder: Path) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
