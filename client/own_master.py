"""A master of one's own: a server that this process starts as its child, for the members of its own job.

The client imports nothing of the server, so the child is `python -m server`, the one that lies beside this package. It
ends with this process, however that ends, and as soon as all members have left (`--parent`).
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
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from statsd_bn import keys
from statsd_bn.errors import ServerUnreachable

logger = logging.getLogger("statsd_bn.client")

# The server imports no torch and listens within a second; a loaded machine may take longer.
START_SECONDS = 60.0

# A server that is told to stop needs as long as its answers may take to leave, a second.
STOP_SECONDS = 5.0

# The name of the client whose keys all members of the job share.
MEMBER = "member"

# Where `client` and `server` lie; a program named server in the script's folder is none of ours.
PACKAGES = Path(__file__).parents[1]

# Of the script's variables, those that would make this server another one than its arguments say.
NOT_INHERITED = {"STATSD_BN_BIND", "STATSD_BN_CURVE", "STATSD_BN_INSECURE"}

_started: list["OwnMaster"] = []


class OwnMaster:
    """A running server; a thread waits for its end, so that no zombie is left.

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
        self._is_stopped = False
        self._patience = patience
        self.key_file = ""
        arguments = ["--bind", bind, "--parent", str(self._owner)]
        try:
            if with_keys:
                # Until the server listens, which it does when it has read them.
                with tempfile.TemporaryDirectory(prefix="statsd_bn-") as folder:
                    self.key_file = _make_keys(Path(folder))
                    self.endpoint = self._start([*arguments, "--curve", folder])
            else:
                self.endpoint = self._start(arguments)
        except (OSError, subprocess.SubprocessError) as error:
            raise ServerUnreachable(f"cannot start a server: {error}", endpoint=bind) from error

    def stop(self) -> None:
        """Tells it to stop, and insists if it does not."""
        self._is_stopped = True
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def wait_for_members(self) -> None:
        """Waits until all members have left, as long as they may take."""
        # A forked child inherits the list of masters, and none of them.
        if os.getpid() == self._owner:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._patience)

    def _start(self, arguments: Sequence[str]) -> str:
        # In a session of its own: Ctrl-C at the terminal is for the members, which then say goodbye.
        self._process = subprocess.Popen(  # noqa: S603 - this project's own program
            _command(*arguments),
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        line: Future[str] = Future()
        threading.Thread(target=self._watch, args=[line], name="statsd_bn master", daemon=True).start()
        try:
            return self._endpoint(line)
        except BaseException:
            self.stop()
            raise

    def _endpoint(self, line: Future[str]) -> str:
        started = time.monotonic()
        try:
            said = line.result(START_SECONDS)
        except TimeoutError:
            said = ""
        _, is_listening, endpoint = said.rstrip("\n").partition("listening on ")
        if not is_listening:
            seconds = time.monotonic() - started
            code = self._process.poll()
            how = "said nothing" if code is None else _ending(code)
            raise ServerUnreachable(
                f"cannot start a server: expected it to listen within {START_SECONDS:g} s, and it {how} "
                f"after {seconds:.1f} s; what it had to say is in the error output of this process",
                endpoint="",
                seconds=seconds,
            )
        _started.append(self)
        return endpoint

    def _watch(self, line: Future[str]) -> None:
        if self._process.stdout is not None:
            with self._process.stdout as output:
                said = output.readline()
        if not said:
            # So that whoever waits for the line finds how it ended.
            self._process.wait()
        line.set_result(said)
        code = self._process.wait()
        if said and code and not self._is_stopped:
            logger.error("the server that this process had started %s; its members wait for it in vain", _ending(code))
        with suppress(ValueError):
            _started.remove(self)


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


def _make_keys(folder: Path) -> str:
    """Makes the keys of a server and of its members; returns what the members' file holds."""
    subprocess.run(  # noqa: S603 - this project's own program
        _command("keygen", str(folder), "--client", MEMBER),
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=START_SECONDS,
        check=True,
    )
    return (folder / keys.SECRET_FOLDER / keys.secret_name(MEMBER)).read_text(encoding="utf-8")


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
