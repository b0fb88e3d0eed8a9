"""A server to attack: `python -m server` of the working directory's checkout, with or without keys, and its memory."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import server as package
from server.cli.status import ask
from server.security.keygen import generate
from server.security.quota import Quota
from statsd_bn.keys import ClientKeys, load_client

# The checkout that is attacked.
ROOT = Path(package.__file__).parents[1]

# Two tenants: the honest job is alice's, and bob attacks.
TENANTS = ("alice", "bob")

START_SECONDS = 30.0

# Memory that a server may use besides its account.
BESIDE_ACCOUNT_BYTES = 64 * 2**20


@dataclass
class Attacked:
    endpoint: str
    process: "subprocess.Popen[str]"
    log: Path  # its log file
    keys: Path | None  # the folder of its keys; None without keys
    settled: int = 0  # resident bytes after its start
    account: int = 0  # its own limit on allocated bytes

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def ending(self) -> str:
        code = self.process.poll()
        if code is None:
            return ""
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def secret_of(self, tenant: str) -> Path | None:
        """The file with a tenant's secret key; None without keys."""
        return self.keys / "secrets" / f"{tenant}.key_secret" if self.keys else None

    def keys_of(self, tenant: str) -> ClientKeys | None:
        path = self.secret_of(tenant)
        return load_client(path) if path else None

    def highest(self) -> int:
        """The server's peak resident memory in bytes."""
        return 1024 * int(_status(self.process.pid, "VmHWM"))

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100.0

    def report(self, tenant: str = "alice", seconds: float = 10.0) -> dict[str, Any]:
        return ask(self.endpoint, seconds, self.keys_of(tenant))

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def attacked(
    folder: Path, *options: str, with_keys: bool = False, bind: str = "tcp://127.0.0.1:*", account: int = 0
) -> Iterator[Attacked]:
    """Run a server; with keys, alice and bob may join only jobs with their own names as prefixes."""
    keys = keys_for_tenants(folder / "keys") if with_keys else None
    curve = ["--curve", str(keys)] if keys else ["--insecure"]
    log = folder / "server.log"
    command = [sys.executable, "-P", "-m", "server", "--bind", bind, "--log-level", "warning", *curve, *options]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=output, text=True
        )
    with process:
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on "), f"{line}{log.read_text()}exit code {process.poll()}"
            found = Attacked(line.split()[-1], process, log, keys, account=account)
            found.settled = found.highest()
            yield found
        finally:
            end(process)


def keys_for_tenants(folder: Path) -> Path:
    if folder.exists():
        return folder
    for tenant in TENANTS:
        generate(folder, [tenant], [f"{tenant}-*"])
    return folder


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STATSD_BN_")}
    return {**inherited, "PYTHONPATH": str(ROOT), **more}


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def accounting(size: int) -> list[str]:
    """Options for a limit on memory, three quarters of it for a tenant."""
    names = {option.name for option in dataclasses.fields(Quota)}
    sizes = {"max_server_bytes": size, "max_tenant_bytes": size * 3 // 4, "max_job_bytes": size}
    return [word for name in sorted(names & sizes.keys()) for word in (f"--{name.replace('_', '-')}", str(sizes[name]))]


def _status(pid: int, name: str) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    return next((line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:")), "0")
