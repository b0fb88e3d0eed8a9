"""Resets are detected by dropped segments; a forged reset ends no connection."""

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from client.session.protocol.member import OVER_SERVER
from conftest import running_server
from integration.test_death import Workers
from programs import death_programs
from server import Service
from server.cli.status import ask
from server.network.reset_filter import (
    ANSWER_SECONDS,
    ResetDetector,
    TcpState,
    drop_resets,
    dropped_segments,
    tcp_state,
)
from statsd_bn.errors import ReplicaLost
from statsd_bn.messages import Registered, Status, StatusRequest
from statsd_bn.wire import decode, encode
from support.memory_members import wait_until
from support.raw_zmtp import PING, RawPeer, message
from support.strategies import is_probe, register

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops and counts resets")

# So long that no member is lost by its silence within a test.
SILENCE_SECONDS = 60.0

# Setup code for a server that closes no connection for refused messages.
MANY = "from server.network import connections; connections.MAX_REFUSALS = 2**20"

# The descriptor of a peer's connection, and states of its TCP.
PEER = 7
HAS_ANSWERED = TcpState(has_unacknowledged=False, idle=0.0, round_trip=0.0)  # acknowledged everything a moment ago
ANSWERS_NOT = TcpState(has_unacknowledged=True, idle=99.0, round_trip=0.0)  # has not acknowledged data for long
TAKES_NOTHING = TcpState(has_unacknowledged=False, idle=99.0, round_trip=0.0)  # was sent nothing for a long time


@dataclass
class System:
    """What the kernel reports about a connection, and the detector that reads it."""

    count: int = 0
    answers: TcpState | None = HAS_ANSWERED
    resets: ResetDetector = field(init=False)

    def __post_init__(self) -> None:
        self.resets = ResetDetector(lambda _: self.count, lambda _: self.answers)

    def suspects(self, now: float) -> list[int]:
        return self.resets.find_suspects(now, [PEER])


@pytest.fixture
def suspected() -> System:
    """A connection that was suspected at 10 s, and has dropped another segment since."""
    system = System(1, ANSWERS_NOT)
    assert system.suspects(10.0) == [PEER]
    system.count = 2
    return system


@pytest.mark.parametrize(("dropped", "suspected"), [(0, []), (1, [PEER])])
def test_a_connection_is_suspected_after_a_drop_and_kept_without_further_drops(dropped, suspected):
    system = System(dropped, ANSWERS_NOT)
    assert system.suspects(10.0) == suspected
    assert system.resets.confirm_resets(20.0) == []


def test_a_peer_that_answers_only_with_resets_is_lost_once(suspected):
    assert suspected.resets.confirm_resets(10.0 + ANSWER_SECONDS / 2) == []
    assert suspected.resets.confirm_resets(10.0 + ANSWER_SECONDS) == [PEER]
    assert suspected.resets.confirm_resets(20.0) == []


def test_a_peer_with_a_long_round_trip_has_more_time_to_answer(suspected):
    suspected.answers = TcpState(has_unacknowledged=True, idle=99.0, round_trip=0.5)
    assert suspected.resets.confirm_resets(10.5) == []
    assert suspected.resets.confirm_resets(10.5 + ANSWER_SECONDS) == [PEER]


def test_a_peer_that_answers_is_kept_whatever_else_is_dropped(suspected):
    suspected.answers = HAS_ANSWERED
    assert suspected.resets.confirm_resets(10.1) == []
    suspected.answers = ANSWERS_NOT
    assert suspected.resets.confirm_resets(20.0) == []


def test_a_peer_that_answered_at_once_is_no_suspect_any_more(suspected):
    suspected.answers = TcpState(has_unacknowledged=False, idle=0.059, round_trip=0.0)
    assert suspected.resets.confirm_resets(10.05) == []
    assert suspected.suspects(10.05) == [PEER]


def test_a_reset_after_an_answer_makes_the_peer_a_suspect_again(suspected):
    suspected.answers = HAS_ANSWERED
    assert suspected.resets.confirm_resets(10.1) == []
    assert suspected.suspects(11.0) == [PEER]
    suspected.answers = HAS_ANSWERED
    assert suspected.resets.confirm_resets(11.1) == []
    assert suspected.suspects(12.0) == []


def test_a_peer_is_not_suspected_twice_at_a_time(suspected):
    assert suspected.suspects(10.1) == []


def test_a_peer_that_need_not_answer_is_kept(suspected):
    suspected.answers = TAKES_NOTHING
    assert suspected.resets.confirm_resets(20.0) == []


def test_a_peer_without_tcp_state_is_kept(suspected):
    suspected.answers = None
    assert suspected.resets.confirm_resets(20.0) == []


def test_a_descriptor_reused_for_another_connection_begins_anew(suspected):
    suspected.resets.remove(PEER)
    assert suspected.resets.confirm_resets(20.0) == []
    assert suspected.suspects(20.0) == [PEER]
    suspected.answers = HAS_ANSWERED
    assert suspected.resets.confirm_resets(20.1) == []
    suspected.resets.remove(PEER)
    assert suspected.suspects(21.0) == [PEER]


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection; the first end drops resets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert drop_resets(listener.fileno())
        with socket.create_connection(listener.getsockname()) as far, closing(listener.accept()[0]) as near:
            yield near, far


@ON_LINUX
def test_the_system_counts_the_resets_that_it_drops(connection):
    near, far = connection
    near.sendall(b"unread")
    wait_until(lambda: not tcp_state(near.fileno()).has_unacknowledged)
    assert dropped_segments(near.fileno()) == 0
    far.close()
    wait_until(lambda: dropped_segments(near.fileno()) == 1)
    near.sendall(b"to nobody")
    wait_until(lambda: dropped_segments(near.fileno()) == 2)
    assert tcp_state(near.fileno()).has_unacknowledged
    silence = tcp_state(near.fileno()).idle
    wait_until(lambda: tcp_state(near.fileno()).idle > silence + 0.1)


def test_other_descriptors_have_no_tcp_state(tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert (dropped_segments(file.fileno()), tcp_state(file.fileno())) == (0, None)
    one, other = socket.socketpair()
    with one, other:
        assert (dropped_segments(one.fileno()), tcp_state(one.fileno())) == (0, None)
    nobody = 2**20
    assert (dropped_segments(nobody), tcp_state(nobody)) == (0, None)


@pytest.fixture
def patient() -> Iterator[str]:
    """The endpoint of a server that declares silent members lost only after a long time."""
    options = "--insecure", "--silence-seconds", str(SILENCE_SECONDS)
    with running_server(*options, bind="tcp://127.0.0.1:*", setup=MANY) as server:
        yield server.endpoint


@pytest.fixture
def workers(patient, job, tmp_path) -> Iterator[Workers]:
    found = Workers(patient, job, OVER_SERVER, str(tmp_path / "store"))
    try:
        assert found.ask(death_programs.exchange, 0, 1, 2) == [3, 3, 3]
        yield found
    finally:
        found.end()


def waits_only_for(endpoint: str, member: int) -> bool:
    return any(waiting["missing"] == [member] for group in ask(endpoint)["groups"] for waiting in group["waiting"])


def test_a_rank_killed_with_an_unread_answer_is_detected_by_its_connection(workers, patient):
    workers.send(death_programs.exchange, 0, 2)
    wait_until(lambda: waits_only_for(patient, 1))
    workers.send_signal(2, signal.SIGSTOP)
    assert [*workers.ask(death_programs.exchange, 1), workers.answer(0)] == [3, 3]
    workers.send(death_programs.exchange, 0, 1)
    killed = time.monotonic()
    workers.send_signal(2, signal.SIGKILL)
    for member in (0, 1):
        error = workers.answer(member)
        assert isinstance(error, ReplicaLost), error
        assert (error.fields["member"], error.fields["cause"]) == (2, "the connection was lost")
    # Far above the 1 s that detection takes, far below `SILENCE_SECONDS`.
    assert time.monotonic() - killed < SILENCE_SECONDS / 6


@pytest.fixture
def service(serve: Callable[..., Service]) -> Service:
    return serve(silence_seconds=SILENCE_SECONDS)


def probes_until(peer: RawPeer, wanted: Callable[[object], bool]) -> int:
    probes = 0
    while not wanted(answer := decode(peer.receive())):
        probes += is_probe(answer)
    return probes


@pytest.fixture
def forge() -> Iterator[Callable[[socket.socket], None]]:
    """Send resets in the name of one end of a connection, with guessed sequence numbers."""
    try:
        raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)
    except PermissionError:
        pytest.skip("needs CAP_NET_RAW, to forge a segment")

    def send(victim: socket.socket) -> None:
        (here, port), (there, far_port) = victim.getsockname(), victim.getpeername()
        guess = int.from_bytes(os.urandom(4))
        header = struct.pack(">HHIIBBHHH", port, far_port, guess, 0, 5 << 4, 0x04, 0, 0, 0)
        pseudo = socket.inet_aton(here) + socket.inet_aton(there) + struct.pack(">BBH", 0, 6, len(header))
        total = sum(struct.unpack(f">{len(pseudo + header) // 2}H", pseudo + header))
        total = (total & 0xFFFF) + (total >> 16)
        checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
        raw.sendto(header[:16] + struct.pack(">H", checksum) + header[18:], (there, 0))

    with raw:
        yield send


@ON_LINUX
@pytest.mark.parametrize("reads", [True, False], ids=["alive", "frozen"])
def test_a_member_whose_resets_are_forged_all_the_time_is_kept(service, forge, reads):
    with RawPeer(service.endpoints[0]) as member:
        member.send(encode(register(0, 2)))
        probes_until(member, lambda answer: isinstance(answer, Registered) and not is_probe(answer))
        over, probes = time.monotonic() + 8 * ANSWER_SECONDS, 0
        while time.monotonic() < over:
            for _ in range(100):
                forge(member.socket)
            if reads:
                probes += 1 + probes_until(member, is_probe)
        member.send(encode(StatusRequest()))
        # The server suspected the member throughout, and kept its connection.
        probes += probes_until(member, lambda answer: isinstance(answer, Status))
        assert probes >= 4


def has_members(endpoint: str) -> bool:
    return any(group["members"] for group in ask(endpoint)["groups"])


@ON_LINUX
def test_losing_members_that_reset_their_connections_does_not_end_the_server(patient):
    """Members reset their connections in floods with heartbeats; if the server closed one early, libzmq would abort."""
    flood = (message(b"x") * 100 + PING * 3) * 400
    for number in range(8):
        peer = RawPeer(patient)
        peer.send(encode(register(0, 2, job=f"job {number}")))
        probes_until(peer, lambda answer: isinstance(answer, Registered) and not is_probe(answer))
        peer.socket.sendall(flood)
        peer.reset()
    wait_until(lambda: not has_members(patient))
