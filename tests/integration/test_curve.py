"""CURVE over real sockets: accepted and refused keys, the refusals' texts, and revocation."""

import errno
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

import client
import server.__main__ as command
from client.session.channel_pool import ZmqChannelPool, secure
from client.session.connection import Connection
from client.session.protocol.member import Member
from server import Config, Service
from server.cli.status import ask
from server.network.listener import POLL_SECONDS
from server.security.keygen import generate, load_query_keys
from statsd_bn.errors import AuthenticationRefused, RegistrationRefused, ReplicaLost, ServerUnreachable
from statsd_bn.keys import ClientKeys, load_client
from statsd_bn.messages import Failure, Heartbeat, Registered, StatusRequest
from statsd_bn.text import unwrap
from statsd_bn.wire import decode, encode
from support.launched import Launched
from support.memory_members import outcome, wait_until
from support.strategies import register, rows

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE")

ANY_PORT = "tcp://127.0.0.1:*"
WAIT_SECONDS = 30.0

# The documented limit for a refusal.
REFUSED_SECONDS = 5.0


def secret(folder: Path, name: str) -> Path:
    return folder / "secrets" / f"{name}.key_secret"


@pytest.fixture
def keys(tmp_path) -> Path:
    generate(tmp_path / "keys", ["alice", "bob"])
    return tmp_path / "keys"


@pytest.fixture
def service(serve, keys) -> Service:
    return serve(curve=keys)


def join(
    endpoint: str, keys: ClientKeys | None, member: int = 0, n: int = 1, job: str = "job", **given: Any
) -> Connection:
    who = Member(job, "world", 0, member, n, 20.0, f"place {member}", **given)
    return Connection(ZmqChannelPool(endpoint, keys), who)


def names(service: Service, keys: ClientKeys) -> list[str]:
    return [group["job"] for group in ask(service.endpoints[0], keys=keys)["groups"]]


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_members_with_different_keys_meet(serve, keys, tmp_path, scheme):
    service = serve("tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{tmp_path}/s", curve=keys)

    def member(number: int, name: str) -> float:
        with join(service.endpoints[0], load_client(secret(keys, name)), number, 2) as connection:
            return client.SlavePipe(connection, "bn").run_slave(rows(number + 1.0)).values.item()

    with ThreadPoolExecutor(2) as executor:
        assert [*executor.map(member, (0, 1), ("alice", "bob"))] == [3.0, 3.0]


def strangers(keys: Path, tmp_path: Path) -> dict[str, ClientKeys | None]:
    generate(tmp_path / "other", ["eve"])
    alice, eve = load_client(secret(keys, "alice")), load_client(secret(tmp_path / "other", "eve"))
    return {
        "no key": None,
        "unknown key": ClientKeys(eve.pair, alice.server),
        "wrong server key": ClientKeys(alice.pair, eve.server),
    }


@pytest.mark.parametrize("reason", ["no key", "unknown key", "wrong server key"])
def test_a_refused_client_gets_the_reason_in_time(service, keys, tmp_path, reason):
    endpoint = service.endpoints[0]
    for attempt in (
        lambda: join(endpoint, strangers(keys, tmp_path / str(time.monotonic()))[reason]),
        lambda: ask(endpoint, keys=strangers(keys, tmp_path / str(time.monotonic()))[reason]),
    ):
        started = time.monotonic()
        error = outcome(attempt)
        assert time.monotonic() - started < REFUSED_SECONDS
        assert isinstance(error, AuthenticationRefused), error
        assert error.fields == {"reason": reason}
        assert endpoint in str(error)
    assert ask(endpoint, keys=load_client(secret(keys, "bob")))["received"] == 1


def test_a_client_with_a_key_is_refused_by_a_server_without_one(serve, keys):
    service = serve()
    with pytest.raises(AuthenticationRefused, match="started without --curve") as caught:
        join(service.endpoints[0], load_client(secret(keys, "alice")))
    # The server closes the connection at once, so the client does not always receive the server's greeting.
    assert caught.value.fields["reason"] in {"no server key", "wrong server key"}


def test_a_client_with_a_key_reports_a_missing_server(keys, tmp_path, monkeypatch):
    monkeypatch.setattr("client.session.protocol.registration.ANSWER_SECONDS", 1.0)
    with pytest.raises(ServerUnreachable):
        join(f"ipc://{tmp_path}/nobody", load_client(secret(keys, "alice")))


def test_connect_takes_the_key_from_its_argument_or_the_environment(service, keys, monkeypatch):
    monkeypatch.setenv("STATSD_BN_CURVE", str(secret(keys, "alice")))
    with client.connect(service.endpoints[0], rank=0, world_size=1):
        pass
    monkeypatch.setenv("STATSD_BN_CURVE", "/nowhere")
    with client.connect(service.endpoints[0], rank=0, world_size=1, curve=secret(keys, "bob")):
        pass


def test_an_idle_members_heartbeats_go_over_a_socket_with_keys(service, keys):
    alice = load_client(secret(keys, "alice"))
    with join(service.endpoints[0], alice):
        before = ask(service.endpoints[0], keys=alice)["received"]
        # Each query counts as one frame; only heartbeats add further ones.
        queries = itertools.count(1)
        wait_until(lambda: ask(service.endpoints[0], keys=alice)["received"] - before > next(queries), 10.0)


def test_a_key_for_certain_jobs_can_join_and_see_only_these_jobs(serve, keys):
    generate(keys, ["carol"], ["carol-*"])
    service = serve(curve=keys)
    alice, carol = (load_client(secret(keys, name)) for name in ("alice", "carol"))
    with join(service.endpoints[0], alice, job="alice-1"):
        with pytest.raises(RegistrationRefused, match=r"'alice-1': the key of 'carol' is for jobs "):
            join(service.endpoints[0], carol, job="alice-1")
        with join(service.endpoints[0], carol, job="carol-1"):
            assert names(service, carol) == ["carol-1"]
            assert names(service, alice) == ["alice-1", "carol-1"]


def test_a_revoked_key_ends_its_members_at_once_and_the_others_hear_why(service, keys):
    endpoint = service.endpoints[0]
    alice, bob = (load_client(secret(keys, name)) for name in ("alice", "bob"))
    with ThreadPoolExecutor(2) as executor:
        joined = [executor.submit(join, endpoint, key, number, 2) for number, key in enumerate((alice, bob))]
        kept, cut = (future.result(WAIT_SECONDS) for future in joined)
        waiting = executor.submit(outcome, lambda: client.SlavePipe(kept, "bn").run_slave(rows(1.0)))
        wait_until(lambda: bool(ask(endpoint, keys=alice)["groups"][0]["waiting"]))
        (keys / "clients" / "bob.key").unlink()
        service.reload()
        error = waiting.result(REFUSED_SECONDS)
    assert isinstance(error, ReplicaLost)
    assert (error.fields["member"], error.fields["cause"]) == (1, "its key was revoked")
    # Bob's open connection receives only AuthenticationRefused, and bob cannot open a new connection.
    assert isinstance(outcome(lambda: client.SlavePipe(cut, "bn").run_slave(rows(1.0))), AuthenticationRefused)
    assert isinstance(outcome(lambda: join(endpoint, bob)), AuthenticationRefused)
    for connection in (kept, cut):
        connection.close()
    with join(endpoint, alice, job="the next"):
        pass


def test_a_key_whose_file_is_replaced_is_revoked(service, keys, tmp_path):
    bob = load_client(secret(keys, "bob"))
    with join(service.endpoints[0], bob) as connection:
        generate(tmp_path / "new", ["bob"])
        shutil.copy(tmp_path / "new" / "clients" / "bob.key", keys / "clients" / "bob.key")
        service.reload()
        alice = load_client(secret(keys, "alice"))
        wait_until(lambda: not ask(service.endpoints[0], keys=alice)["groups"])
        refused = outcome(lambda: client.SlavePipe(connection, "bn").run_slave(rows(1.0)))
        assert isinstance(refused, AuthenticationRefused)


def test_without_any_key_left_all_clients_are_refused(service, keys):
    """An empty folder of keys admits nobody, unlike a server without keys."""
    bob = load_client(secret(keys, "bob"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        secure(dealer, bob)
        dealer.connect(service.endpoints[0])
        dealer.send(encode(register(0, 2)))
        assert dealer.poll(WAIT_SECONDS * 1000)
        assert isinstance(decode(dealer.recv()), Registered)
        for path in (keys / "clients").iterdir():
            path.unlink()
        # When the server answers alice, it has processed bob's frame.
        ask(service.endpoints[0], keys=load_client(secret(keys, "alice")))
        # Simulate a frame that arrives before the server has closed the connection.
        service._principals = {}
        service._members.clear()
        dealer.send(encode(StatusRequest()))
        assert dealer.poll(WAIT_SECONDS * 1000)
        answer = decode(dealer.recv())
    assert isinstance(answer, Failure)
    assert (answer.code, answer.fields) == ("authentication", {"reason": "revoked"})
    assert isinstance(outcome(lambda: ask(service.endpoints[0], keys=bob)), AuthenticationRefused)


def test_a_silent_connection_with_a_revoked_key_is_closed(service, keys):
    bob = load_client(secret(keys, "bob"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        secure(dealer, bob)
        with dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH) as monitor:
            dealer.connect(service.endpoints[0])
            dealer.send(encode(StatusRequest()))
            assert dealer.poll(WAIT_SECONDS * 1000)
            (keys / "clients" / "bob.key").unlink()
            service.reload()
            events = []
            while zmq.EVENT_HANDSHAKE_FAILED_AUTH not in events:
                assert monitor.poll(WAIT_SECONDS * 1000)
                events.append(recv_monitor_message(monitor)["event"])
            dealer.disable_monitor()
    # The server closed the connection, and refused the next one.
    assert events == [zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_AUTH]


def test_refused_connections_are_counted(service, keys, tmp_path):
    for who in strangers(keys, tmp_path).values():
        assert isinstance(outcome(lambda who=who: ask(service.endpoints[0], keys=who)), AuthenticationRefused)
    assert ask(service.endpoints[0], keys=load_client(secret(keys, "alice")))["refused_connections"] >= 3


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_check_with_the_servers_keys_counts_no_refused_connection(serve, keys, tmp_path, monkeypatch, capsys, scheme):
    service = serve("tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{tmp_path}/s", curve=keys)
    endpoint, alice = service.endpoints[0], load_client(secret(keys, "alice"))
    service.reload()
    monkeypatch.setenv("STATSD_BN_CURVE", str(keys))
    assert [command.main(["check", endpoint]) for _ in range(3)] == [0] * 3
    time.sleep(2 * POLL_SECONDS)
    # Counted before a member joins, since a member that ends may break off the handshake of its second socket.
    assert ask(endpoint, keys=alice)["refused_connections"] == 0
    with join(endpoint, alice, job="alice-1"):
        assert command.main(["status", endpoint]) == 0
        assert "\nalice-1: " in capsys.readouterr().out
        with pytest.raises(RegistrationRefused, match="may only ask"):
            join(endpoint, load_query_keys(str(keys)), job="alice-1")


def test_a_check_without_a_key_counts_one_refused_connection(service, keys, caplog):
    caplog.set_level("INFO", "statsd_bn.server")
    endpoint, alice = service.endpoints[0], load_client(secret(keys, "alice"))
    assert [command.main(["check", endpoint]) for _ in range(3)] == [0] * 3
    wait_until(lambda: ask(endpoint, keys=alice)["refused_connections"] >= 3)
    time.sleep(2 * POLL_SECONDS)
    assert ask(endpoint, keys=alice)["refused_connections"] == 3
    assert caplog.text == ""


def test_a_check_with_a_key_fails_where_the_servers_loop_hangs(keys, monkeypatch, capsys):
    monkeypatch.setattr(command, "CHECK_SECONDS", 0.5)
    with Service(Config((ANY_PORT,), curve=str(keys))) as hung:
        assert command.main(["check", hung.endpoints[0], "--curve", str(keys)]) == 4
    assert "no answer" in capsys.readouterr().err


def test_a_revocation_takes_effect_despite_invalid_key_files(service, keys, caplog):
    caplog.set_level("INFO", "statsd_bn.server")
    generate(keys, ["carol"])
    service.reload()
    wait_until(lambda: "accepting 3 keys" in caplog.text)
    alice, bob, carol = (load_client(secret(keys, name)) for name in ("alice", "bob", "carol"))
    endpoint = service.endpoints[0]
    with join(endpoint, alice):
        (keys / "clients" / "bob.key").unlink()
        (keys / "clients" / "carol.key").write_text("nonsense")
        (keys / "clients" / "copy.key").write_bytes((keys / "clients" / "alice.key").read_bytes())
        os.mkfifo(keys / "clients" / "pipe.key")
        service.reload()
        wait_until(lambda: "now accepting 1 keys" in caplog.text)
        for revoked in (bob, carol):
            assert isinstance(outcome(lambda who=revoked: ask(endpoint, keys=who)), AuthenticationRefused)
        assert len(names(service, alice)) == 1
    problems = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [re.search(r"key refused: curve: .*?(\w+\.key)", problem)[1] for problem in problems] == [
        "carol.key",
        "copy.key",
        "pipe.key",
    ]


def test_keys_that_cannot_be_listed_stay_as_they_were(service, keys, caplog):
    alice = load_client(secret(keys, "alice"))
    (keys / "clients").rename(keys / "former")
    (keys / "clients").write_text("")
    service.reload()
    wait_until(lambda: "reload failed, the keys stay unchanged: curve: cannot list" in caplog.text)
    assert names(service, alice) == []


@pytest.mark.parametrize(("of", "function"), [(os, "open"), (Path, "iterdir")])
def test_a_reload_without_descriptors_is_retried_and_keeps_other_keys(service, keys, caplog, monkeypatch, of, function):
    caplog.set_level("INFO", "statsd_bn.server")
    alice, bob = (load_client(secret(keys, name)) for name in ("alice", "bob"))
    endpoint, original, left = service.endpoints[0], getattr(of, function), [3]

    def without_descriptors(path, *arguments):
        if str(path).startswith(str(keys / "clients")) and left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(path, *arguments)

    with join(endpoint, alice):
        (keys / "clients" / "bob.key").unlink()
        monkeypatch.setattr(of, function, without_descriptors)
        service.reload()
        wait_until(lambda: "now accepting 1 keys" in caplog.text)
        assert caplog.text.count("reload failed, the keys stay unchanged: curve: cannot ") == 3
        assert isinstance(outcome(lambda: ask(endpoint, keys=bob)), AuthenticationRefused)
        assert len(names(service, alice)) == 1


def test_no_peer_takes_over_a_connection_by_claiming_its_routing_id(service, keys):
    with zmq.Context() as context, ExitStack() as stack:
        dealers = []
        for name in ("alice", "bob"):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.routing_id = b"the same"
            secure(dealer, load_client(secret(keys, name)))
            dealer.connect(service.endpoints[0])
            dealer.send(encode(register(0, 2, job=name)))
            dealers.append(dealer)
        for dealer in dealers:
            dealer.send(encode(Heartbeat(b"nobody's")))
            answer: Any = None
            # Both peers receive a Registered, and possibly a probe.
            while answer is None or isinstance(answer, Registered):
                assert dealer.poll(WAIT_SECONDS * 1000)
                answer = decode(dealer.recv())
            # If ZeroMQ has accepted the routing id that the peer claims, the server closes that connection.
            assert answer.code in {"unknown_session", "protocol"}


def test_connections_are_refused_without_the_authenticator(keys, monkeypatch, serve):
    """By default ZeroMQ would admit every client that knows the server's public key."""
    monkeypatch.setattr("client.session.protocol.registration.ANSWER_SECONDS", 1.0)
    monkeypatch.setattr("server.network.listener.ZAP_ENDPOINT", "inproc://elsewhere")
    service = serve(curve=keys)
    error = outcome(lambda: join(service.endpoints[0], load_client(secret(keys, "alice"))))
    # Depending on libzmq the handshake fails, or does not end.
    assert isinstance(error, AuthenticationRefused | ServerUnreachable)
    assert service._dispatcher.received == 0


# The server process.


class Command(Launched):
    def __init__(self, folder: Path, *arguments: str) -> None:
        command = (sys.executable, "-m", "server", "--log-level", "debug", *arguments)
        super().__init__(command, {"STATSD_BN_BIND": ANY_PORT}, folder / "log")
        self.endpoint = self.line("listening on ").split()[-1]

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            assert self.end() == 0
        finally:
            super().__exit__()


def test_sighup_accepts_a_new_key_and_no_secret_is_logged(keys, tmp_path):
    with Command(tmp_path, "--curve", str(keys)) as command:
        generate(keys, ["carol"])
        carol = load_client(secret(keys, "carol"))
        with pytest.raises(AuthenticationRefused):
            ask(command.endpoint, keys=carol)
        command.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "now accepting 3 keys" in command.errors)
        with join(command.endpoint, carol):
            pass
        (keys / "clients" / "carol.key").unlink()
        command.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "accepting 2 keys" in command.errors)
    secrets = [
        key for path in keys.rglob("*.key_secret") for key in re.findall(r'secret-key = "(.{40})"', path.read_text())
    ]
    assert len(secrets) == 4
    assert "unknown key" in command.errors
    assert not [key for key in secrets if key in command.errors]


def test_other_machines_may_reach_a_server_with_keys_without_a_warning(keys, tmp_path):
    with Command(tmp_path, "--curve", str(keys), "--bind", "tcp://0.0.0.0:*") as command:
        port = command.endpoint.removeprefix("tcp://0.0.0.0:")
        alice = load_client(secret(keys, "alice"))
        assert ask(f"tcp://127.0.0.1:{port}", keys=alice)["groups"] == []
    assert "WARNING" not in command.errors


def test_sighup_without_the_folder_of_public_keys_revokes_no_key(keys, tmp_path):
    alice = load_client(secret(keys, "alice"))
    with Command(tmp_path, "--curve", str(keys)) as command, join(command.endpoint, alice) as connection:
        (keys / "clients").rename(keys / "away")
        command.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "ERROR" in command.errors)
        (line,) = (line for line in command.errors.splitlines() if "ERROR" in line)
        assert (
            f"reload failed, the keys stay unchanged: curve: cannot list {keys}/clients: No such file or directory"
            in line
        )
        assert client.SlavePipe(connection, "bn").run_slave(rows(1.0)).values.item() == 1.0
        assert ask(command.endpoint, keys=load_client(secret(keys, "bob")))["groups"]


def test_a_folder_without_keys_is_a_usage_error(tmp_path):
    command = [sys.executable, "-m", "server", "--curve", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert ended.returncode == 2
    assert unwrap(ended.stderr).count("\n") == 1
    assert "cannot read" in ended.stderr
