"""`python -m server report`: versions, settings and state for a bug report, without names, hosts, addresses or keys."""

import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from server.cli.status import ask
from statsd_bn.errors import StatsdBNError
from statsd_bn.keys import ClientKeys
from statsd_bn.name_conflicts import describe_modules, describe_native_core
from statsd_bn.wire import PROTOCOL_VERSION

PACKAGES = ("statsd-bn", "torch", "pyzmq", "msgpack", "numpy", "triton", "lightning", "mmengine", "monai")

# Our and launchers' variables that are printed with their values, because these contain no names. Of our other
# variables only the name is printed.
PREFIX = "STATSD_BN_"
OURS = ("TRANSPORT", "NATIVE", "TRACEBACK", "LOG_LEVEL", "INSECURE")
HARMLESS = {*(PREFIX + name for name in OURS), "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"}

LOG_LINES, MAX_LINE = 20, 300  # of a log; longer lines are cut
MAX_LOG_BYTES = 64 * 1024  # read from the end of a log

# Run in a separate process: torch's import takes seconds, and a broken CUDA can end the process.
DEVICES = """
import torch
found = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
found += ["MPS"] * torch.backends.mps.is_available()
print(f"CUDA {torch.version.cuda or 'not in this build'}; devices: {', '.join(['CPU', *found])}")
"""
DEVICES_SECONDS = 60.0

# Patterns of keys, addresses and names, each with its replacement. Messages quote names, and put a host before its pid.
REDACTED = (
    # A key has 40 characters, and may look like a folder or a host in part.
    (re.compile(r"(?<=\bkey )\S{32,}"), "KEY"),
    (re.compile(r"(?<![\w'])'[^']*(?:'|$)|\"[^\"]*(?:\"|$)"), "'...'"),
    (re.compile(r"\([^()]*, pid \d+\)|\([^()]*$"), "(HOST, pid)"),
    (re.compile(r"\b(?:tcp|ipc|http|https)://[^\s;,]+"), "ADDRESS"),
    # IPv6, in brackets or not: an address has `::` or seven colons, and may end in an IPv4 address or an interface.
    (re.compile(r"\[[0-9a-fA-F:]+\]"), "ADDRESS"),
    (
        re.compile(
            r"(?<![\w:])(?=[0-9a-fA-F:]*::|(?:[0-9a-fA-F]+:){7})"
            r"[0-9a-fA-F:]+(?:\.\d+){0,3}(?:%[\w.-]*\w)?(?!\w|:[\w:])(?<!\w:)"
        ),
        "ADDRESS",
    ),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "ADDRESS"),
    (re.compile(r"(?:(?<=[\s=(':])|^)[~/][^\s,;:]*/([^\s,;:/]+)"), r".../\1"),
    (re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:local|lan|internal|com|net|org|edu|io)\b"), "HOST"),
    (re.compile(r"(?<!\S)\S{32,}"), "KEY"),
)


def describe(
    endpoint: Callable[[], str],
    keys: Callable[[str], ClientKeys | None],
    log: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Text for a bug report; an error that `endpoint` or `keys` raises becomes a line of it."""
    return "\n".join((*_versions(), *_settings(environ), *_server(endpoint, keys), *(_log(log) if log else ())))


def _versions() -> Iterator[str]:
    packages = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    yield f"{packages}, protocol {PROTOCOL_VERSION}"
    memory = "shared memory" if Path("/dev/shm").is_dir() else "no /dev/shm"  # noqa: S108 - only looked at
    system = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} processors, {memory}"
    yield f"{platform.python_implementation()} {platform.python_version()}, {system}"
    yield f"torch: {_devices()}"
    yield describe_native_core()
    yield from describe_modules(with_paths=False)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _devices() -> str:
    if not _version("torch"):
        return "not installed"
    try:
        done = subprocess.run(  # noqa: S603 - our own line, by this interpreter
            [sys.executable, "-c", DEVICES], capture_output=True, text=True, timeout=DEVICES_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"gave no answer within {DEVICES_SECONDS:g} s"
    if done.returncode:
        return f"cannot be imported: {redact((done.stderr.strip() or 'no message').splitlines()[-1])}"
    return done.stdout.strip()


def _settings(environ: Mapping[str, str]) -> Iterator[str]:
    names = sorted(name for name in environ if name.startswith(PREFIX) or name in HARMLESS)
    shown = [f"{name}={environ[name]}" if name in HARMLESS else f"{name} is set" for name in names]
    yield f"environment: {redact(', '.join(shown)) or 'no variable of statsd_bn or a launcher'}"


def _server(endpoint: Callable[[], str], keys: Callable[[str], ClientKeys | None]) -> Iterator[str]:
    try:
        found = endpoint()
        report = ask(found, keys=keys(found))
    except StatsdBNError as error:
        yield f"server: no report: {type(error).__name__}: {redact(error.message)}"
        return
    up = f"{found.partition(':')[0]}, up {report['seconds']:.0f} s, {report['received']} messages"
    yield f"server: {up}, {report['bad_frames']} bad frames, {len(report.get('ended', ()))} ended jobs"
    for number, group in enumerate(report["groups"]):
        rounds = f"{group['rounds_done']} rounds done, {group['rounds_failed']} failed, {len(group['waiting'])} open"
        yield f"  group {number}: {len(group['members'])} of {group['world_size']} ranks, {rounds}"
        transports = Counter(member.get("transport") or "unknown" for member in group["members"])
        counted = ", ".join(f"{name} ({ranks} ranks)" for name, ranks in transports.items())
        why = f"; no faster one: {redact(group['why_not_faster'])}" if group.get("why_not_faster") else ""
        yield f"    transport: {counted or 'unknown'}{why}"
        if group["lost"]:
            yield f"    broken: {redact(group['lost'])}"
        kinds = Counter(finding["kind"] for finding in group.get("findings", ()))
        kinds["non-finite"] += len(group.get("non_finite", ()))
        if texts := [f"{count} {kind}" for kind, count in kinds.items() if count]:
            yield f"    findings: {', '.join(texts)}"


def _log(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError as error:
        yield f"log: cannot be read: {error.strerror}"
        return
    yield f"log, its last {len(lines)} lines:"
    yield from (f"  {redact(line)[:MAX_LINE]}" for line in lines)


def redact(text: str) -> str:
    """A text without quoted names, hosts, addresses, folders and anything that may be a key."""
    for pattern, replacement in REDACTED:
        text = pattern.sub(replacement, text)
    return "".join(letter if letter.isprintable() else "?" for letter in text)
