"""Peers that send frames no client sends. Each once ended the server, or received another peer's answers."""

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from conftest import running_server
from server.cli.status import ask
from server.network import connections
from server.network import service as network_service
from statsd_bn.messages import NO_SERVER, Registered, Status, StatusRequest
from statsd_bn.wire import decode, encode
from support.raw_zmtp import PING, RawPeer, greeting, is_closed, message

WAIT_SECONDS = 30.0
ANY_PORT = "tcp://127.0.0.1:*"


@pytest.mark.parametrize("delay_bytes", [0, 2**14, 2**18])
def test_a_heartbeat_in_a_flood_that_breaks_off_does_not_end_the_server(delay_bytes):
    """libzmq answers a heartbeat at once, and aborts the process if the connection broke in the meantime."""
    flood = (message(b"x") * 100 + PING * 3) * 12
    setup = "from server.network import connections; connections.MAX_REFUSALS = 2**20"
    with running_server("--insecure", bind=ANY_PORT, setup=setup) as server:
        for _ in range(30):
            try:
                peer = RawPeer(server.endpoint)
                peer.socket.sendall(flood + bytes(message(b"x") * (delay_bytes // 10)))
                peer.reset()
            except OSError:
                break
        ask(server.endpoint)


def test_closing_the_connection_of_a_flood_with_heartbeats_does_not_end_the_server():
    flood = (message(b"x") * 300 + PING * 3) * 40
    with running_server("--insecure", bind=ANY_PORT) as server:
        for _ in range(5):
            try:
                with RawPeer(server.endpoint) as peer:
                    for _ in range(1000):
                        peer.socket.sendall(flood)
                    raise AssertionError("the flood was not ended")
            except OSError:
                pass
        ask(server.endpoint)


def answer(peer: RawPeer) -> object:
    """The next message of the server that is not a probe."""
    while True:
        received = decode(peer.receive())
        if not (isinstance(received, Registered) and received.digest == NO_SERVER):
            return received


def test_a_peer_gets_the_reason_before_its_connection_is_closed(serve, monkeypatch):
    monkeypatch.setattr(network_service, "POLL_SECONDS", 0.0)
    most = 16
    monkeypatch.setattr(connections, "MAX_REFUSALS", most)
    service = serve()
    for _ in range(20):
        with RawPeer(service.endpoints[0]) as peer:
            # The server counts refusals anew every quarter of a second, and the flood may span two such periods.
            for _ in range(2 * most + 1):
                peer.send(b"x")
            while answer(peer).code != "limit":
                pass
            assert is_closed(peer.socket)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_peer_without_a_routing_id_is_served_after_any_handshake(serve, is_late):
    service = serve()
    for identity in ((), ((b"Identity", b""),)):
        with RawPeer(service.endpoints[0], *identity, is_late=is_late) as peer:
            peer.send(encode(StatusRequest()))
            assert isinstance(answer(peer), Status)


@pytest.mark.parametrize(
    "hello", [greeting(major=0), greeting(major=1), b"\x01\x00" + message(b"x")], ids=["1.0", "2.0", "unversioned"]
)
def test_peers_of_old_zmtp_are_refused(serve, hello):
    service = serve()
    host, _, port = service.endpoints[0].removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_SECONDS) as old:
        old.sendall(hello)
        assert is_closed(old)
    assert service._dispatcher.received == 0


def test_libcs_random_numbers_differ_between_servers():
    program = (
        "import ctypes; from server import Config, Service; "
        "Service(Config(('tcp://127.0.0.1:*',), insecure=True)).close(); print(ctypes.CDLL(None).rand())"
    )
    numbers = {subprocess.check_output([sys.executable, "-c", program]) for _ in range(2)}
    assert len(numbers) == 2


def test_more_connections_to_a_unix_socket_than_the_soft_limit_of_files_do_not_end_the_server(tmp_path):
    """libzmq aborts a process that has no descriptor left for a new connection."""
    serve = [sys.executable, "-m", "server", "--bind", f"ipc://{tmp_path}/s"]
    with ExitStack() as stack:
        with_limit = ["sh", "-c", 'ulimit -Sn 64 && exec "$@"', "sh", *serve]
        process = stack.enter_context(subprocess.Popen(with_limit, stdout=subprocess.PIPE, text=True))
        stack.callback(process.terminate)
        endpoint = process.stdout.readline().split()[-1]
        for _ in range(100):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(tmp_path / "s"))
        assert ask(endpoint)["groups"] == []


def test_tcp_connections_leave_descriptors_for_connections_to_a_unix_socket(tmp_path):
    bind = ["--bind", "tcp://127.0.0.1:*", "--bind", f"ipc://{tmp_path}/s"]
    serve = [sys.executable, "-m", "server", "--insecure", *bind]
    with ExitStack() as stack:
        with_limit = ["sh", "-c", 'ulimit -n 100 && exec "$@"', "sh", *serve]
        process = stack.enter_context(subprocess.Popen(with_limit, stdout=subprocess.PIPE, text=True))
        stack.callback(process.terminate)
        port, endpoint = int(process.stdout.readline().split(":")[-1]), process.stdout.readline().split()[-1]
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(60)]
        while silent[0].recv(4096):  # until the server closes it; after 5 s TimeoutError, before ZeroMQ's limit
            pass
        assert ask(endpoint)["groups"] == []
