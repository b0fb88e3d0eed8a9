"""`statsd-bn report` contains the facts for a bug report, and none of the user's names."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from zmq.utils import z85

from server.cli.bug_report import describe, redact
from server.network.listener import Authenticator
from statsd_bn import __version__
from statsd_bn.errors import ServerUnreachable
from statsd_bn.name_conflicts import describe_modules

REPORT = {
    "server": "abc", "seconds": 61.0, "received": 12, "bad_frames": 0, "ended": [],
    "groups": [
        {
            "job": "secret-project", "group": "world", "world_size": 2, "rounds_done": 7, "rounds_failed": 1,
            "lost": "in job 'secret-project', group 'world', rank 1 (host-b, pid 812) is lost: no sign of life",
            "waiting": [], "non_finite": ["rank 0 sent NaN"], "findings": [{"kind": "skew"}],
            "why_not_faster": "ranks on host-a and host-b (host-b, pid 812) share no memory",
            "members": [{"member": 0, "transport": "server"}, {"member": 1, "transport": "server"}],
        }
    ],
}  # fmt: skip


def none_answers() -> str:
    raise ServerUnreachable("no server at ipc:///run/user/1000/statsd_bn/server", endpoint="")


def no_keys(endpoint: str) -> None:
    """Replaces the search for keys: a Unix socket needs none."""


def test_versions_devices_and_the_core_come_without_a_server():
    text = describe(none_answers, no_keys, environ={})
    assert f"statsd-bn {__version__}, torch " in text
    assert "devices: CPU" in text
    assert "\nnative core: " in text
    assert "\nclient: statsd_bn's\nserver: statsd_bn's\n" in text
    assert text.endswith("server: no report: ServerUnreachable: no server at ADDRESS")


def test_settings_show_values_only_where_they_name_nothing():
    environ = {
        "STATSD_BN_TRANSPORT": "server",
        "STATSD_BN_JOB": "secret-project",
        "WORLD_SIZE": "2",
        "HOME": "/home/ann",
    }
    text = describe(none_answers, no_keys, environ=environ)
    assert "environment: STATSD_BN_JOB is set, STATSD_BN_TRANSPORT=server, WORLD_SIZE=2" in text
    assert "secret-project" not in text


def test_a_server_is_described_without_names(monkeypatch):
    monkeypatch.setattr("server.cli.bug_report.ask", lambda *_, **__: REPORT)
    text = describe(lambda: "ipc:///run/user/1000/statsd_bn/server", no_keys, environ={})
    assert "server: ipc, up 61 s, 12 messages, 0 bad frames, 0 ended jobs" in text
    assert "group 0: 2 of 2 ranks, 7 rounds done, 1 failed, 0 open" in text
    assert "transport: server (2 ranks); no faster one: " in text
    assert "broken: in job '...', group '...', rank 1 (HOST, pid) is lost: no sign of life" in text
    assert "findings: 1 skew, 1 non-finite" in text
    assert "secret-project" not in text
    assert "pid 812" not in text


def test_the_last_lines_of_a_log_are_redacted(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {number} of job 'digits'\n" for number in range(50)))
    text = describe(none_answers, no_keys, log, environ={})
    assert "log, its last 20 lines:\n  line 30 of job '...'\n" in text
    assert text.endswith("line 49 of job '...'")
    assert "line 29" not in text
    assert "log: cannot be read: No such file" in describe(none_answers, no_keys, tmp_path / "none", environ={})


@pytest.mark.parametrize(
    "address",
    ["10.0.0.7", "::1", "fe80::1%eth0", "2001:db8::8a2e:0:0", "::ffff:10.0.0.7", "2001:db8:0:1:2:3:4:5", "[::1]"],
)
@pytest.mark.parametrize(
    "key", ["rq:rM>}U?@Lns47(1%kR.o@n%FcmmsL/@{H8]yf7", "a=/b/cde:f[0:1](g)=/hi/jk.com::1-m*n&o+p", "0123456789" * 4]
)
def test_a_refused_connection_is_reported_without_its_address_and_key(caplog, address, key):
    caplog.set_level("INFO")
    refusing = SimpleNamespace(_is_allowed=lambda _: False)
    request = [b"", b"", b"1.0", b"1", b"", address.encode(), b"", b"CURVE", z85.decode(key)]
    assert Authenticator._answer(refusing, request)[4] == b"400"
    assert redact(caplog.messages[0]) == "refused a connection from ADDRESS: unknown key KEY"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("listens at tcp://gpu7.lab.example.org:4555, open", "listens at ADDRESS, open"),
        ("connected from 10.0.0.7:4555", "connected from ADDRESS"),
        ('File "/home/ann/train.py", line 3', "File '...', line 3"),
        ("in /home/ann/secret/train.py:41 decode", "in .../train.py:41 decode"),
        ("rank 2 (gpu7, pid 812) timed out", "rank 2 (HOST, pid) timed out"),
        ("host node3.lab.internal is lost", "host HOST is lost"),
        ("12:34:56 c10::Error: at::cuda, std::deque", "12:34:56 c10::Error: at::cuda, std::deque"),
        ("key rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7JHTUZQ0+xY3vKpWnBd5Ec9GAhTL", None),
        ("rank 1's step: 3.5 s, it's late", "rank 1's step: 3.5 s, it's late"),
        ("in job 'secret-proj", "in job '...'"),
        ("rank 3 (gpu-node-17, pid 8", "rank 3 (HOST, pid)"),
        ("path=/home/ann/x.py", "path=.../x.py"),
        ("a\x1b[31mb", "a?[31mb"),
    ],
)  # fmt: skip
def test_names_addresses_keys_and_paths_are_redacted(text, redacted):
    found = redact(text)
    if redacted is None:
        assert "Q0+xY3vKpWnBd5Ec9GAhTL" not in found
    else:
        assert found == redacted


def test_a_module_of_the_users_that_hides_ours_is_reported(tmp_path, monkeypatch):
    (tmp_path / "client.py").touch()
    monkeypatch.chdir(tmp_path)
    assert list(describe_modules()) == [
        f"client: another module, {tmp_path / 'client.py'}, which hides statsd_bn's; rename it or start elsewhere",
        "server: statsd_bn's",
    ]
    (hidden,) = [line for line in describe(none_answers, no_keys, environ={}).splitlines() if "hides" in line]
    assert hidden == "client: another module, which hides statsd_bn's; rename it or start elsewhere"


def test_nothing_of_this_machine_is_named():
    text = describe(none_answers, no_keys, environ={})
    assert socket.gethostname() not in text.replace("\n", " ").split(" ")
    assert str(Path.home()) not in text
