"""Hosts in network namespaces, a wire between them, and the server's and members' processes on them."""

import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from chaos.chaos_world import Finding, require
from netns.netns_wire import Wire, open_tun
from support.paths import ROOT, TESTS

CLONE_NEWNET = 0x40000000
PORT = 5555

# Limit of a wait for a process, far above what any scenario takes.
WAIT_SECONDS = 300.0

_names = itertools.count()
_PROGRAM = Path(__file__).parent / "netns_member.py"


def reason_to_skip() -> str:
    """Why network namespaces are unavailable here; empty if they are available."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    try:
        subprocess.run(["ip", "netns", "list"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "needs iproute2's `ip netns`"
    return ""


class Host:
    """A network namespace with one address; `hosts` is its own /etc/hosts."""

    def __init__(self, number: int) -> None:
        self.name = f"statsd-bn-{os.getpid()}-{next(_names)}"
        self.ip = f"10.77.0.{number}"
        self.address = bytes(map(int, self.ip.split(".")))
        self.hosts = Path("/etc/netns", self.name, "hosts")
        self.device = -1

    def open(self) -> None:
        self.hosts.parent.mkdir(parents=True)
        self.hosts.write_text("127.0.0.1 localhost\n")
        _ip("netns", "add", self.name)
        self.device = _in_namespace(self.name, lambda: open_tun("tun0"))
        for command in ("addr add {}/24 dev tun0", "link set lo up", "link set tun0 up"):
            _ip("-n", self.name, *command.format(self.ip).split())

    def close(self) -> None:
        if self.device >= 0:
            os.close(self.device)
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)
        self.hosts.unlink(missing_ok=True)
        with suppress(OSError):
            self.hosts.parent.rmdir()

    def run(self, *arguments: str) -> "subprocess.Popen[str]":
        command = ["ip", "netns", "exec", self.name, sys.executable, *arguments]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), "OMP_NUM_THREADS": "1"}
        environ["STATSD_BN_INSECURE"] = "1"
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)


class Network:
    """Some hosts on one wire; a context manager that leaves nothing behind."""

    def __init__(self, size: int) -> None:
        self.hosts = [Host(number) for number in range(1, size + 1)]
        self.wire: Wire

    def __enter__(self) -> Self:
        try:
            for host in self.hosts:
                host.open()
        except BaseException:
            self._close()
            raise
        self.wire = Wire({host.address: host.device for host in self.hosts})
        self.wire.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.wire.__exit__(kind, error, trace)
        self._close()

    def _close(self) -> None:
        for host in self.hosts:
            host.close()

    def part(self, *ways: tuple[Host, Host]) -> None:
        self.wire.cut((one.address, other.address) for one, other in ways)

    def isolate(self, host: Host) -> None:
        others = [other for other in self.hosts if other is not host]
        self.part(*((host, other) for other in others), *((other, host) for other in others))


class Server:
    """`python -m server` on a host; a context manager."""

    def __init__(self, host: Host, *options: str) -> None:
        self._process = host.run(
            "-m", "server", "--bind", f"tcp://0.0.0.0:{PORT}", "--insecure", "--log-level", "error", *options
        )

    def __enter__(self) -> Self:
        line = self._process.stdout.readline()
        if not line.startswith("listening on "):
            self.kill()
            raise Finding(f"the server did not start: {line}")
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kills the server; may be called again."""
        self._process.kill()
        self._process.wait(WAIT_SECONDS)
        self._process.stdout.close()


class Members:
    """A training process on each host; a context manager that kills all of them at its end."""

    def __init__(self, hosts: Sequence[Host], server: str, steps: int, deadline: float) -> None:
        self._processes = [
            host.run(str(_PROGRAM), f"tcp://{server}:{PORT}", str(member), str(len(hosts)), str(steps), str(deadline))
            for member, host in enumerate(hosts)
        ]
        self._logs: list[list[str]] = [[] for _ in hosts]
        self._readers = [
            threading.Thread(target=self._read, args=(member,), daemon=True) for member in range(len(hosts))
        ]

    def __enter__(self) -> Self:
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        for process, reader in zip(self._processes, self._readers, strict=True):
            process.wait(WAIT_SECONDS)
            reader.join(WAIT_SECONDS)
            process.stdout.close()

    @property
    def steps(self) -> int:
        """The number of steps of the slowest member."""
        return min(sum(line.startswith("step") for line in log) for log in self._logs)

    def wait_for_step(self, step: int) -> None:
        """Waits until all members have done `step` steps."""
        expiry = time.monotonic() + WAIT_SECONDS
        while self.steps < step:
            ended = [member for member, process in enumerate(self._processes) if process.poll() is not None]
            require(
                not ended, f"members {ended} ended before step {step}; they said {[log[-3:] for log in self._logs]}"
            )
            require(time.monotonic() < expiry, f"step {step} was not reached; in step {self.steps}")
            time.sleep(0.01)

    def results(self) -> list[dict[str, Any]]:
        for process in self._processes:
            try:
                process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired as expired:
                raise Finding(f"a member did not end within {WAIT_SECONDS:g} s; in step {self.steps}") from expired
        for reader in self._readers:
            reader.join(WAIT_SECONDS)
        found = []
        for log in self._logs:
            last = log[-1] if log else ""
            require(last.startswith("{"), f"a member ended without a result: {log[-5:]}")
            found.append(json.loads(last))
        return found

    def _read(self, member: int) -> None:
        for line in self._processes[member].stdout:
            self._logs[member].append(line.strip())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _in_namespace(name: str, what: Any) -> Any:
    """Calls `what` in a thread that enters a network namespace; the process's other threads stay outside."""
    found: list[Any] = []

    def enter() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", name).open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
        found.append(what())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    require(found, f"the call in the network namespace {name} failed")
    return found[0]
