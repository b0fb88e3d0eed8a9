"""A server that the client starts: its endpoint, its keys, and its end without leftovers."""

import os
import re
import signal
import stat
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import zmq

from client.launch import server_process
from client.launch.own_server import member_keys, server_keys
from client.launch.server_process import ServerProcess
from client.launch.settings import resolve
from client.session.channel_pool import ZmqChannelPool
from client.session.connection import Connection
from server.cli.status import ask
from statsd_bn.errors import AuthenticationRefused, ServerUnreachable
from support.launched import PROC, WAIT_SECONDS, Launched
from support.memory_members import wait_until
from support.sentences import says

SECRET = "0123456789abcdef" * 2

with_curve = pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE")
with_proc = pytest.mark.skipif(not (PROC / "self/environ").exists(), reason="finds processes by /proc")


@pytest.fixture
def start():
    masters = []

    def run(bind=None, **given):
        masters.append(ServerProcess(bind, **{"leave_timeout": 20.0, **given}))
        return masters[-1]

    yield run
    for master in masters:
        master.stop()


def member(endpoint, keys=None):
    return Connection(ZmqChannelPool(endpoint, keys), resolve({}, round_timeout=20.0).member)


def has_ended(master):
    return master._has_stopped.is_set() and not (PROC / str(master._process.pid)).exists()


def test_it_listens_in_a_private_folder_that_is_removed_at_its_end(start):
    master = start()
    path = Path(master.endpoint.removeprefix("ipc://"))
    assert [stat.S_IMODE(found.stat().st_mode) for found in (path.parent, path)] == [0o700, 0o600]
    assert ask(master.endpoint)["groups"] == []
    master.stop()
    assert not path.parent.exists()


def test_a_long_name_of_the_temporary_folder_is_no_obstacle(start, tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert ask(start().endpoint)["groups"] == []
    assert list(deep.iterdir()) == []


def _changed(path: Path, before: int) -> bool:
    return path.exists() and path.stat().st_ctime_ns != before


@with_proc
@pytest.mark.parametrize("is_killed_too", [False, True])
def test_its_folder_is_removed_when_its_parent_is_killed(tmp_path, is_killed_too):
    with Launched([sys.executable, "-c", PARENT], {"TMPDIR": str(tmp_path)}, tmp_path / "errors") as parent:
        folder = Path(parent.line("ipc://").removeprefix("ipc://")).parent
        assert folder.parent == tmp_path
        if is_killed_too:
            (server,) = set(parent.processes()) - {parent.process.pid}
            # A killed server's socket remains until the next server replaces it.
            before = (folder / "server").stat().st_ctime_ns
            os.kill(server, signal.SIGKILL)
            wait_until(lambda: _changed(folder / "server", before))
        os.kill(parent.process.pid, signal.SIGKILL)
        parent.process.wait(20)
        assert parent.leaves_nothing()
    assert not folder.exists()


def test_ctrl_c_at_the_terminal_does_not_reach_it(start):
    number = start()._process.pid
    assert os.getsid(number) == number


@with_proc
def test_it_ends_when_its_members_have_left(start):
    master = start()
    member(master.endpoint).close()
    wait_until(lambda: has_ended(master))
    assert master._process.returncode == 0
    assert master not in server_process._started


def test_it_stays_while_a_member_is_there_however_many_have_left(start):
    master = start()
    who = {"round_timeout": 20.0, "world_size": 1}
    first = Connection(ZmqChannelPool(master.endpoint), resolve({}, job="a", **who).member)
    with Connection(ZmqChannelPool(master.endpoint), resolve({}, job="b", **who).member):
        first.close()
        wait_until(lambda: [group["job"] for group in ask(master.endpoint)["groups"]] == ["b"])
        assert master._process.poll() is None


@with_curve
@with_proc
def test_with_keys_it_refuses_others_and_no_key_is_in_a_file_or_an_argument(start, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    paths = []
    monkeypatch.setattr(Path, "write_text", lambda path, *_, **__: paths.append(path))
    monkeypatch.setenv("STATSD_BN_SECRET", SECRET)
    keys = server_keys(SECRET, "job")
    master = start("tcp://0.0.0.0:*", keys=keys)
    assert (list(tmp_path.iterdir()), paths) == ([], [])
    for file in ("cmdline", "environ"):
        held = (PROC / str(master._process.pid) / file).read_bytes().decode()
        assert not [secret for secret in (SECRET, keys.pair.secret) if secret in held]
    endpoint = master.endpoint.replace("//0.0.0.0", "//127.0.0.1")
    assert keys.pair.secret not in repr(keys)
    with pytest.raises(AuthenticationRefused):
        ask(endpoint)
    with pytest.raises(AuthenticationRefused):
        ask(endpoint, keys=member_keys(SECRET, "another job"))
    with member(endpoint, member_keys(SECRET, "job")) as connection:
        assert connection.members == [0]


def test_the_scripts_modules_and_variables_do_not_change_the_server(start, tmp_path, monkeypatch):
    (tmp_path / "server.py").write_text("print('listening on tcp://nowhere:1', flush=True)")
    monkeypatch.chdir(tmp_path)
    for name, value in {"BIND": "tcp://127.0.0.1:1", "CURVE": str(tmp_path), "INSECURE": "1"}.items():
        monkeypatch.setenv(f"STATSD_BN_{name}", value)
    assert ask(start().endpoint)["groups"] == []


def test_a_failed_start_is_an_error_with_the_exit_code(start, monkeypatch, capfd):
    monkeypatch.setenv("STATSD_BN_LOG_LEVEL", "loud")
    with pytest.raises(ServerUnreachable, check=says(r"cannot start a server: .*it exited with code 2 after")):
        start()
    assert "STATSD_BN_LOG_LEVEL: expected one of" in capfd.readouterr().err


def kill(master):
    before = master._process
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: master._process is not before or master._has_stopped.is_set())


@pytest.mark.parametrize("with_keys", [False, pytest.param(True, marks=with_curve)])
def test_a_killed_server_is_restarted_at_its_endpoint(start, caplog, tmp_path, monkeypatch, with_keys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    master = start("tcp://127.0.0.1:*", keys=server_keys(SECRET, "job")) if with_keys else start()
    keys = member_keys(SECRET, "job") if with_keys else None
    with member(master.endpoint, keys) as connection:
        before = connection.all_gather("first", b"1")
        kill(master)
        assert (before, connection.all_gather("second", b"2")) == ({0: b"1"}, {0: b"2"})
    wait_until(lambda: has_ended(master))
    assert master._process.returncode == 0
    assert list(tmp_path.iterdir()) == []
    assert caplog.messages.count("the server that this process started was killed by SIGKILL; restarting it") == 1


def test_a_server_killed_as_soon_as_it_listens_is_restarted(start, monkeypatch):
    start_server = ServerProcess._start

    def killed(self, bind):
        endpoint = start_server(self, bind)
        monkeypatch.undo()
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        return endpoint

    monkeypatch.setattr(ServerProcess, "_start", killed)
    # Wait until the next server listens, as in all tests below.
    assert ask(start().endpoint, WAIT_SECONDS)["groups"] == []


def test_a_server_killed_during_its_restart_is_restarted(start):
    master = start()
    kill(master)
    kill(master)
    assert ask(master.endpoint, WAIT_SECONDS)["groups"] == []


def test_a_server_is_restarted_without_new_threads(start, monkeypatch):
    """From Python 3.12 on no thread starts at the interpreter's end, when member 0 waits for the others."""
    master = start()
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    kill(master)
    assert ask(master.endpoint, WAIT_SECONDS)["groups"] == []


def test_a_restarted_server_does_not_wait_for_members_that_left(start, monkeypatch):
    command = [sys.executable, "-c", QUICKLY_TIRED]
    monkeypatch.setattr(server_process, "_command", lambda *arguments: [*command, *arguments])
    monkeypatch.setenv("STATSD_BN_SILENCE_SECONDS", "2")
    master = start()
    kill(master)
    master.wait_for_members()
    assert master._process.returncode == 0


def test_a_server_killed_repeatedly_is_logged_and_not_restarted(start, caplog, monkeypatch):
    monkeypatch.setattr(server_process, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(server_process, "IMMEDIATE_RESTARTS", 1)
    monkeypatch.setattr(server_process, "MAX_FAILURES", 3)
    master = start()
    for _ in range(server_process.MAX_FAILURES):
        kill(master)
        assert ask(master.endpoint, WAIT_SECONDS)["groups"] == []
    kill(master)
    wait_until(lambda: has_ended(master))
    assert caplog.text.count("restarting it in 0.") == server_process.MAX_FAILURES - server_process.IMMEDIATE_RESTARTS
    assert "was killed by SIGKILL; it is not restarted again, so its members will time out" in caplog.messages[-1]
    assert not Path(master.endpoint.removeprefix("ipc://")).parent.exists()
    assert master not in server_process._started


def test_a_server_stopped_before_its_restart_stays_stopped(start, monkeypatch):
    monkeypatch.setattr(server_process, "FIRST_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr(server_process, "IMMEDIATE_RESTARTS", 0)
    master = start()
    os.kill(master._process.pid, signal.SIGKILL)
    master._process.wait(20)
    master.stop()
    assert has_ended(master)


def test_a_failed_restart_is_logged(start, caplog, monkeypatch):
    master = start()
    monkeypatch.setattr(server_process, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(7)"])
    kill(master)
    wait_until(lambda: has_ended(master))
    assert re.search(
        r"cannot start a server: .* exited with code 7 .*; it is not restarted again, so its members will", caplog.text
    )


def test_a_stopped_server_is_neither_restarted_nor_logged(start, caplog):
    master = start()
    master.stop()
    assert caplog.messages == []
    assert has_ended(master)


def test_a_server_stopped_during_its_restart_ends(start, caplog, monkeypatch):
    master = start()
    is_about_to, may = threading.Event(), threading.Event()
    command = server_process._command

    def late(*arguments):
        is_about_to.set()
        assert may.wait(20.0)
        return command(*arguments)

    monkeypatch.setattr(server_process, "_command", late)
    before = master._process
    os.kill(before.pid, signal.SIGKILL)
    assert is_about_to.wait(20.0)
    stopping = threading.Thread(target=master.stop)
    stopping.start()
    assert master._stopping.wait(20.0)
    may.set()
    stopping.join(20.0)
    wait_until(lambda: master._process is not before and has_ended(master))
    assert master._process.returncode != -signal.SIGKILL
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_silent_server_is_an_error_and_is_stopped(start, monkeypatch):
    monkeypatch.setattr(server_process, "START_SECONDS", 0.2)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(server_process, "_command", lambda *_: command)
    before = _children()
    with pytest.raises(ServerUnreachable, check=says(r"within 0.2 s, but it printed no endpoint after")):
        start()
    assert _children() == before


def test_a_server_that_does_not_start_leaves_no_folder(start, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(server_process, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(7)"])
    for keys in (None, server_keys(SECRET, "job")):
        with pytest.raises(ServerUnreachable, check=says(r"cannot start a server: .*exited with code 7")):
            start(keys=keys)
    assert list(tmp_path.iterdir()) == []


def test_a_long_wait_for_the_members_at_the_end_is_logged(start, monkeypatch, caplog):
    monkeypatch.setattr(server_process, "WARN_SECONDS", 0.05)
    start(leave_timeout=0.2)
    with caplog.at_level("WARNING", "statsd_bn.client"):
        server_process.wait_for_members()
    assert "waiting up to 0.2 s for the other members" in caplog.text


def test_at_its_end_the_process_waits_for_the_members_until_the_timeout(start):
    start(leave_timeout=0.1)
    server_process.wait_for_members()
    patient = start(leave_timeout=20.0)
    member(patient.endpoint).close()
    server_process._started[:] = [patient]
    server_process.wait_for_members()
    assert patient._process.returncode == 0


PARENT = """
import sys, threading
import support.without_torch
from client.launch.server_process import ServerProcess
print(ServerProcess(leave_timeout=20.0).endpoint, flush=True)
sys.stdin.readline()
"""


@with_proc
@pytest.mark.parametrize("has_member", [False, True])
def test_it_ends_with_a_parent_that_is_killed(tmp_path, has_member):
    with Launched([sys.executable, "-c", PARENT], {}, tmp_path / "errors") as parent:
        endpoint = parent.line("ipc://")
        connection = member(endpoint) if has_member else None
        os.kill(parent.process.pid, signal.SIGKILL)
        parent.process.wait(20)
        if connection:
            connection.close()
        assert parent.leaves_nothing()


QUICKLY_TIRED = """
from server import __main__
from server.network import service
service.REJOIN_SECONDS = 0.1
raise SystemExit(__main__.main())
"""


def _refuse(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def _children():
    found = set()
    for thread in (PROC / "self/task").glob("*/children"):
        found |= set(thread.read_text().split())
    return found


def test_the_server_belongs_to_the_same_installation():
    assert (server_process.PACKAGES / "server" / "__main__.py").is_file()
    assert (server_process.PACKAGES / "client" / "launch" / "server_process.py").is_file()
