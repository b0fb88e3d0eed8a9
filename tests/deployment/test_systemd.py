"""The systemd unit uses only flags, variables and exit codes that the server has."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from server.__main__ import EXIT_CODES
from server.config import from_arguments, parser
from statsd_bn.errors import ConfigurationError
from support.paths import ROOT

ANALYZE = shutil.which("systemd-analyze")
UNIT = ROOT / "docker" / "statsd-bn-server.service"
LINES = [line.partition("=")[::2] for line in UNIT.read_text().splitlines() if re.match(r"\w+=", line)]


def values(name: str) -> list[str]:
    return [value for found, value in LINES if found == name]


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for line in values("Environment") for word in shlex.split(line))


def test_the_server_accepts_the_command_and_the_variables():
    ((_, *command),) = map(shlex.split, values("ExecStart"))
    assert command[:2] == ["-m", "server"]
    config = from_arguments(command[2:], environment())
    assert config.bind == ("tcp://0.0.0.0:5555",)
    assert config.curve == "/etc/statsd-bn/keys"
    assert not config.insecure
    variables = {name for name in environment() if name.startswith("STATSD_BN_")}
    assert variables <= set(re.findall(r"STATSD_BN_\w+", parser({}).format_help()))


def test_a_failed_server_is_restarted_unless_its_settings_are_invalid():
    assert values("Restart") == ["always"]
    assert values("RestartPreventExitStatus") == [str(EXIT_CODES[ConfigurationError])]
    assert values("ExecReload") == ["/bin/kill -HUP $MAINPID"]


def test_the_server_has_no_rights_and_cannot_write():
    for name, value in {
        "User": "statsd-bn",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "ProtectSystem": "strict",
        "PrivateTmp": "yes",
        "RuntimeDirectoryMode": "0700",
    }.items():
        assert values(name) == [value]
    # The keys are in /etc, which `ProtectSystem=strict` makes read-only; these settings would undo that.
    assert not [name for name, _ in LINES if name in {"ReadWritePaths", "StateDirectory", "ConfigurationDirectory"}]
    # With PrivateTmp no client would find a socket in /tmp.
    assert "/tmp" not in environment()["STATSD_BN_BIND"]  # noqa: S108 - nothing is made there


@pytest.mark.skipif(not ANALYZE, reason="needs systemd")
def test_systemd_understands_the_unit(tmp_path):
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/statsd-bn/bin/python", sys.executable))
    found = subprocess.run([ANALYZE, "verify", unit], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
