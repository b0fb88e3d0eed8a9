"""The heartbeat thread: when it sends heartbeats and reports, how it ends, and its absence in forked children."""

import os
import queue
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

import client
from client.diagnostics.broken_job import BrokenJob
from client.diagnostics.sampler import ThreadSampler
from client.session.channel_pool import HeartbeatSocket, ZmqChannelPool
from client.session.connection import Connection
from client.session.protocol import heartbeats as heartbeats_module
from client.session.protocol.heartbeats import HeartbeatScheduler
from client.session.protocol.member import Member
from client.session.protocol.session import Session
from client.session.sessions import HeartbeatThread
from statsd_bn import limits
from statsd_bn import skew_samples as samples
from statsd_bn.members import NO_MEMBERS, Members
from statsd_bn.messages import Failure, Message, Registered, SkewStats, StackReport, StackRequest, digest
from statsd_bn.messages import Heartbeat as HeartbeatMessage
from statsd_bn.round_key import FORWARD, GATHER, RoundKey
from statsd_bn.skew_samples import SkewSampler
from statsd_bn.wire import decode, encode
from support.memory_members import MemoryMaster, in_threads, wait_until

INTERVAL = 0.2


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", INTERVAL)


class FakeBeacon:
    """A heartbeat socket whose connection the test controls; it records the sent frames and their times."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, bytes]] = []
        self.connected = True
        self.attempts = 0
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.closed = False
        self.incoming: list[bytes] = []
        self.kinds: list[type] = []
        self.frames: list[Message] = []

    @property
    def is_connected(self):
        return self.connected

    def send(self, frame):
        self.attempts += 1
        self.frames.append(decode(frame))
        self.kinds.append(type(decode(frame)))
        if self.connected:
            self.sent.append((time.monotonic(), decode(frame).session))
        return self.connected

    def wait(self, seconds):
        try:
            return self.events.get(timeout=max(0.0, seconds)) == "connected"
        except queue.Empty:
            return False

    def received(self):
        frames, self.incoming = self.incoming, []
        return frames

    def wake(self):
        self.events.put("woken")

    def close(self):
        self.closed = True

    def sessions(self):
        return [session for _, session in self.sent]


class Talkative(Session):
    """A session that has always just sent a message, even if the threads of a test are late."""

    last_sent = property(lambda _: time.monotonic(), lambda _, __: None)


def a_session(token=b"session0", known=True, kind=Session):
    session = kind(token, Member("job", "world", 0, 0, 1, 30.0, "here"))
    if known:
        session.registered(encode(Registered(digest(token), b"server-0", 0, 0, 0, NO_MEMBERS)))
    session.last_sent = time.monotonic()
    return session


@pytest.fixture
def beacon():
    return FakeBeacon()


def thread_of(beacon, sessions, broken_job, reconnected=lambda: None):
    """A running heartbeat thread; `sessions` is a function that returns its sessions."""
    channel_pool = SimpleNamespace(close_idle=reconnected)
    return HeartbeatThread(beacon, SimpleNamespace(all=sessions, channel_pool=channel_pool, broken_job=broken_job))


@pytest.fixture
def start(beacon, broken_job):
    started: list[HeartbeatThread] = []

    def run(sessions, reconnected=lambda: None):
        started.append(thread_of(beacon, sessions, broken_job, reconnected))
        return started[-1]

    yield run
    for heartbeat in started:
        heartbeat.stop()


@pytest.mark.usefixtures("quick")
def test_a_silent_session_sends_one_heartbeat_per_interval(start, beacon):
    session = a_session()
    heartbeat = start(lambda: [session])
    wait_until(lambda: len(beacon.sent) >= 5)
    heartbeat.stop()
    times = [moment for moment, _ in beacon.sent]
    # The interval after the first heartbeat does not count: that heartbeat only announces the session.
    assert times[-1] - times[0] > 0.9 * (len(times) - 2) * INTERVAL


@pytest.mark.usefixtures("quick")
def test_a_session_with_other_messages_sends_no_heartbeat(start, beacon):
    session, silent = a_session(kind=Talkative), a_session(b"session1")
    heartbeat = start(lambda: [session, silent])
    wait_until(lambda: beacon.sessions().count(b"session1") >= 5)
    heartbeat.stop()
    assert beacon.sessions().count(b"session0") <= 1


@pytest.mark.usefixtures("quick")
def test_a_session_that_no_master_knows_sends_nothing(start, beacon):
    sessions = [a_session(b"session1"), a_session(known=False)]
    heartbeat = start(lambda: sessions)
    wait_until(lambda: len(beacon.sent) >= 3)
    heartbeat.stop()
    assert set(beacon.sessions()) == {b"session1"}


def test_idle_channels_are_closed_after_the_first_heartbeat_of_each_reconnect(monkeypatch, start, beacon):
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", 3600.0)
    counts = []
    heartbeat = start(lambda: [a_session()], lambda: counts.append(len(beacon.sent)))
    for number in range(1, 4):
        beacon.events.put("connected")
        wait_until(lambda number=number: len(beacon.sent) == number)
    heartbeat.stop()
    assert counts == [2, 3], "after the heartbeat: the master must know the new connection before idle channels close"


@pytest.mark.usefixtures("quick")
def test_without_a_connection_heartbeats_are_not_sent_more_often(start, beacon):
    beacon.connected = False
    session = a_session()
    started = time.monotonic()
    heartbeat = start(lambda: [session])
    wait_until(lambda: beacon.attempts >= 4)
    heartbeat.stop()
    assert beacon.attempts <= (time.monotonic() - started) / INTERVAL + 2


def test_stopping_during_a_wait_ends_the_thread_and_closes_the_heartbeat_socket(monkeypatch, start, beacon):
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", 3600.0)
    heartbeat = start(list)
    heartbeat.stop()
    assert beacon.closed
    assert not heartbeat._thread.is_alive()


def test_a_new_session_is_introduced_at_once_after_a_wake_up(monkeypatch, start, beacon):
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", 3600.0)
    sessions = []
    heartbeat = start(lambda: sessions)
    sessions.append(a_session())
    heartbeat.wake()
    wait_until(lambda: beacon.sessions() == [b"session0"])


@pytest.fixture
def broken_job():
    return BrokenJob(ThreadSampler(reports_stacks=True, rank=0), "rank 0", None)


def test_a_stack_request_is_answered_with_a_stack_report(beacon, broken_job):
    session, other = a_session(), a_session(b"session1")
    heartbeat = thread_of(beacon, lambda: [other, session], broken_job)
    beacon.incoming = [encode(StackRequest(digest(session.member_token), 7)), encode(StackRequest(b"no such ", 8))]
    heartbeat.wake()
    wait_until(lambda: StackReport in beacon.kinds)
    heartbeat.stop()
    assert beacon.kinds.count(StackReport) == 1
    (answer,) = (frame for frame in beacon.frames if isinstance(frame, StackReport))
    assert (answer.session, answer.number) == (session.member_token, 7)
    assert answer.stack


def test_a_failure_of_this_job_is_received_and_a_failure_of_another_job_is_ignored(beacon, broken_job):
    heartbeat = thread_of(beacon, lambda: [a_session()], broken_job)
    fields = {"job": "job", "group": "world", "member": 1, "step": 3, "cause": "boom"}
    others = {**fields, "job": "another"}
    failures = [Failure("replica_lost", "not ours", others), Failure("replica_lost", "ours", fields)]
    beacon.incoming = [encode(message) for message in failures]
    heartbeat.wake()
    cause = broken_job.wait_for_cause(20.0)
    heartbeat.stop()
    assert str(cause) == "ours"


# Over ZeroMQ.


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


def test_a_heartbeat_socket_knows_whether_it_is_connected_and_otherwise_queues_nothing(context, tmp_path):
    endpoint = f"ipc://{tmp_path}/master"
    beacon = HeartbeatSocket(context, endpoint)
    assert not beacon.send(b"nobody is there")
    assert not beacon.wait(0.0)
    for _ in range(2):
        with context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(endpoint)
            wait_until(lambda: beacon.wait(0.1))
            wait_until(lambda: beacon.send(b"alive"))
            assert router.poll(20_000)
            assert router.recv_multipart()[1] == b"alive"
            assert not router.poll(50)
        wait_until(lambda: not beacon.send(b"nobody is there"))
    beacon.close()


def test_an_error_while_checking_for_a_broken_job_does_not_end_the_heartbeats(context, tmp_path):
    steps = []

    def step(now):
        steps.append(now)
        raise ValueError("a torch that nobody knows")

    beacon = HeartbeatSocket(context, f"ipc://{tmp_path}/nobody")
    heartbeat = thread_of(beacon, list, SimpleNamespace(check=step))
    for number in range(3):
        heartbeat.wake()
        wait_until(lambda number=number: len(steps) > number)
    heartbeat.stop()


def test_waking_a_heartbeat_socket_ends_its_wait(context, tmp_path):
    beacon = HeartbeatSocket(context, f"ipc://{tmp_path}/nobody")
    thread = threading.Thread(target=lambda: beacon.wait(3600.0))
    thread.start()
    beacon.wake()
    thread.join(timeout=20)
    assert not thread.is_alive()
    beacon.close()


def test_answers_and_probes_do_not_pile_up_at_a_heartbeat_socket(context, tmp_path):
    beacon = HeartbeatSocket(context, f"ipc://{tmp_path}/master")
    with context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/master")
        wait_until(lambda: beacon.send(b"alive"))
        peer, _ = router.recv_multipart()
        for _ in range(100):
            router.send_multipart([peer, b"probe"])
        wait_until(lambda: bool(beacon._socket.poll(10)))
        frames: list[bytes] = []

        def nothing_comes_any_more():
            frames.extend(beacon.received())
            return not (beacon.wait(0.1) or beacon._socket.poll(50))

        wait_until(nothing_comes_any_more)
        assert frames == [b"probe"] * 100
    beacon.close()


def heartbeats():
    return [thread for thread in threading.enumerate() if thread.name == "statsd_bn heartbeat"]


def test_a_connection_has_one_thread_and_closing_ends_it(server, job):
    with client.connect(server.endpoint, job=job):
        assert len(heartbeats()) == 1
    assert heartbeats() == []


def test_a_connection_that_was_refused_leaves_no_thread_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(client.session.protocol.registration, "ANSWER_SECONDS", 0.1)
    with pytest.raises(Exception, match="no server listens"):
        client.connect(f"ipc://{tmp_path}/nobody")
    assert heartbeats() == []


def test_a_member_in_the_masters_process_starts_no_heartbeat_thread():
    with MemoryMaster().connect(0, 1):
        assert heartbeats() == []


def test_a_forked_child_has_no_heartbeat_thread(server, job):
    with client.connect(server.endpoint, job=job):
        with warnings.catch_warnings():
            # Python 3.12 and later warn of a fork in a process with threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            client.disconnect()
            os._exit(len(heartbeats()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(heartbeats()) == 1


UNTIDY = """
import sys, client
from client.session.connection import Connection
from client.session.protocol.member import Member
from client.session.channel_pool import ZmqChannelPool
if sys.argv[2] == "connected":
    client.connect(sys.argv[1], job=sys.argv[3])
else:
    left = Connection(ZmqChannelPool(sys.argv[1]), Member(sys.argv[3], "world", 0, 0, 1, 30.0, "here"))
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["connected", "left open"])
def test_a_script_that_never_closes_still_ends(server, job, how):
    subprocess.run([sys.executable, "-c", UNTIDY, server.endpoint, how, job], check=True, timeout=100)


def test_a_session_reports_a_change_of_transport_at_once():
    scheduler, session = HeartbeatScheduler(), a_session()

    def transports_due() -> list[str]:
        session.last_sent = now = time.monotonic()
        due = scheduler.sessions_due(now, [session])
        transports = [decode(one.heartbeat()).transport for one in due]
        for one in due:
            scheduler.mark_sent(one)
        return transports

    assert [transports_due(), transports_due()] == [[""], []]
    session.transport.fall_back("on purpose")
    assert [transports_due(), transports_due()] == [["server"], []]
    scheduler.on_reconnected()
    assert [transports_due(), transports_due()] == [["server"], []]


@pytest.mark.parametrize(
    ("memory", "beats"), [(SimpleNamespace(is_abandoned=False), 10), (SimpleNamespace(is_abandoned=True), 0), (None, 0)]
)
def test_a_member_in_shared_memory_sends_heartbeats_although_it_sends_other_messages(memory, beats):
    """Only heartbeats report its waits in shared memory to the server."""
    scheduler, session, now, count = HeartbeatScheduler(), a_session(), 100.0, 0
    session.transport.memory = memory
    for one in scheduler.sessions_due(now, [session]):
        scheduler.mark_sent(one)
    while now < 110.0:
        now += 0.25
        session.last_sent = now  # a contribution over the server
        left = 0.75 - (now - 100.25) % 1.0 if beats else limits.HEARTBEAT_SECONDS
        assert scheduler.seconds_until_due(now, [session]) == pytest.approx(left)
        for one in scheduler.sessions_due(now, [session]):
            scheduler.mark_sent(one)
            count += 1
    assert count == beats


@pytest.mark.parametrize(("is_in_memory", "times"), [(True, 1), (False, 0)])
def test_ranks_in_shared_memory_are_warned_once_of_an_absent_server_and_others_are_not(is_in_memory, times):
    scheduler, session = HeartbeatScheduler(), a_session()
    if is_in_memory:
        session.transport.memory = SimpleNamespace(is_abandoned=False)
    texts = [scheduler.outage_warning(float(now), [session], is_connected=False) for now in range(60)]
    assert (texts[9], len([text for text in texts if text])) == ("", times)
    assert not times or "no connection to the server for 10 s. The ranks continue in shared memory" in texts[10]


def test_a_second_absence_of_the_server_is_reported_too():
    scheduler, session = HeartbeatScheduler(), a_session()
    session.transport.memory = SimpleNamespace(is_abandoned=False)
    for began in (0.0, 100.0):
        assert not scheduler.outage_warning(began, [session], is_connected=False)
        assert scheduler.outage_warning(began + 20, [session], is_connected=False)
        assert not scheduler.outage_warning(began + 30, [session], is_connected=True)


@pytest.mark.usefixtures("quick")
def test_a_rank_with_unanswered_messages_is_warned_too(start, beacon, monkeypatch, caplog):
    monkeypatch.setattr(heartbeats_module, "AWAY_SECONDS", 3 * INTERVAL)
    beacon.connected = False
    session = a_session()
    session.transport.memory = SimpleNamespace(is_abandoned=False)
    start(lambda: [session])

    def is_warned():
        session.last_sent = time.monotonic()
        return "no connection to the server" in caplog.text

    wait_until(is_warned)


def open_session(session):
    session.registered(encode(Registered(digest(session.member_token), b"server-0", 0, 0, 0, Members.of([0, 1]))))
    return session


def test_a_job_that_has_been_open_for_a_minute_without_a_layer_is_reported_unused_once():
    """The minute starts when the group opens, and a gather is no round of a layer."""
    scheduler, session = HeartbeatScheduler(), a_session()
    session.forward_key("hello", GATHER)
    assert not any(scheduler.is_unused(float(now), [session]) for now in range(300))
    open_session(session)
    assert [now for now in range(300, 600) if scheduler.is_unused(float(now), [session])] == [360]


def test_a_job_in_which_a_layer_waits_in_its_first_round_is_not_reported_unused():
    scheduler, first, second = HeartbeatScheduler(), open_session(a_session()), open_session(a_session(b"session1"))
    assert not scheduler.is_unused(0.0, [first])
    second.forward_key("bn", FORWARD)
    assert not any(scheduler.is_unused(float(now), [first, second]) for now in range(300))


def test_a_rank_whose_model_was_not_converted_is_warned_once(server, job, monkeypatch, caplog):
    monkeypatch.setattr(heartbeats_module, "UNUSED_SECONDS", 0.1)

    def unused_warnings():
        return [text for text in caplog.messages if "no layer was synchronised" in text]

    def train(rank):
        who = Member(job, "world", 0, rank, 2, 30.0, "here")
        with Connection(ZmqChannelPool(server.endpoint), who):
            wait_until(lambda: len(unused_warnings()) == 2)

    in_threads([partial(train, rank) for rank in range(2)])
    assert [f"rank {rank} of 2: " in text for rank, text in enumerate(sorted(unused_warnings()))] == [True, True]
    expected = "no layer was synchronised in the first 60 s; check that client.convert_model() was called"
    assert all(expected in text for text in unused_warnings())


def test_a_session_unknown_to_a_new_master_sends_a_heartbeat_at_once():
    """The new master refused the first heartbeat. Without a second one it would send on a possibly closed channel."""
    scheduler, session = HeartbeatScheduler(), a_session()
    unknown = encode(Failure("unknown_session", "who?", {"digest": digest(session.member_token).hex()}))

    def is_due() -> bool:
        due = scheduler.sessions_due(time.monotonic(), [session])
        for one in due:
            scheduler.mark_sent(one)
        return bool(due)

    assert [is_due(), is_due()] == [True, False]
    assert scheduler.on_unsolicited(unknown, [session]) == session.resync_frames()
    assert [is_due(), is_due()] == [True, False]
    # Only one heartbeat for each connection: a master that waits for results repeats the same error.
    scheduler.on_unsolicited(unknown, [session])
    assert not is_due()
    scheduler.on_reconnected()
    assert [is_due(), is_due()] == [True, False]
    scheduler.on_unsolicited(unknown, [session])
    assert is_due()


def sampled(session, step=0):
    session.transport.samples = session.transport.samples or SkewSampler()
    key = RoundKey("job", "world", 0, step, "bn", 0, FORWARD)
    session.transport.samples.observe(step, key, [2, 2], (1, 1), np.array([[[2.0], [4.0]], [[6.0], [20.0]]]))
    return session


def test_skew_figures_follow_a_heartbeat():
    """A server that does not know the session would answer skew figures with an error."""
    scheduler, session = HeartbeatScheduler(), sampled(a_session())
    assert scheduler.skew_frames(1.0, [session]) == []
    scheduler.sessions_due(time.monotonic(), [session])
    scheduler.mark_sent(session)
    assert scheduler.skew_frames(3.0, [session]) == []  # the first call has dropped the sample
    (frame,) = scheduler.skew_frames(5.0, [sampled(session, 4)])
    assert isinstance(decode(frame), SkewStats)
    scheduler.on_reconnected()
    assert scheduler.skew_frames(9.0, [sampled(session, 8)]) == []


def test_the_heartbeat_thread_sends_skew_figures(start, beacon, monkeypatch):
    monkeypatch.setattr(samples, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", 0.05)
    session = sampled(a_session())
    start(lambda: [session])
    wait_until(lambda: SkewStats in beacon.kinds)
    assert beacon.kinds.index(HeartbeatMessage) < beacon.kinds.index(SkewStats)
    (digest_,) = (frame for frame in beacon.frames if isinstance(frame, SkewStats))
    assert (digest_.session, digest_.step, digest_.names) == (session.member_token, 0, ["bn"])
    assert digest_.values.tolist() == [[[2.0, 1.0, 1.0, 0.25], [2.0, 3.0, 1.0, 0.25]]]


def test_an_error_in_skew_figures_does_not_end_the_heartbeats(start, beacon, monkeypatch):
    monkeypatch.setattr(samples, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", 0.05)
    session = sampled(a_session())
    monkeypatch.setattr(session, "skew_frame", lambda _: 1 / 0)
    start(lambda: [session])
    wait_until(lambda: beacon.kinds.count(HeartbeatMessage) > 5)
    assert SkewStats not in beacon.kinds


def test_skew_figures_that_are_not_finite_are_left_out():
    session = sampled(a_session())
    (sample,) = session.transport.samples.drain(1.0)
    huge = replace(sample, counts=np.ones(2), values=np.full((2, 2, 2), 1.7e308))
    assert session.skew_frame([huge]) is None
