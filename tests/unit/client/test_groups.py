"""Groups: members that synchronise among themselves, independently of the others."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import client
from client.session import connection as current
from client.session import groups
from client.session.connection import Connection
from client.session.groups import Group
from client.session.protocol import registration
from client.transports.server import SlavePipe
from client.transports.transport import LocalPipe
from server.cli.status import ask
from statsd_bn import Rows
from statsd_bn.errors import ConfigurationError, ConnectionClosed, GroupIncomplete, ReplicaLost, WorldSizeMismatch
from statsd_bn.round_key import BACKWARD, FORWARD
from support.memory_members import MemoryMaster, in_threads, outcome, run_members, wait_until
from support.sentences import says

PAIR = Group("pair", 2)
LOW, HIGH = Group("low", 2), Group("high", 2)

# The sum depends on the order of addition, since small values are lost next to 1e16: 0.3, or 0.0 in reverse.
VALUES = (1e16, 1.0, -1e16, 0.3)


def row(value: float) -> Rows:
    return Rows((1,), np.full((1, 1, 1), value))


def total(connection: Connection, group: Group | str | None = None, value: float | None = None) -> float:
    """The sum of the group's contributions; each member contributes 10 to the power of its rank, or `value`."""
    contribution = row(10.0**connection.rank if value is None else value)
    return SlavePipe(connection, "bn", group).run_slave(contribution).values.item()


@contextmanager
def connected(master: MemoryMaster, n: int, deadline_of_last: float = 20.0) -> Iterator[list[Connection]]:
    with ThreadPoolExecutor(n) as threads:
        others = [threads.submit(master.connect, member, n) for member in range(n - 1)]
        wait_until(lambda: len(master.members("world")) == n - 1)
        last = master.connect(n - 1, n, round_timeout=deadline_of_last)
        connections = [*(other.result(20) for other in others), last]
    with ExitStack() as stack:
        yield [stack.enter_context(connection) for connection in connections]


def test_the_only_member_of_a_group_keeps_its_rank_in_the_job():
    with connected(MemoryMaster(), 2) as (_, second):
        current.set_current_connection(second)
        aggregate = LocalPipe("bn").run_slave(row(np.nan))
    assert list(aggregate.members) == list(aggregate.non_finite) == [1]


# Definitions of groups.


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("", 2, "group: name: expected printable text of 1 to 256 bytes, got ''"),
        ("é" * 129, 2, "group: name: expected printable text of 1 to 256 bytes"),
        ("\ud800", 2, "group: name: expected printable text of 1 to 256 bytes"),
        (7, 2, "group: name: expected printable text of 1 to 256 bytes, got 7"),
        ("world", 2, "the name 'world' is reserved"),
        ("local", 2, "the name 'local' is reserved; .* group='local' for the ranks of one host"),
        ("local node 0", 2, "the name 'local node 0' is reserved"),
        ("pair", 0, r"group: size: expected an integer in \[1, 16384\], got 0"),
        ("pair", 16_385, "got 16385"),
        ("pair", True, "got True"),
        ("pair", 2.0, "got 2.0"),
        ("pair", None, "got None"),
    ],
)
def test_an_impossible_group_is_refused_with_its_value(name, size, message):
    with pytest.raises(ConfigurationError, check=says(message)):
        Group(name, size)


def test_the_members_of_a_host_are_those_of_its_torchrun_agent():
    first, second = ({"LOCAL_WORLD_SIZE": "4", "GROUP_RANK": rank} for rank in "01")
    assert groups.from_environment(first, "host") == groups.from_environment(first, "another name of it")
    assert groups.from_environment(first, "host") != groups.from_environment(second, "host")
    assert {groups.from_environment(environ, "host").size for environ in (first, second)} == {4}


def test_without_agents_the_hosts_name_tells_two_hosts_apart():
    environ = {"LOCAL_WORLD_SIZE": "2"}
    assert (
        groups.from_environment(environ, "host 1")
        == groups.from_environment(environ, "host 1")
        != groups.from_environment(environ, "host 2")
    )
    assert groups.from_environment(environ, "0") != groups.from_environment({**environ, "GROUP_RANK": "0"}, "0")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, r"expected LOCAL_WORLD_SIZE .* as torchrun sets it, .* or give them client.Group\(name, size\)"),
        ({"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": ""}, "expected LOCAL_WORLD_SIZE in the environment"),
        ({"LOCAL_WORLD_SIZE": "all"}, "LOCAL_WORLD_SIZE: expected an integer, got 'all'"),
        ({"LOCAL_WORLD_SIZE": "0"}, r"size: expected an integer in \[1, 16384\], got 0"),
    ],
)
def test_the_error_about_the_hosts_group_names_the_missing_variable(environ, message):
    with pytest.raises(ConfigurationError, check=says(message)):
        groups.from_environment(environ, "host")


@pytest.mark.parametrize(
    ("environ", "world_size", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, 4, True),
        ({"LOCAL_WORLD_SIZE": "2"}, 4, True),
        ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}, 4, False),  # this process has started the others
        ({"WORLD_SIZE": "4"}, 4, False),
        ({"LOCAL_WORLD_SIZE": "", "WORLD_SIZE": ""}, 4, False),
    ],
)
def test_the_local_size_counts_only_if_the_launcher_has_started_the_whole_job(environ, world_size, expected):
    assert groups.has_local_size(environ, world_size) is expected


def test_without_a_launcher_the_members_of_a_host_are_those_that_name_the_same_machine():
    machine_ids = {0: b"machine 1", 2: b"machine 2", 3: b"machine 1", 5: b"machine 2"}
    found = {rank: groups.from_hosts(machine_ids, rank) for rank in machine_ids}
    assert found[0] == found[3] != found[2] == found[5]
    assert (found[5].name, found[5].size) == ("local host of rank 2", 2)


def test_a_machine_has_a_name_also_where_the_system_has_no_boot_id(monkeypatch, tmp_path):
    first = groups.machine_id()
    assert first == groups.machine_id() != ""
    monkeypatch.setattr(groups, "BOOT_ID", tmp_path / "none")
    assert first != groups.machine_id() == groups.machine_id() != ""


@pytest.mark.parametrize("group", [Group("pair", 2), groups.group_named("world", 3), groups.from_hosts({4: b""}, 4)])
def test_a_group_is_made_again_from_its_name_and_size(group):
    assert groups.group_named(group.name, group.size) == group
    assert eval(repr(group), {"Group": groups.group_named}) == group  # noqa: S307 - the repr is valid code


# Groups on a connection.


def test_a_connection_resolves_none_local_and_groups(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("GROUP_RANK", "3")
    with MemoryMaster().connect(0, 1) as connection:
        assert (connection.group(None).name, connection.group(None).size) == ("world", 1)
        assert (connection.group("local").name, connection.group("local").size) == ("local node 3", 1)
        mine = Group("mine", 1)
        assert connection.group(mine) is mine
        assert connection.group(connection.group("local")) == connection.group("local")


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("pair", r"expected None, 'local' or a client.Group, got 'pair'; .* client.Group\('pair', size\)"),
        (2, "(?m)expected None, 'local' or a client.Group, got 2$"),
        (("pair", 2), r"(?m)got \('pair', 2\)$"),
        (Group("pair", 2), "group 'pair': expected at most the 1 members of the job, got size 2"),
    ],
)
def test_a_value_other_than_a_group_of_the_job_is_refused(group, message):
    with MemoryMaster().connect(0, 1) as connection:
        for use in (connection.group, lambda group: total(connection, group)):
            with pytest.raises(ConfigurationError, check=says(message)):
                use(group)


def of_machines(monkeypatch, machines: dict[int, str]) -> None:
    """Makes each rank report its entry of `machines`, although the members are threads of one process."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    gathered = Connection._gather_machine_ids

    def gather_machines(connection: Connection, _: bytes) -> dict[int, bytes]:
        return gathered(connection, machines[connection.rank].encode())

    monkeypatch.setattr(Connection, "_gather_machine_ids", gather_machines)


def test_without_a_launcher_the_members_determine_who_shares_a_host(monkeypatch):
    of_machines(monkeypatch, {0: "one", 1: "other", 2: "one", 3: "third"})

    def program(connection):
        assert not connection.is_alone("local"), "the members have not exchanged their machine ids yet"
        sums = [total(connection, "local"), total(connection, None), total(connection, "local")]
        return sums, connection.group("local").name, connection.rounds, connection.is_alone("local")

    first, second = ([101.0, 1111.0, 101.0], "local host of rank 0", 3, False), (10.0, "local host of rank 1", 3, True)
    found = run_members(4, program)
    assert found[0] == found[2] == first
    assert found[1] == ([second[0], 1111.0, second[0]], *second[1:])
    assert found[3] == ([1000.0, 1111.0, 1000.0], "local host of rank 3", 3, True)


class SlowlyLeft:
    """A lock whose owner sleeps after the release, so the next thread enters before the owner continues."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *of_an_error: object) -> None:
        self._lock.release()
        time.sleep(0.1)


def test_threads_of_one_member_determine_the_hosts_group_in_one_round(monkeypatch):
    of_machines(monkeypatch, {0: "one", 1: "one"})

    def program(connection):
        barrier = threading.Barrier(2)
        monkeypatch.setattr(connection, "_host_group_lock", SlowlyLeft())

        def ask() -> Group:
            barrier.wait(20)
            return connection.group("local")

        return in_threads([ask, ask])

    (first, second), (third, fourth) = run_members(2, program)
    assert first is second
    assert third is fourth
    assert first == third


def test_the_hosts_group_in_an_elastic_job_needs_a_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with (
        MemoryMaster().connect(0, 1, min_members=1) as connection,
        pytest.raises(ConfigurationError, match="expected LOCAL_WORLD_SIZE in the environment"),
    ):
        connection.group("local")


def test_the_group_of_this_host_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(current, "_current", None)
    with pytest.raises(ConfigurationError, match="local_group: expected a connected process"):
        client.local_group()
    with MemoryMaster().connect(0, 1) as connection:
        current.set_current_connection(connection)
        assert (client.local_group().name, client.local_group().size) == ("local node 3", 1)


# Rounds.


def test_rounds_of_the_world_and_of_groups_may_alternate():
    def program(connection):
        group = LOW if connection.rank < 2 else HIGH
        return [total(connection, where) for where in (None, group, group, None, group, None)]

    world = 1111.0
    assert run_members(4, program) == [[world, pair, pair, world, pair, world] for pair in (11.0, 11.0, 1100.0, 1100.0)]


def test_threads_of_one_member_may_wait_for_different_groups_in_opposite_orders():
    """If waiting for one group blocked the registration in the other, both members would wait for ever."""
    master = MemoryMaster()

    def program(connection):
        first, second = (LOW, HIGH) if connection.rank else (HIGH, LOW)
        with ThreadPoolExecutor(1) as thread:
            early = thread.submit(total, connection, first)
            wait_until(lambda: connection.rank in master.members(first.name))
            return [total(connection, second), early.result(20)]

    assert run_members(2, program, master) == [[11.0, 11.0]] * 2


def test_a_member_outside_of_a_group_does_not_wait_for_it():
    master = MemoryMaster()
    is_through = threading.Event()

    def program(connection):
        mine = connection.rank
        if mine == 2:
            wait_until(lambda: bool(master.report("pair")["waiting"]))
            is_through.set()
            return connection.rounds
        first = total(connection, PAIR)
        if mine == 1:
            assert is_through.wait(20)
        return first, total(connection, PAIR)

    assert run_members(3, program, master) == [(11.0, 11.0), (11.0, 11.0), 0]


def test_a_groups_rows_are_added_by_member_number_whoever_comes_first():
    members = [1, 2, 4, 5]
    four = Group("four", 4)
    expected = LocalPipe("bn").run_slave(Rows((1,) * 4, np.reshape(VALUES, (4, 1, 1)))).values.item()
    assert expected != LocalPipe("bn").run_slave(Rows((1,) * 4, np.reshape(VALUES[::-1], (4, 1, 1)))).values.item()
    master = MemoryMaster()

    def program(connection):
        if connection.rank not in members:
            return None
        place = members.index(connection.rank)
        total(connection, four)
        # The highest number contributes first: each member waits until only it and lower ones are missing.
        still_missing = members[: place + 1]
        if place < 3:
            wait_until(lambda: [round_["missing"] for round_ in master.report("four")["waiting"]] == [still_missing])
        return total(connection, four, VALUES[place])

    assert run_members(6, program, master) == [None, expected, expected, None, expected, expected]


def test_each_group_counts_its_own_steps_and_calls():
    def program(connection):
        world, pair = SlavePipe(connection, "bn"), SlavePipe(connection, "bn", PAIR)
        keys = [world.run_slave(row(1.0)).key]
        world.run_slave(row(1.0), keys[0].of_phase(BACKWARD))
        keys += [transport.run_slave(row(1.0)).key for transport in (world, pair, pair, world)]
        return [(key.group, key.step, key.call) for key in keys]

    expected = [("world", 0, 0), ("world", 1, 0), ("pair", 0, 0), ("pair", 0, 1), ("world", 1, 1)]
    assert run_members(2, program) == [expected] * 2


def test_a_backward_round_stays_in_its_group():
    def program(connection):
        pipe = SlavePipe(connection, "bn", LOW if connection.rank < 2 else HIGH)
        forward = pipe.run_slave(row(1.0))
        assert pipe.key(0, 0, FORWARD) == forward.key
        return pipe.run_slave(row(10.0**connection.rank), forward.key.of_phase(BACKWARD)).values.item()

    assert run_members(4, program) == [11.0, 11.0, 1100.0, 1100.0]


# Registering.


def test_a_process_uses_a_group_with_one_size():
    with connected(MemoryMaster(), 2) as pair:
        assert in_threads([lambda c=c: total(c, PAIR) for c in pair]) == [11.0, 11.0]
        with pytest.raises(
            ConfigurationError, match=r"'pair': expected size 2, as in this process's earlier use, got 1"
        ):
            total(pair[0], Group("pair", 1))


def test_members_that_disagree_on_a_groups_size_get_an_error_and_the_others_continue():
    master = MemoryMaster()
    with connected(master, 3) as (zero, one, _), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(total, zero, PAIR)
        wait_until(lambda: master.members("pair") == [0])
        with pytest.raises(WorldSizeMismatch, match=r"expected world_size 2, as rank 0 .* got 3 from rank 1"):
            total(one, Group("pair", 3))
        assert (total(one, PAIR), waiting.result(20)) == (11.0, 11.0)


def test_a_surplus_member_gets_an_error_and_the_others_continue():
    with connected(MemoryMaster(), 3) as (zero, one, two):
        in_threads([lambda c=c: total(c, PAIR) for c in (zero, two)])
        with pytest.raises(WorldSizeMismatch, match=r"2 ranks, and ranks 0, 2 registered, got one more from rank 1"):
            total(one, PAIR)
        assert in_threads([lambda c=c: total(c, PAIR) for c in (zero, two)]) == [101.0, 101.0]
        assert in_threads([lambda c=c: total(c) for c in (zero, one, two)]) == [111.0] * 3


def test_the_error_of_an_incomplete_group_lists_missing_and_present_members():
    with connected(MemoryMaster(), 3, deadline_of_last=0.1) as (*_, two):
        with pytest.raises(GroupIncomplete) as caught:
            total(two, Group("three", 3))
        first, second, _ = str(caught.value).splitlines()
        assert first == "2 ranks besides rank 2 did not connect within 0.1 s"
        assert second == "  in job 'job', group 'three' of 3"
        assert caught.value.fields == {"job": "job", "group": "three", "size": 3, "present": [2]}


def test_after_the_error_of_an_incomplete_group_other_groups_work_and_a_retry_may_succeed():
    master = MemoryMaster()
    with connected(master, 2, deadline_of_last=0.1) as (zero, one), ThreadPoolExecutor(1) as thread:
        assert isinstance(outcome(lambda: total(one, PAIR)), GroupIncomplete)
        assert master.members("pair") == []
        assert in_threads([lambda c=c: total(c) for c in (zero, one)]) == [11.0, 11.0]
        waiting = thread.submit(total, zero, PAIR)
        wait_until(lambda: master.members("pair") == [0])
        assert (total(one, PAIR), waiting.result(20)) == (11.0, 11.0)


def test_threads_that_use_a_group_first_at_the_same_time_register_once():
    master = MemoryMaster()
    with connected(master, 2) as (zero, one), ThreadPoolExecutor(4) as threads:
        first = threads.submit(SlavePipe(zero, "a", PAIR).run_slave, row(1.0))
        wait_until(lambda: master.members("pair") == [0])
        second = threads.submit(SlavePipe(zero, "b", PAIR).run_slave, row(1.0))
        others = [threads.submit(SlavePipe(one, layer, PAIR).run_slave, row(1.0)) for layer in "ab"]
        assert [found.result(20).count for found in (first, second, *others)] == [2] * 4


def test_threads_that_wait_for_a_group_share_its_failure():
    master = MemoryMaster()
    with connected(master, 2, deadline_of_last=1.0) as (_, one), ThreadPoolExecutor(2) as threads:
        first = threads.submit(outcome, lambda: total(one, PAIR))
        wait_until(lambda: master.members("pair") == [1])
        second = threads.submit(outcome, lambda: total(one, PAIR))
        assert isinstance(first.result(20), GroupIncomplete)
        assert second.result(20) is first.result(20)


# Leaving.


def test_closing_leaves_every_group():
    master = MemoryMaster()
    with connected(master, 2) as pair:
        in_threads([lambda c=c: total(c, PAIR) for c in pair])
        assert len(master.dispatcher.report(0.0)["groups"]) == 2
    assert master.dispatcher.report(0.0)["groups"] == []


def test_a_member_that_fails_breaks_every_group_it_is_in_and_no_other():
    with connected(MemoryMaster(), 4) as (zero, one, two, three):
        for group, pair in ((Group("left", 2), (zero, one)), (Group("right", 2), (one, two)), (PAIR, (zero, three))):
            in_threads([lambda c=c, group=group: total(c, group) for c in pair])
        one.close(cause="RuntimeError: boom")
        for connection, group in ((zero, Group("left", 2)), (two, Group("right", 2)), (zero, None)):
            lost = outcome(lambda c=connection, group=group: total(c, group))
            assert isinstance(lost, ReplicaLost)
            assert (lost.fields["member"], lost.fields["cause"]) == (1, "RuntimeError: boom")
        assert in_threads([lambda c=c: total(c, PAIR) for c in (zero, three)]) == [1001.0, 1001.0]


def test_a_member_that_waits_for_a_group_learns_of_a_failed_member(monkeypatch):
    monkeypatch.setattr(registration, "ANSWER_SECONDS", 0.05)
    master = MemoryMaster()
    with connected(master, 2) as (zero, one), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(outcome, lambda: total(zero, PAIR))
        wait_until(lambda: master.members("pair") == [0])
        one.close(cause="RuntimeError: boom")
        lost = waiting.result(20)
        assert isinstance(lost, ReplicaLost)
        assert (lost.fields["member"], lost.fields["cause"]) == (1, "RuntimeError: boom")


def test_a_closed_connection_begins_no_group():
    with connected(MemoryMaster(), 2) as (zero, _):
        zero.close()
        with pytest.raises(ConnectionClosed, match="the connection is closed"):
            total(zero, PAIR)


def test_closing_wakes_a_thread_that_waits_for_a_group(server, job):
    def is_waiting():
        return (job, "pair") in {(group["job"], group["group"]) for group in ask(server.endpoint)["groups"]}

    with client.connect(server.endpoint, job=job) as connection, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(outcome, lambda: connection._sessions.get(PAIR))
        wait_until(is_waiting)
        connection.close()
        assert isinstance(waiting.result(20), ConnectionClosed)
        wait_until(lambda: not is_waiting())
