"""A master of one's own: it listens where it is told to, lets in whom it should, and leaves nothing behind."""

import os
import re
import signal
import sys
import tempfile
import threading

import pytest
import zmq

from client import own_master
from client.connection import Connection
from client.environment import member_from
from client.own_master import OwnMaster
from client.transport import ZmqTransport
from launched import PROC, Launched
from memory_members import wait_until
from server.status import ask
from statsd_bn.errors import AuthenticationRefused, ServerUnreachable
from statsd_bn.keys import parse_client

LOOPBACK = "tcp://127.0.0.1:*"

with_curve = pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE")
with_proc = pytest.mark.skipif(not (PROC / "self/environ").exists(), reason="finds processes by /proc")


@pytest.fixture
def start():
    """Starts masters; none outlives the test."""
    masters = []

    def run(bind=LOOPBACK, **given):
        masters.append(OwnMaster(bind, **{"with_keys": False, "patience": 20.0, **given}))
        return masters[-1]

    yield run
    for master in masters:
        master.stop()


def member(endpoint, keys=None):
    return Connection(ZmqTransport(endpoint, keys), member_from({}, deadline=20.0))


def has_ended(master):
    """Whether its owner knows that it has, and no zombie is left."""
    return master._has_ended.is_set() and not (PROC / str(master._process.pid)).exists()


def test_it_listens_on_a_port_that_it_picks_and_stops(start):
    master = start()
    assert master.endpoint.startswith("tcp://127.0.0.1:")
    assert master.key_file == ""
    assert ask(master.endpoint)["groups"] == []
    master.stop()
    assert master._process.returncode == 0


def test_ctrl_c_at_the_terminal_does_not_reach_it(start):
    number = start()._process.pid
    assert os.getsid(number) == number


@with_proc
def test_it_ends_when_its_members_have_left(start):
    master = start()
    member(master.endpoint).close()
    wait_until(lambda: has_ended(master))
    assert master._process.returncode == 0
    assert master not in own_master._started


def test_it_stays_while_a_member_is_there_however_many_have_left(start):
    master = start()
    who = {"deadline": 20.0, "world_size": 1}
    first = Connection(ZmqTransport(master.endpoint), member_from({}, job="a", **who))
    with Connection(ZmqTransport(master.endpoint), member_from({}, job="b", **who)):
        first.close()
        wait_until(lambda: [group["job"] for group in ask(master.endpoint)["groups"]] == ["b"])
        assert master._process.poll() is None


@with_curve
def test_with_keys_it_lets_in_nobody_else_and_no_key_stays_in_a_file(start, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    master = start("tcp://0.0.0.0:*", with_keys=True)
    assert list(tmp_path.iterdir()) == []
    endpoint = master.endpoint.replace("//0.0.0.0", "//127.0.0.1")
    keys = parse_client(master.key_file, "here")
    assert keys.pair.secret not in repr(keys)
    with pytest.raises(AuthenticationRefused):
        ask(endpoint)
    with member(endpoint, keys) as connection:
        assert connection.members == [0]


def test_two_masters_have_keys_of_their_own(start):
    first, second = (start(with_keys=True).key_file for _ in range(2))
    assert parse_client(first, "first").pair != parse_client(second, "second").pair


def test_programs_and_variables_of_the_script_do_not_make_it_another(start, tmp_path, monkeypatch):
    (tmp_path / "server.py").write_text("print('listening on tcp://nowhere:1', flush=True)")
    monkeypatch.chdir(tmp_path)
    for name, value in {"BIND": "tcp://127.0.0.1:1", "CURVE": str(tmp_path), "INSECURE": "1"}.items():
        monkeypatch.setenv(f"STATSD_BN_{name}", value)
    assert ask(start().endpoint)["groups"] == []


def test_a_server_that_does_not_start_is_told_with_its_exit_code(start, monkeypatch, capfd):
    monkeypatch.setenv("STATSD_BN_LOG_LEVEL", "loud")
    with pytest.raises(ServerUnreachable, match=r"cannot start a server: .*it ended with exit code 2 after"):
        start()
    assert "log level: expected one of" in capfd.readouterr().err


def kill(master):
    """Kills its server, and waits until it has another one or none."""
    before = master._process
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: master._process is not before or master._has_ended.is_set())


@pytest.mark.parametrize("with_keys", [False, pytest.param(True, marks=with_curve)])
def test_a_server_that_is_killed_is_started_again_where_it_was(start, caplog, tmp_path, monkeypatch, with_keys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    master = start(with_keys=with_keys)
    keys = parse_client(master.key_file, "here") if with_keys else None
    with member(master.endpoint, keys) as connection:
        before = connection.gather("first", b"1")
        kill(master)
        assert (before, connection.gather("second", b"2")) == ({0: b"1"}, {0: b"2"})
        # Members may be back before its owner has heard that it listens.
        wait_until(lambda: not list(tmp_path.iterdir()))
    wait_until(lambda: has_ended(master))
    assert master._process.returncode == 0
    assert (
        caplog.messages.count("the server that this process had started was ended by SIGKILL; it is started again") == 1
    )


def test_one_that_is_killed_as_soon_as_it_listens_is_started_again(start, monkeypatch):
    run = OwnMaster._run

    def killed(self, arguments):
        endpoint = run(self, arguments)
        monkeypatch.undo()
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        return endpoint

    monkeypatch.setattr(OwnMaster, "_run", killed)
    assert ask(start().endpoint)["groups"] == []


def test_one_that_is_killed_while_it_is_started_again_is_started_once_more(start):
    master = start()
    kill(master)
    kill(master)
    assert ask(master.endpoint, 20.0)["groups"] == []


def test_it_is_started_again_where_no_thread_can_be_started(start, monkeypatch):
    """Python 3.12 starts none any more at the interpreter's end, where member 0 waits for the others."""
    master = start()
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    kill(master)
    assert ask(master.endpoint, 20.0)["groups"] == []


def test_one_that_is_started_again_does_not_wait_for_members_who_have_left(start, monkeypatch):
    """Their goodbyes went to the one that was killed, or to none."""
    command = [sys.executable, "-c", QUICKLY_TIRED]
    monkeypatch.setattr(own_master, "_command", lambda *arguments: [*command, *arguments])
    monkeypatch.setenv("STATSD_BN_SILENCE_SECONDS", "2")
    master = start()
    kill(master)
    master.wait_for_members()
    assert master._process.returncode == 0


def test_one_that_is_killed_again_and_again_is_told_and_not_started_any_more(start, caplog):
    master = start()
    for _ in range(own_master.RESTARTS):
        kill(master)
        assert ask(master.endpoint, 20.0)["groups"] == []
    kill(master)
    wait_until(lambda: has_ended(master))
    assert "was ended by SIGKILL; its members wait for it in vain" in caplog.messages[-1]
    assert master not in own_master._started


def test_one_that_cannot_be_started_again_is_told(start, caplog, monkeypatch):
    master = start()
    monkeypatch.setattr(own_master, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(7)"])
    kill(master)
    wait_until(lambda: has_ended(master))
    assert re.search(r"cannot start a server: .* exit code 7 .*; its members wait for it in vain", caplog.text)


def test_one_that_is_stopped_is_not_started_again_and_nothing_is_told(start, caplog):
    master = start()
    master.stop()
    assert caplog.messages == []
    assert has_ended(master)


def test_one_that_is_stopped_while_it_is_started_again_ends(start, caplog, monkeypatch):
    master = start()
    is_about_to, may = threading.Event(), threading.Event()
    command = own_master._command

    def late(*arguments):
        is_about_to.set()
        assert may.wait(20.0)
        return command(*arguments)

    monkeypatch.setattr(own_master, "_command", late)
    before = master._process
    os.kill(before.pid, signal.SIGKILL)
    assert is_about_to.wait(20.0)
    stopping = threading.Thread(target=master.stop)
    stopping.start()
    wait_until(lambda: master._is_stopped)
    may.set()
    stopping.join(20.0)
    wait_until(lambda: master._process is not before and has_ended(master))
    assert master._process.returncode != -signal.SIGKILL
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_server_that_says_nothing_is_told_and_stopped(start, monkeypatch):
    monkeypatch.setattr(own_master, "START_SECONDS", 0.2)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(own_master, "_command", lambda *_: command)
    before = _children()
    with pytest.raises(ServerUnreachable, match=r"within 0.2 s, and it said nothing after"):
        start()
    assert _children() == before


@with_curve
def test_keys_that_cannot_be_made_are_told_and_leave_no_folder(start, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(own_master, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(ServerUnreachable, match=r"cannot start a server: .*exit status 7"):
        start(with_keys=True)
    assert list(tmp_path.iterdir()) == []


def test_a_long_wait_for_the_members_at_the_end_is_told(start, monkeypatch, caplog):
    monkeypatch.setattr(own_master, "WARN_SECONDS", 0.05)
    start(patience=0.2)
    with caplog.at_level("WARNING", "statsd_bn.client"):
        own_master.wait_for_members()
    assert "its server waits for the members that are not, up to 0.2 s" in caplog.text


def test_whoever_is_at_the_end_waits_for_the_members_as_long_as_it_said(start):
    start(patience=0.1)
    own_master.wait_for_members()
    patient = start(patience=20.0)
    member(patient.endpoint).close()
    own_master._started[:] = [patient]
    own_master.wait_for_members()
    assert patient._process.returncode == 0


PARENT = """
import sys, threading
from client.own_master import OwnMaster
print(OwnMaster("tcp://127.0.0.1:*", with_keys=False, patience=20.0).endpoint, flush=True)
sys.stdin.readline()
"""


@with_proc
@pytest.mark.parametrize("has_member", [False, True])
def test_it_ends_with_a_parent_that_is_killed(tmp_path, has_member):
    with Launched([sys.executable, "-c", PARENT], {}, tmp_path / "errors") as parent:
        endpoint = parent.line("tcp://")
        connection = member(endpoint) if has_member else None
        os.kill(parent.process.pid, signal.SIGKILL)
        parent.process.wait(20)
        if connection:
            connection.close()
        assert parent.leaves_nothing()


QUICKLY_TIRED = """
from server import __main__, service
service.RETURN_SECONDS = 0.1
raise SystemExit(__main__.main())
"""


def _refuse(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def _children():
    found = set()
    for thread in (PROC / "self/task").glob("*/children"):
        found |= set(thread.read_text().split())
    return found
