"""The server process and its service: endpoints, signals, the log, and messages from the network."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from server import Config, Service
from server.cli.status import ask
from server.security.access import ANONYMOUS
from statsd_bn import limits, messages
from statsd_bn.errors import BindError
from statsd_bn.wire import MAGIC, PROTOCOL_VERSION, decode, encode
from support.launched import Launched, free_port
from support.memory_members import wait_until
from support.strategies import contribution, is_probe, key, register, rows, session_of

WAIT_SECONDS = 30.0
ANY_PORT = "tcp://127.0.0.1:*"


class Command(Launched):
    def endpoint(self) -> str:
        return self.line("").removeprefix("listening on ")

    @property
    def rest(self) -> str:
        return "".join(f"{line}\n" for line in iter(lambda: self._lines.get(timeout=WAIT_SECONDS), None))


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Command]]:
    numbers = itertools.count()
    with ExitStack() as commands:

        def run(*arguments: str, **environment: str) -> Command:
            command = (sys.executable, "-m", "server", *arguments)
            buffered = {"PYTHONUNBUFFERED": "", **environment}
            return commands.enter_context(Command(command, buffered, tmp_path / f"errors-{next(numbers)}"))

        yield run


class Dealer:
    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def send(self, *parts: messages.Message | bytes) -> None:
        self.socket.send_multipart([part if isinstance(part, bytes) else encode(part) for part in parts])

    def receive(self) -> Any:
        while True:
            assert self.socket.poll(WAIT_SECONDS * 1000), "no answer in time"
            answer = decode(self.socket.recv())
            if not is_probe(answer):
                return answer

    def ask(self, *parts: messages.Message | bytes) -> Any:
        self.send(*parts)
        return self.receive()

    def report(self) -> dict[str, Any]:
        answer = self.ask(messages.StatusRequest())
        assert isinstance(answer, messages.Status)
        return answer.report


@pytest.fixture
def dial() -> Iterator[Callable[[str], Dealer]]:
    dealers: list[Dealer] = []
    with zmq.Context() as context:

        def connect(endpoint: str) -> Dealer:
            dealers.append(Dealer(context, endpoint))
            return dealers[-1]

        yield connect
        for dealer in dealers:
            dealer.socket.close()


def join_all(dealers: list[Dealer], **given: Any) -> None:
    for member, dealer in enumerate(dealers):
        dealer.send(register(member, len(dealers), **given))
    for dealer in dealers:
        while dealer.receive().missing:
            pass


def beginning_a_round(command: Command, dial: Callable[[str], Dealer]) -> tuple[str, list[Dealer]]:
    """The endpoint of a server, and two members; the second one waits for the first."""
    endpoint = command.endpoint()
    dealers = [dial(endpoint) for _ in range(2)]
    join_all(dealers)
    dealers[1].send(contribution(1))
    assert dealers[1].report()["groups"][0]["waiting"]
    return endpoint, dealers


# The server process: flags, lines, exit codes, signals.


def test_several_endpoints_lead_to_one_server(start, dial, tmp_path):
    path = f"ipc://{tmp_path}/s"
    command = start("--insecure", "--bind", ANY_PORT, "--bind", path, "--bind", ANY_PORT)
    endpoints = [command.endpoint() for _ in range(3)]
    assert [endpoint.split(":")[0] for endpoint in endpoints] == ["tcp", "ipc", "tcp"]
    assert endpoints[1] == path
    assert len(set(endpoints)) == 3
    assert len({dial(endpoint).report()["server"] for endpoint in endpoints}) == 1
    # Members at different endpoints meet.
    dealers = [dial(endpoint) for endpoint in endpoints]
    join_all(dealers)
    for member, dealer in enumerate(dealers):
        dealer.send(contribution(member, float(member)))
    assert [dealer.receive().values.item() for dealer in dealers] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_after_a_signal_members_wait_for_the_next_server(start, dial, number):
    command = start("--insecure", "--bind", ANY_PORT)
    endpoint, dealers = beginning_a_round(command, dial)
    command.process.send_signal(number)
    assert command.end() == 0
    assert "stopped; 2 ranks had not left" in command.errors
    start("--insecure", "--bind", endpoint).endpoint()
    # The new server knows no session; any message of the first server would have come before this answer.
    assert dealers[1].ask(contribution(1)).code == "unknown_session"


def test_a_server_with_a_parent_notifies_waiting_members_when_it_stops(start, dial):
    command = start("--insecure", "--bind", ANY_PORT, "--parent", str(os.getpid()))
    _, dealers = beginning_a_round(command, dial)
    command.process.terminate()
    assert [dealer.receive().code for dealer in dealers] == ["master_stopped"] * 2
    assert command.end() == 0


def test_sighup_without_keys_changes_nothing(start, dial):
    command = start("--insecure", "--bind", ANY_PORT)
    endpoint = command.endpoint()
    command.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "SIGHUP: no keys to reload" in command.errors)
    assert dial(endpoint).report()["groups"] == []


def test_a_signal_ends_a_server_after_its_members_left(start, dial):
    command = start("--insecure", "--bind", ANY_PORT)
    endpoint = command.endpoint()
    dealers = [dial(endpoint) for _ in range(3)]
    join_all(dealers[:2])
    dealers[0].send(contribution(0))
    dealers[0].send(messages.Leave(session_of(0), ""))
    assert dealers[0].receive().code == "replica_lost"
    for dealer in dealers:
        dealer.socket.close()
    command.process.terminate()
    assert command.end() == 0


RESTORED = """
import signal, server
before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
server.run_master(server.Config(("tcp://127.0.0.1:*",), insecure=True))
after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
print("restored" if before == after else f"{before} became {after}")
"""


def test_run_master_restores_the_former_signal_handlers():
    with subprocess.Popen([sys.executable, "-c", RESTORED], stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(WAIT_SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stdout.readline().startswith("listening on ")
            process.terminate()
            assert process.stdout.read() == "restored\n"
        finally:
            watchdog.cancel()
            watchdog.join()
            process.kill()


@pytest.mark.parametrize("address", ["*", "127.0.0.1"])
def test_tcp_without_keys_is_warned_of_once(start, tmp_path, address):
    binds = (f"tcp://{address}:*", f"ipc://{tmp_path}/s", ANY_PORT)
    command = start("--insecure", *(word for bind in binds for word in ("--bind", bind)))
    first, _, last = (command.endpoint() for _ in range(3))
    command.process.terminate()
    assert command.end() == 0
    (warning,) = (line for line in command.errors.splitlines() if "WARNING" in line)
    assert f"--insecure: {first} and {last} has no keys, so anybody who can connect may join, end, read" in warning


def test_a_socket_of_this_user_alone_is_not_warned_of(start, tmp_path):
    command = start("--insecure", "--bind", f"ipc://{tmp_path}/s")
    command.endpoint()
    command.process.terminate()
    assert command.end() == 0
    assert "WARNING" not in command.errors


def test_the_file_of_an_ipc_endpoint_is_removed_with_the_server(start, tmp_path):
    path = tmp_path / "s"
    command = start("--bind", f"ipc://{path}")
    command.endpoint()
    assert path.is_socket()
    command.process.terminate()
    assert command.process.wait(timeout=20) == 0
    assert not path.exists()


def test_the_status_command_prints_the_jobs(start, dial):
    # Starting the command can take longer than the default limit of a member's silence.
    endpoint = start("--insecure", "--bind", ANY_PORT, "--silence-seconds", "60").endpoint()
    dealer = dial(endpoint)
    assert isinstance(dealer.ask(register(0, 2, place="host 7")), messages.Registered)
    command = start("status", endpoint, STATSD_BN_INSECURE="1")
    assert command.end() == 0
    head, *groups = command.rest.splitlines()
    assert head.startswith("server ")
    assert head.endswith("2 messages, 0 bad frames")
    assert groups == [
        "",
        "job: Waiting for rank 1 to join: 1 of 2 ranks are here",
        "  Check that the other processes have started.",
        "  1 of 2 ranks, 0 rounds done",
        "  rank     step  steps/s  median     p99  awaited  process, now",
        "     0        0        -       -       -        -  host 7: takes part",
    ]


# Input from the network.


def test_garbage_is_counted_and_the_server_goes_on_serving(start, dial):
    endpoint = start("--insecure", "--bind", ANY_PORT).endpoint()
    dealers = [dial(endpoint) for _ in range(2)]
    join_all(dealers)
    dealers[0].send(contribution(0, 1.0))
    stranger = dial(endpoint)
    garbage: list[list[bytes]] = [
        *([b""], [b"hello"], [MAGIC + bytes([PROTOCOL_VERSION]) + b"\xff\xff\xff\xff"]),
        *([b"", encode(messages.StatusRequest())], [b"one", b"two", b"three"], [encode(messages.StatusRequest()), b""]),
        [b""] * 200,
    ]
    for parts in garbage:
        assert stranger.ask(*parts).code == "protocol"
    dealers[1].send(contribution(1, 2.0))
    assert [dealer.receive().values.item() for dealer in dealers] == [3.0, 3.0]
    assert stranger.report()["bad_frames"] == len(garbage)


def test_the_server_logs_a_non_finite_sum_in_one_line(start, dial, tmp_path):
    command = start("--bind", f"ipc://{tmp_path}/s", "--log-level", "warning")
    endpoint = command.endpoint()
    dealers = [dial(endpoint) for _ in range(2)]
    join_all(dealers)
    for member, dealer in enumerate(dealers):
        dealer.send(contribution(member, [np.inf, -np.inf][member]))
    assert np.isnan(dealers[0].receive().values)
    command.process.terminate()
    assert command.end() == 0
    (line,) = command.errors.splitlines()
    assert line.endswith(
        "first non-finite: layer 'bn', forward, step 0, rank 0 (place 0), rank 1 (place 1), 1 of 1 channels (NaN)"
    )


def test_a_frame_beyond_the_limit_closes_its_senders_connection_only(start, dial):
    endpoint = start("--insecure", "--bind", ANY_PORT).endpoint()
    stranger, member = dial(endpoint), dial(endpoint)
    assert isinstance(stranger.ask(messages.StatusRequest()), messages.Status)
    with stranger.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        stranger.send(bytes(limits.MAX_FRAME_BYTES + 1))
        assert monitor.poll(WAIT_SECONDS * 1000), "the connection was not dropped"
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        stranger.socket.disable_monitor()
    report = member.report()
    assert (report["received"], report["bad_frames"]) == (2, 0)


def test_the_widest_allowed_frame_is_accepted(server, dial, job):
    dealer = dial(server.endpoint)
    join_all([dealer], job=job)
    widest = rows(*[1.0] * limits.MAX_REPLICAS, vectors=2, channels=16_384)
    answer = dealer.ask(contribution(0, widest, key(job=job)))
    assert answer.values.shape == (2, 16_384)
    assert (answer.values == limits.MAX_REPLICAS).all()
    dealer.send(messages.Leave(session_of(0, job), ""))


def test_a_round_past_its_deadline_is_ended_while_nothing_else_happens(server, dial, job):
    dealers = [dial(server.endpoint) for _ in range(2)]
    join_all(dealers, job=job, deadline=0.05)
    failure = dealers[1].ask(contribution(1, 1.0, key(job=job)))
    assert (failure.code, failure.fields["missing"], failure.fields["waiting"]) == ("timeout", [0], [1])
    for member, dealer in enumerate(dealers):
        dealer.send(messages.Leave(session_of(member, job), ""))


def test_answers_to_a_peer_that_left_are_dropped(start, dial):
    endpoint = start("--insecure", "--bind", ANY_PORT).endpoint()
    dealers = [dial(endpoint) for _ in range(3)]
    join_all(dealers)
    dealers[0].send(contribution(0, 1.0))
    assert dealers[0].report()["groups"][0]["waiting"]
    dealers[0].socket.close()
    for member in (1, 2):
        dealers[member].send(contribution(member, 1.0))
    assert [dealers[member].receive().values.item() for member in (1, 2)] == [3.0, 3.0]


# The service in a thread of this process.


@pytest.fixture
def service() -> Iterator[Service]:
    with running() as service:
        yield service


@contextmanager
def running(endpoint: str = ANY_PORT) -> Iterator[Service]:
    with Service(Config((endpoint,), insecure=True)) as service:
        thread = threading.Thread(target=service.run, daemon=True)
        thread.start()
        yield service
        service.stop()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


def test_a_stopped_service_answers_complete_rounds(dial):
    with Service(Config((ANY_PORT,), insecure=True)) as service:
        thread = threading.Thread(target=service.run, daemon=True)
        thread.start()
        dealers = [dial(service.endpoints[0]) for _ in range(2)]
        join_all(dealers)
        dealers[0].send(contribution(0, 1.0))
        assert dealers[0].report()["groups"][0]["waiting"]
        service.stop()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
        # Wait until the round's last frame is in the server's socket, where the stopped service finds it.
        dealers[1].send(contribution(1, 1.0))
        assert service._socket.poll(WAIT_SECONDS * 1000)
        service.run()
        assert [dealer.receive().values.item() for dealer in dealers] == [2.0, 2.0]


def test_stopping_wakes_a_server_that_sleeps(monkeypatch):
    monkeypatch.setattr("server.network.service.TICK_SECONDS", 3600.0)
    with running() as service:
        # The service has answered, so it is in its loop, which would sleep for an hour.
        assert ask(service.endpoints[0])["groups"] == []


def test_stopping_twice_is_fine(service):
    service.stop()
    service.stop()


def test_stopping_a_closed_service_is_fine():
    with Service(Config((ANY_PORT,), insecure=True)) as ended:
        pass
    ended.stop()


def test_a_stopped_service_processes_received_frames(dial):
    with Service(Config((ANY_PORT,), insecure=True)) as service:
        dealer = dial(service.endpoints[0])
        dealer.send(register(0, 1))
        # The frame is in the server's socket; no thread runs the service yet.
        assert service._socket.poll(WAIT_SECONDS * 1000)
        service.stop()
        service.run()
        assert dealer.receive().missing == 0


def test_a_service_that_cannot_listen_leaves_no_socket_behind(service):
    free = (f"tcp://127.0.0.1:{free_port()}",)
    with pytest.raises(BindError) as caught:
        Service(Config((*free, *service.endpoints), insecure=True))
    assert caught.value.fields == {"endpoint": service.endpoints[0]}
    with Service(Config(free, insecure=True)) as again:
        assert again.endpoints == free


def test_a_bind_error_is_raised_even_with_a_client_at_another_endpoint(service):
    port = free_port()
    with zmq.Context() as context, context.socket(zmq.DEALER) as early:
        early.linger = 0
        early.reconnect_ivl = 1
        early.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(20):
            with pytest.raises(BindError):
                Service(Config((f"tcp://127.0.0.1:{port}", service.endpoints[0]), insecure=True))


def test_ipv6_loopback_works():
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with running("tcp://[::1]:*") as service:
        assert ask(service.endpoints[0])["groups"] == []


def test_importing_the_server_loads_nothing_besides_its_libraries():
    """Counts modules, since a time would depend on the load of the machine."""

    def loaded(*names: str) -> set[str]:
        program = f"import {', '.join(names)}, sys; print(*sys.modules)"
        result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
        return {name.partition(".")[0] for name in result.stdout.split()}

    others = loaded("server.__main__") - loaded("numpy", "zmq", "msgpack") - sys.stdlib_module_names
    assert others == {"server", "statsd_bn"}


# Attacks by one peer on all others.


class Unreachable:
    def send(self, *_: Any) -> None:
        raise zmq.ZMQError(zmq.EHOSTUNREACH)


def test_a_chain_of_addresses_through_all_sessions_is_followed_to_its_end(monkeypatch):
    sessions = sys.getrecursionlimit() + 100
    with Service(Config(bind=(ANY_PORT,), insecure=True)) as service:
        dispatcher = service._dispatcher
        for number in range(sessions):
            introduction = register(number, limits.MAX_MEMBERS, session=number.to_bytes(limits.TOKEN_BYTES))
            dispatcher.receive(0.0, str(number).encode(), encode(introduction), ANONYMOUS)
        for number in range(sessions):
            beat = messages.Heartbeat(number.to_bytes(limits.TOKEN_BYTES))
            dispatcher.receive(0.0, str(number + 1).encode(), encode(beat), ANONYMOUS)
        with monkeypatch.context() as patch:
            patch.setattr(service._connections, "_socket", Unreachable())
            service._connections.probe(dispatcher.probes(0.0))
        assert dispatcher.probes(0.0) == []


def test_a_name_cannot_forge_a_line_of_the_log(start, dial):
    command = start("--insecure", "--bind", ANY_PORT)
    member = dial(command.endpoint())
    member.ask(register(0, 1))
    member.send(messages.Leave(session_of(0), "x\n2026-11-22 04:00:00,000 INFO now accepting 1 keys: mallory"))
    member.report()
    command.process.terminate()
    command.end()
    (line,) = [line for line in command.errors.splitlines() if "mallory" in line]
    assert "leaves: x; 2026-11-22 04:00:00,000 INFO now accepting" in line
