"""Either all members of a strict group use shared memory or none does, and all report the reason."""

import logging
import threading

import pytest

from client.session.protocol.member import AUTO, BY_A_RANK, BY_JOIN, OVER_SERVER, SHARED_MEMORY
from client.transports import group_memory, negotiation
from client.transports.choose import transport_over
from client.transports.server import SlavePipe
from client.transports.shared_memory import SharedMemoryPipe
from statsd_bn import Rows
from statsd_bn.messages import Contribution, Heartbeat
from statsd_bn.round_key import MEMORY_GATHER
from statsd_bn.wire import decode
from support.memory_members import MemoryMaster, in_threads, run_members
from unit.transports.transport_rows import frames_of, rows_of

pytestmark = pytest.mark.skipif(bool(group_memory.unavailable_reason()), reason=group_memory.unavailable_reason())

GROUP = "group 'world' exchanges rows"
REFUSED = "rank 1: its transport is 'server', as connect() or STATSD_BN_TRANSPORT says"


def two_rounds(connection) -> tuple[str, str]:
    """The transport after two rounds, and the reason if there is no faster one."""
    for _ in range(2):
        SharedMemoryPipe(connection, "bn").run_slave(rows_of(connection.rank, 1))
    return connection.transport, connection.why_not_faster


def with_transports(*transports: str, master: MemoryMaster | None = None, program=two_rounds):
    master = master or MemoryMaster()

    def member(number: int):
        with master.connect(number, len(transports), transport=transports[number]) as connection:
            return program(connection)

    return in_threads([lambda number=number: member(number) for number in range(len(transports))])


def logged(caplog) -> list[tuple[int, str]]:
    return sorted((one.levelno, one.getMessage()) for one in caplog.records if GROUP in one.getMessage())


def test_members_that_support_shared_memory_choose_it(caplog):
    caplog.set_level(logging.INFO, logger="statsd_bn.client")
    assert with_transports(AUTO, AUTO, SHARED_MEMORY) == [(SHARED_MEMORY, "")] * 3
    assert logged(caplog) == [(logging.INFO, f"{GROUP} in shared memory")] * 3


def test_one_member_that_wants_the_server_keeps_all_at_the_server(caplog):
    caplog.set_level(logging.INFO, logger="statsd_bn.client")
    assert with_transports(AUTO, OVER_SERVER, SHARED_MEMORY) == [(OVER_SERVER, REFUSED)] * 3
    text = f"{GROUP} over the server, and not in shared memory: {REFUSED}"
    assert logged(caplog) == [(logging.INFO, text)] * 2 + [(logging.WARNING, text)]


@pytest.mark.parametrize("transport", [AUTO, SHARED_MEMORY])
def test_members_on_several_hosts_stay_at_the_server(monkeypatch, transport):
    here = threading.local()
    monkeypatch.setattr(group_memory, "_address", lambda name: f"\0host {here.number} {name}")

    def program(connection):
        here.number = (0, 0, 1)[connection.rank]
        return two_rounds(connection)

    why = "rank 2: it cannot open the shared memory; it is on another host, or in another container"
    assert with_transports(transport, transport, transport, program=program) == [(OVER_SERVER, why)] * 3


def test_one_member_without_a_native_core_keeps_all_at_the_server(monkeypatch):
    here, core = threading.local(), group_memory.library()
    monkeypatch.setattr(group_memory, "library", lambda: None if here.number == 1 else core)
    monkeypatch.setattr(group_memory, "description", lambda: "native core: not in use")

    def program(connection):
        here.number = connection.rank
        return two_rounds(connection)

    assert with_transports(AUTO, AUTO, program=program) == [(OVER_SERVER, "rank 1: native core: not in use")] * 2


def test_members_without_shared_memory_stay_at_the_server(monkeypatch):
    def refuse(_size):
        raise OSError("out of descriptors")

    monkeypatch.setattr(negotiation, "MemoryOffer", refuse)
    why = "rank 0: it cannot allocate shared memory: out of descriptors"
    assert with_transports(AUTO, AUTO, AUTO) == [(OVER_SERVER, why)] * 3


def test_too_many_members_for_one_memory_stay_at_the_server(monkeypatch):
    monkeypatch.setattr(negotiation, "MAX_MEMBERS", 2)
    assert with_transports(AUTO, AUTO) == [(SHARED_MEMORY, "")] * 2
    assert with_transports(AUTO, AUTO, AUTO) == [(OVER_SERVER, "3 ranks are in the group, more than 2")] * 3


def test_an_untested_machine_must_opt_in_to_memory(monkeypatch):
    monkeypatch.setattr(negotiation.platform, "machine", lambda: "aarch64")
    why = "rank 0: shared memory is untested on aarch64; pass transport='shared_memory' to use it (and 1 more)"
    assert with_transports(AUTO, AUTO) == [(OVER_SERVER, why)] * 2
    assert with_transports(SHARED_MEMORY, SHARED_MEMORY) == [(SHARED_MEMORY, "")] * 2


def test_the_negotiation_follows_the_layers_first_round():
    for transport, gathers in ((AUTO, 2), (OVER_SERVER, 1)):
        master = MemoryMaster()
        frames = frames_of(master)
        with_transports(transport, transport, master=master)
        contributions = [one for one in map(decode, list(frames)) if isinstance(one, Contribution)]
        layers = [one.key.layer for one in contributions if one.session == contributions[0].session]
        assert layers[: 1 + gathers] == ["bn"] + [MEMORY_GATHER] * gathers
        assert layers.count(MEMORY_GATHER) == gathers


def test_an_elastic_job_does_not_negotiate():
    master = MemoryMaster()
    frames = frames_of(master)

    def member(number):
        with master.connect(number, 2, min_members=1, transport=AUTO) as connection:
            transport = transport_over(connection, "bn", None)
            assert type(transport) is SlavePipe
            transport.run_slave(rows_of(number, 1))
            return connection.transport, connection.why_not_faster

    assert in_threads([lambda n=n: member(n) for n in range(2)]) == [(OVER_SERVER, "the job is elastic")] * 2
    assert not any(one.key.layer == MEMORY_GATHER for one in map(decode, list(frames)) if isinstance(one, Contribution))


def test_the_current_transport_is_reported():
    rounds = threading.Barrier(2)

    def program(connection):
        before = connection.transport, connection.why_not_faster
        during = two_rounds(connection)
        rounds.wait(30)
        if connection.rank == 0:
            connection.session(None).transport.memory.abandon()  # as a member that fails in a round does
        rounds.wait(30)
        return before, during, (connection.transport, connection.why_not_faster)

    assert (
        run_members(2, program, transport=AUTO)
        == [((OVER_SERVER, ""), (SHARED_MEMORY, ""), (OVER_SERVER, BY_A_RANK))] * 2
    )


def test_a_rank_that_exited_cleanly_does_not_change_the_transport():
    ended = threading.Event()
    master = MemoryMaster()

    def member(number):
        with master.connect(number, 2, transport=AUTO) as connection:
            two_rounds(connection)
            if number:
                assert ended.wait(30)
                return connection.transport, connection.why_not_faster
        ended.set()
        return connection.transport, connection.why_not_faster

    assert in_threads([lambda n=n: member(n) for n in range(2)]) == [(SHARED_MEMORY, "")] * 2


def test_a_group_that_allows_absent_ranks_reports_why_it_uses_the_server():
    def program(connection):
        assert two_rounds(connection) == (SHARED_MEMORY, "")
        connection.rejoin(None)
        return two_rounds(connection)

    assert run_members(2, program, transport=AUTO) == [(OVER_SERVER, BY_JOIN)] * 2


def test_heartbeats_report_rounds_in_memory():
    def program(connection):
        two_rounds(connection)
        return decode(connection.session(None).heartbeat())

    for heartbeat in run_members(2, program, transport=AUTO):
        assert isinstance(heartbeat, Heartbeat)
        # A member that waited long also sent its rows to the server, and does not count that round.
        assert (heartbeat.step, heartbeat.transport, heartbeat.why) == (0, SHARED_MEMORY, "")
        assert heartbeat.rounds <= 1


def test_the_count_of_rounds_in_memory_is_reported_at_the_end():
    master = MemoryMaster()
    frames = frames_of(master)

    def program(connection):
        for _ in range(50):
            SharedMemoryPipe(connection, "bn").run_slave(Rows((1,), rows_of(connection.rank, 1).values))
        return connection.session(None).transport.bypassed_rounds

    counts = run_members(2, program, master, transport=AUTO)
    rounds = [one.rounds for one in map(decode, list(frames)) if isinstance(one, Heartbeat)]
    assert sorted(rounds) == sorted(counts)
    assert max(counts) > 25
