"""The commands: a bare `python -m server` serves, `status` and `check` ask it, `keygen` makes the keys for TCP."""

import json
import signal
import sys
from pathlib import Path

import pytest
import zmq

from support.contract_seed import WAIT_SECONDS, private_folder, run, run_server_command, server_command, serving

# The script that pip installs for [project.scripts] in pyproject.toml.
SCRIPT = Path(sys.executable).with_name("statsd-bn")

with_curve = pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE")


@pytest.fixture(scope="module")
def folder():
    with private_folder() as folder:
        yield folder


def test_a_bare_command_serves_this_user_alone_and_sigterm_ends_it_with_0(folder):
    with serving([sys.executable, "-m", "server"], XDG_RUNTIME_DIR=str(folder)) as server:
        assert server.endpoint == f"ipc://{folder}/statsd_bn/server"
        assert (folder / "statsd_bn").stat().st_mode & 0o777 == 0o700
        assert (folder / "statsd_bn" / "server").is_socket()
        found = run_server_command("status", XDG_RUNTIME_DIR=str(folder))
        assert (found.returncode, found.stderr) == (0, "")
        assert server.terminate() == 0


def test_ctrl_c_ends_a_server_with_0(folder):
    with serving(server_command(folder / "interrupted")) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(WAIT_SECONDS) == 0


@pytest.mark.skipif(not SCRIPT.exists(), reason="the package is not installed beside this interpreter")
def test_the_console_command_is_the_same_command(folder):
    bind = f"ipc://{folder}/console"
    with serving([SCRIPT, "serve", "--bind", bind]) as server:
        assert server.endpoint == bind
        assert run(SCRIPT, "check", bind).returncode == 0
        assert run(SCRIPT, "status", bind).stdout.startswith("server ")


def test_status_reports_for_people_and_as_json_on_one_line(endpoint):
    found = run_server_command("status", endpoint)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("server ")
    assert found.stdout.endswith("\nNo job yet: it appears here once its ranks connect\n")
    as_json = run_server_command("status", "--json", STATSD_BN_ENDPOINT=endpoint)
    assert as_json.stdout.count("\n") == 1
    assert json.loads(as_json.stdout)["groups"] == []


def test_check_says_by_its_exit_code_whether_a_server_answers(endpoint, folder):
    assert run_server_command("check", endpoint).returncode == 0
    nobody = run_server_command("check", f"ipc://{folder}/nobody")
    assert nobody.returncode == 4
    assert nobody.stderr.startswith("statsd_bn: ")
    assert run_server_command("check", "no endpoint").returncode == 2


def test_a_mistyped_flag_or_command_is_one_line_and_exit_code_2():
    for mistyped, expected in (("--isecure", "--insecure"), ("statsu", "status")):
        found = run_server_command(mistyped)
        assert (found.returncode, found.stdout) == (2, "")
        assert f"did you mean {expected}?" in found.stderr
        assert found.stderr.count("\n") == 1


def test_a_server_that_cannot_listen_ends_with_3(folder):
    taken = folder / "taken"
    taken.mkdir()
    found = run(*server_command(taken))
    assert found.returncode == 3
    assert found.stderr.startswith("statsd_bn: ")


@with_curve
def test_tcp_is_open_to_those_who_have_a_key_and_to_nobody_else(folder):
    keys = folder / "keys"
    made = run_server_command("keygen", keys, "--client", "alice")
    assert made.returncode == 0
    assert made.stdout.count("wrote ") == 4
    secret = keys / "secrets" / "alice.key_secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    command = [sys.executable, "-m", "server", "--bind", "tcp://127.0.0.1:*", "--curve", str(keys)]
    with serving(command) as server:
        assert server.endpoint.startswith("tcp://127.0.0.1:")
        assert run_server_command("status", server.endpoint, "--curve", secret).returncode == 0
        assert run_server_command("status", server.endpoint, STATSD_BN_CURVE=str(secret)).returncode == 0
        assert run_server_command("status", server.endpoint).returncode == 5
        assert run_server_command("check", server.endpoint).returncode == 0


def test_tcp_that_other_machines_reach_is_refused_without_keys():
    found = run_server_command("--bind", "tcp://0.0.0.0:*")
    assert (found.returncode, found.stdout) == (2, "")
    assert "--curve" in found.stderr


def test_keygen_overwrites_nothing_and_secret_makes_the_secret_of_a_job(folder):
    secret = folder / "job.secret"
    assert run_server_command("secret", secret).returncode == 0
    assert secret.stat().st_mode & 0o777 == 0o600
    written = secret.read_text()
    assert run_server_command("secret", secret).returncode == 2
    assert secret.read_text() == written
    keys = folder / "more keys"
    for _ in range(2):
        last = run_server_command("keygen", keys)
    assert last.returncode == 2
    assert "client" in last.stderr


def test_the_server_needs_no_torch():
    program = "import sys, server, server.__main__; sys.exit('torch' in sys.modules or 'client' in sys.modules)"
    assert run(sys.executable, "-c", program).returncode == 0
