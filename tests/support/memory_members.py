"""Several members in one process, over the in-memory channel pool and the real, pure dispatcher."""

import itertools
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from client.session.channel_pool import Channel, ChannelPool
from client.session.connection import Connection
from client.session.protocol.member import OVER_SERVER, Member
from server.core.dispatcher import Dispatcher

SERVER = b"server-0"


class MemoryChannelPool(ChannelPool):
    """Channels that call `receive(peer, frame)` under a lock, and deliver the (peer, frame) pairs that it returns."""

    def __init__(self, receive: Callable[[bytes, bytes], Iterable[tuple[bytes, bytes]]]) -> None:
        super().__init__("memory://")
        self._receive = receive
        self._master = threading.Lock()
        # Not a SimpleQueue: in Python 3.11 its wait with a timeout lasts for ever if a signal arrives and the handler
        # outlasts the timeout.
        self._inboxes: dict[bytes, queue.Queue[bytes]] = {}
        # Threads open channels at the same time, and each needs its own number.
        self._numbers = itertools.count()

    def deliver(self, replies: Iterable[tuple[bytes, bytes]]) -> None:
        """Put frames into their peers' inboxes."""
        for peer, frame in replies:
            if peer in self._inboxes:
                self._inboxes[peer].put(frame)

    def _open(self) -> Channel:
        peer = next(self._numbers).to_bytes(4, "big")
        self._inboxes[peer] = queue.Queue()
        return _MemoryChannel(lambda frame: self._call(peer, frame), self._inboxes[peer])

    def _call(self, peer: bytes, frame: bytes) -> None:
        with self._master:
            self.deliver(self._receive(peer, frame))


class _MemoryChannel(Channel):
    def __init__(self, call: Callable[[bytes], None], inbox: queue.Queue[bytes]) -> None:
        self._call = call
        self._inbox = inbox

    def send(self, frame: bytes) -> None:
        self._call(frame)

    def receive(self, seconds: float) -> bytes | None:
        try:
            return self._inbox.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None


class MemoryMaster:
    """A dispatcher that members reach without a socket; its clock stands still unless a test advances it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.dispatcher = Dispatcher(SERVER, self.now)
        self.channel_pool = MemoryChannelPool(
            lambda peer, frame: self.dispatcher.receive(self.now, peer, frame).replies
        )

    def connect(
        self,
        member: int,
        world_size: int,
        *,
        job: str = "job",
        round_timeout: float = 20.0,
        min_members: int = 0,
        transport: str = OVER_SERVER,
    ) -> Connection:
        who = Member(
            job, "world", 0, member, world_size, round_timeout, f"thread {member}", min_members, transport=transport
        )
        return Connection(self.channel_pool, who)

    def report(self, group: str) -> dict[str, Any]:
        """A group's part of the status report, made between two messages, as on a server."""
        with self.channel_pool._master:
            report = self.dispatcher.report(self.now)
        found = [entry for entry in report["groups"] if entry["group"] == group]
        return found[0] if found else {"members": [], "waiting": []}

    def members(self, group: str) -> list[int]:
        return [contributor["member"] for contributor in self.report(group)["members"]]

    def pass_time(self, seconds: float) -> None:
        with self.channel_pool._master:
            self.now += seconds
            replies = self.dispatcher.tick(self.now)
        self.channel_pool.deliver(replies)


def in_threads(programs: list[Callable[[], Any]], seconds: float = 30.0) -> list[Any]:
    """Runs all programs at the same time and returns their results; the first exception is raised."""
    with ThreadPoolExecutor(len(programs)) as executor:
        futures = [executor.submit(program) for program in programs]
        return [future.result(timeout=seconds) for future in futures]


def run_members(
    n: int, program: Callable[[Connection], Any], master: MemoryMaster | None = None, *, transport: str = OVER_SERVER
) -> list[Any]:
    """Runs `program(connection)` as n members; returns their results by member."""
    master = master or MemoryMaster()

    def member(number: int) -> Any:
        with master.connect(number, n, transport=transport) as connection:
            return program(connection)

    return in_threads([lambda number=number: member(number) for number in range(n)])


def outcome(program: Callable[[], Any]) -> Any:
    try:
        return program()
    except Exception as error:  # noqa: BLE001 - it is the result
        return error


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits until another thread makes the condition true; fails after `seconds`."""
    expiry = time.monotonic() + seconds
    while time.monotonic() < expiry:
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("the condition did not come true")


INTERRUPTED_SECONDS = 0.1


@contextmanager
def interrupted(rescue: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(2 * INTERRUPTED_SECONDS))
    waiting = threading.get_ident()
    timers = [
        threading.Timer(INTERRUPTED_SECONDS / 2, lambda: signal.pthread_kill(waiting, signal.SIGUSR1)),
        threading.Timer(50 * INTERRUPTED_SECONDS, rescue),
    ]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        timers[0].join()
        timers[1].cancel()
        signal.signal(signal.SIGUSR1, before)
