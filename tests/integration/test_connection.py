"""connect(): the identity of this process, and errors when it cannot join."""

import os
import signal
import tempfile
import threading
import warnings

import numpy as np
import pytest
import zmq

import client
from client.launch import connect as launch
from client.launch.settings import resolve
from client.session.channel_pool import ZmqChannelPool
from client.session.connection import Connection
from client.session.protocol import registration, round_trip
from client.session.protocol.member import Member
from programs import member_programs
from server.core.dispatcher import Received
from statsd_bn import PROTOCOL_VERSION, Rows, endpoints, errors, limits
from support.memory_members import MemoryMaster, outcome, run_members
from support.sentences import says

ROW = Rows((1,), np.ones((1, 2, 3)))

# Limit for a forked child, which refuses to use the connection within milliseconds or hangs.
CHILD_SECONDS = 60


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        ({"RANK": "four"}, {}, "RANK: expected an integer, got 'four'"),
        ({}, {"rank": 3, "world_size": 3}, r"rank: expected a number in \[0, world_size\), here \[0, 3\), got 3"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, {}, "got -1"),
        ({}, {"world_size": 0}, "world_size: expected 1 to"),
        ({}, {"round_timeout": 0.0}, "round_timeout: expected seconds in"),
        ({}, {"round_timeout": float("nan")}, "round_timeout: expected seconds in"),
        ({}, {"join_timeout": 0.0}, "join_timeout: expected seconds in"),
        ({}, {"policy": "loose"}, "policy: expected 'strict' or 'elastic', got 'loose'"),
        ({}, {"min_members": 1}, "min_members: expected no value under the policy 'strict', got 1"),
        ({}, {"policy": "elastic", "min_members": 0}, r"min_members: expected 1 to world_size 1 \(default\), got 0"),
        ({}, {"policy": "elastic", "world_size": 2, "min_members": 3}, r"world_size 2 \(argument\), got 3"),
        ({}, {"policy": "elastic", "min_members": True}, "got True"),
        ({}, {"policy": "elastic", "rank": limits.MAX_MEMBERS}, r"rank: expected a number in \[0, MAX_MEMBERS\)"),
        ({}, {"job": ""}, "job: expected printable text"),
        ({}, {"job": "x" * 300}, "job: expected printable text"),
    ],
)
def test_a_wrong_value_is_named(environ, arguments, message):
    with pytest.raises(errors.ConfigurationError, match=message):
        resolve(environ, **arguments)


def test_a_job_is_strict_by_default():
    assert resolve({}, world_size=4).member.min_members == 0
    assert resolve({}, world_size=4, policy="elastic").member.min_members == 1
    assert resolve({}, world_size=4, policy="elastic", min_members=3).member.min_members == 3


def test_a_newcomer_to_an_elastic_job_may_have_a_rank_beyond_world_size():
    assert resolve({}, world_size=4, rank=7, policy="elastic").member.rank == 7


def test_with_neither_an_endpoint_nor_a_server_of_this_user_connect_raises(monkeypatch, tmp_path):
    monkeypatch.delenv("STATSD_BN_ENDPOINT", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "FIND_SECONDS", 0.0)
    monkeypatch.setattr(endpoints, "RUNTIME_FOLDERS", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(
        errors.ServerUnreachable,
        check=says(rf"no server of this user .* ipc://{tmp_path}/.*start `python -m server`.*torchrun"),
    ):
        client.connect(rank=0, world_size=2)


def test_the_endpoint_comes_from_the_environment(monkeypatch, server, job):
    monkeypatch.setenv("STATSD_BN_ENDPOINT", server.endpoint)
    with client.connect(job=job) as connection:
        assert client.current_connection() is connection
        assert server.endpoint in repr(connection)
    assert client.current_connection() is None


def test_a_process_connects_once(server, job):
    with client.connect(server.endpoint, job=job), pytest.raises(errors.ConfigurationError, match="already connected"):
        client.connect(server.endpoint, job=job)


def test_disconnecting_twice_or_without_a_connection_is_harmless(server, job):
    client.connect(server.endpoint, job=job)
    client.disconnect()
    client.disconnect()


def test_no_server_at_the_endpoint_is_an_error_that_names_it(monkeypatch, tmp_path):
    monkeypatch.setattr(registration, "ANSWER_SECONDS", 0.2)
    endpoint = f"ipc://{tmp_path}/nobody"
    with pytest.raises(
        errors.ServerUnreachable, match=rf"^no server listens at\n    {endpoint} \(there is no such file\)\n"
    ):
        client.connect(endpoint)


def test_connect_waits_at_most_10_seconds_for_a_server():
    assert registration.ANSWER_SECONDS <= 10


def test_connect_waits_for_all_members_and_names_the_missing_ones():
    master = MemoryMaster()
    with pytest.raises(errors.GroupIncomplete, match=r"^ranks 1-2 did not connect within 0.1 s") as caught:
        master.connect(0, 3, round_timeout=0.1)
    assert caught.value.fields == {"job": "job", "group": "world", "size": 3, "present": [0], "missing": [1, 2]}
    assert master.dispatcher.report(0.0)["groups"] == []


def test_join_timeout_limits_the_wait_for_the_group_to_fill(server, job):
    with pytest.raises(errors.GroupIncomplete, match=r"rank 1 did not connect within 0.2 s"):
        client.connect(server.endpoint, job=job, world_size=2, round_timeout=50.0, join_timeout=0.2)


def test_a_server_that_is_asked_again_at_the_last_moment_is_not_unreachable(monkeypatch):
    """Even if `join_timeout` is almost over, the server gets its full time to answer a repeated Register."""
    master = MemoryMaster()
    answer = master.channel_pool._receive

    def answer_later(peer, frame):
        replies = answer(peer, frame)
        threading.Timer(0.1, master.channel_pool.deliver, [replies]).start()
        return []

    monkeypatch.setattr(master.channel_pool, "_receive", answer_later)
    with pytest.raises(errors.GroupIncomplete, match=r"rank 1 did not connect within 0.15 s"):
        master.connect(0, 2, round_timeout=0.15)


@pytest.mark.parametrize(("transport", "nr_warnings"), [("auto", 0), ("shared_memory", 1)])
def test_an_elastic_job_that_asks_for_shared_memory_is_warned(server, job, caplog, transport, nr_warnings):
    with client.connect(server.endpoint, job=job, rank=0, world_size=1, policy="elastic", transport=transport):
        pass
    text = f"job {job!r} exchanges rows over the server, and not in shared memory: the job is elastic"
    assert caplog.messages.count(text) == nr_warnings


OF_A_WORKER = """Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
OSError: truncated file

"""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (None, ""),
        (ValueError("full"), "ValueError: full"),
        (KeyboardInterrupt(), "KeyboardInterrupt (Ctrl-C)"),
        (OSError(OF_A_WORKER), "OSError: Caught OSError in DataLoader worker process 0. OSError: truncated file"),
        (errors.ReplicaLost("rank 1 is lost\n  in job 'x'"), "ReplicaLost: rank 1 is lost"),
    ],
)
def test_the_cause_sent_to_the_others_is_the_class_and_text_of_the_error(error, cause):
    assert registration.cause_of(error) == cause


def test_a_long_wait_for_the_group_to_fill_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(registration, "WARN_SECONDS", 0.1)
    monkeypatch.setattr(registration, "ANSWER_SECONDS", 0.05)
    with pytest.raises(errors.GroupIncomplete), caplog.at_level("WARNING", "statsd_bn.client"):
        MemoryMaster().connect(0, 2, round_timeout=0.6)
    messages = [record.getMessage() for record in caplog.records if record.name == "statsd_bn.client"]
    assert messages[0] == "job 'job', group 'world': waited 0 s for rank 1 to connect"
    assert 2 <= len(messages) <= 4, "in growing intervals"


def test_a_server_of_another_version_is_named(tmp_path):
    """The first bytes of a frame have the same form in all versions, so the version can always be read."""
    endpoint = f"ipc://{tmp_path}/old"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        router.setsockopt(zmq.RCVTIMEO, 20_000)
        who = Member("job", "world", 0, 0, 1, 5.0, "here")
        results = []
        thread = threading.Thread(
            target=lambda: results.append(outcome(lambda: Connection(ZmqChannelPool(endpoint), who)))
        )
        thread.start()
        peer, frame = router.recv_multipart()
        router.send_multipart([peer, frame[:3] + b"\x63" + frame[4:]])
        thread.join(timeout=20)
    assert isinstance(results[0], errors.VersionMismatch)
    assert results[0].fields == {"expected": PROTOCOL_VERSION, "got": 99}


def test_an_exception_in_one_member_reaches_the_others_with_its_cause(members):
    results = members(3, member_programs.fail_on_member_1)
    assert results[1] == "ValueError: out of memory, say"
    for survivor in (results[0], results[2]):
        assert isinstance(survivor, errors.ReplicaLost)
        assert "failed with ValueError: out of memory, say" in str(survivor)
        assert survivor.fields["member"] == 1


def test_a_silent_server_is_given_up_after_the_deadline(monkeypatch):
    monkeypatch.setattr(round_trip, "GRACE_SECONDS", 0.1)
    master = MemoryMaster()
    connection = master.connect(0, 1, round_timeout=0.1)
    monkeypatch.setattr(master.dispatcher, "receive", lambda *_: Received([]))
    with pytest.raises(errors.RoundTimeout, match=r"no aggregate from the server at memory:// within 0.2 s"):
        client.SlavePipe(connection, "bn").run_slave(ROW)
    connection.close()


def test_a_forked_child_must_not_use_its_parents_connection(server, job):
    """DataLoader workers inherit sockets; a child that used them would corrupt the parent's messages."""
    with client.connect(server.endpoint, job=job, round_timeout=30.0) as connection:
        text = _result_in_forked_child(lambda: client.SlavePipe(connection, "bn").run_slave(ROW), connection.close)
        assert "cannot use its connection" in text
        assert client.SlavePipe(connection, "bn").run_slave(ROW).count == 1


def test_a_forked_child_connects_by_itself_while_its_parent_is_connected(server, job):
    def connect():
        connection = client.connect(server.endpoint, job=f"{job} child", round_timeout=30.0)
        return client.SlavePipe(connection, "bn").run_slave(ROW).count

    with client.connect(server.endpoint, job=job, round_timeout=30.0) as connection:
        assert _result_in_forked_child(connect, client.disconnect) == "1"
        assert client.SlavePipe(connection, "bn").run_slave(ROW).count == 1


def _result_in_forked_child(program, end):
    """The result of `program` in a forked child, as text; empty if the child timed out."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 and later warn of a fork in a process with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        # The default action ends even a process that waits inside ZeroMQ.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_SECONDS)
        try:
            result = str(outcome(program)).encode()
            end()
            os.write(writer, result)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result


def test_a_connection_counts_and_times_its_rounds():
    def exchange(connection):
        connection.group("local")  # the gather of machine IDs does not count
        assert connection.median_round_trip == 0.0
        assert connection.metrics()["statsd_bn/round_trip_p99_ms"] == 0.0
        for _ in range(5):
            client.SlavePipe(connection, "bn").run_slave(ROW)
        return connection.rounds, connection.median_round_trip, connection.metrics()

    for rounds, median, metrics in run_members(2, exchange):
        assert rounds == 5
        assert 0.0 < median < 20.0
        assert metrics["statsd_bn/rounds"] == 5
        assert metrics["statsd_bn/members"] == 2
        assert metrics["statsd_bn/round_trip_ms"] == 1e3 * median <= metrics["statsd_bn/round_trip_p99_ms"]
        assert metrics["statsd_bn/non_finite"] == 0


def test_restarted_processes_replace_the_former_ones_and_a_former_epoch_is_refused(server, job):
    """A server that outlives a worker group of `torchrun --max-restarts`."""

    def connect(restarts):
        environ = {"STATSD_BN_JOB": job, "TORCHELASTIC_RESTART_COUNT": restarts}
        return Connection(ZmqChannelPool(server.endpoint), resolve(environ, round_timeout=20.0).member)

    with connect("0") as before, connect("1") as after:
        with pytest.raises(errors.RegistrationRefused, match=r"rank 0 \([^)]*\) began a new run of the group"):
            client.SlavePipe(before, "bn").run_slave(ROW)
        with pytest.raises(errors.StaleEpoch, match="expected epoch 1 or later, got 0 from rank 0") as caught:
            connect("0")
        assert caught.value.fields["got"] == 0
        assert client.SlavePipe(after, "bn").run_slave(ROW).count == 1


def test_an_uncaught_exception_at_the_end_of_a_script_is_the_cause_the_others_see(members, server, job):
    (error,) = members(1, member_programs.wait_for_a_crashing_script, server.endpoint, f"{job}-crash", job=f"{job}-a")
    assert isinstance(error, errors.ReplicaLost)
    assert "failed with RuntimeError: the script crashed" in str(error)
