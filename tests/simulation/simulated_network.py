"""A virtual clock and network for the real, pure halves of the protocol.

Nothing sleeps or runs concurrently, and all random numbers come from one seed, so a world repeats to the byte. A
*socket* keeps its frames in order; its faults exceed ZeroMQ's: frames may vanish, arrive twice, late or out of order,
or with detectable damage.
"""

import functools
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from client.session.protocol.session import Session
from server.core.dispatcher import Dispatcher
from server.network.connections import ProbeScheduler
from server.network.service import TICK_SECONDS
from server.security.quota import Quota
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Failure, Message
from statsd_bn.wire import decode

Trace = list[tuple[Any, ...]]

# What may befall a frame, in the order in which the chances are drawn.
FRAME_FAULTS = ("dropped", "doubled", "delayed", "reordered", "corrupted")

# Delay until a socket reconnects once the server is back or the network whole, about ZeroMQ's interval of attempts.
RECONNECT_SECONDS = 0.1
BEACON_RECONNECT_SECONDS = 0.05

# A quota checks its values when it is made, so all servers share one.
QUOTA = Quota()


class Clock:
    """Virtual time, which jumps to the next event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = 0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._due, (max(self.now, when), self._order, action, args))

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, action, *args)

    def step(self) -> None:
        self.now, _, action, args = heapq.heappop(self._due)
        action(*args)


@dataclass
class Weather:
    """How often a frame meets each fault, and for how long frames travel."""

    dropped: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    reordered: float = 0.0
    corrupted: float = 0.0
    latency: float = 0.001
    longest_delay: float = 1.0

    @property
    def is_fair(self) -> bool:
        return not any(getattr(self, fault) for fault in FRAME_FAULTS)


class Link:
    """One connection of a socket; the server knows it by its peer id, which is never used again."""

    def __init__(self, peer: bytes, channel: "SimulatedChannel") -> None:
        self.peer = peer
        self.channel = channel
        self.open_here = True
        self.open_there = True
        self.up = self.down = 0.0


class SimulatedChannel:
    """A DEALER socket; its owner reads frames from the inbox."""

    def __init__(self, network: "Network", owner: Any, reconnect: float = RECONNECT_SECONDS) -> None:
        self.owner = owner
        self.reconnect = reconnect
        self.link: Link | None = None
        self.inbox: deque[bytes] = deque()
        self.outbox: list[bytes] = []
        self.connections = 0
        self.connected_anew = False
        self._network = network
        network.open(self)

    def send(self, frame: bytes) -> None:
        self._network.send(self, frame)

    def close(self) -> None:
        self._network.close(self)


class Network:
    """Carries frames between sockets and the server, with the faults of its weather."""

    def __init__(self, clock: Clock, rng: random.Random, weather: Weather, trace: Trace) -> None:
        self.clock = clock
        self.weather = weather
        self.faults: dict[str, int] = {}
        self.sent_up = self.sent_down = 0
        self.server: SimulatedServer
        self._rng = rng
        self._trace = trace
        # The faults that frames may meet, each with its chance.
        self._chances = [(fault, chance) for fault in FRAME_FAULTS if (chance := getattr(weather, fault))]
        self._peers = 0
        self._links: dict[bytes, Link] = {}
        self._channels: list[SimulatedChannel] = []

    def count(self, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1

    def open(self, channel: SimulatedChannel) -> None:
        self._channels.append(channel)
        self._connect(channel)

    def close(self, channel: SimulatedChannel, *, silently: bool = False) -> None:
        """Frames sent before still arrive, and then the server notices the end, unless the whole host vanished."""
        if channel in self._channels:
            self._channels.remove(channel)
        link, channel.link = channel.link, None
        if link:
            link.open_here = False
            if not silently:
                self.clock.at(max(link.up, self.clock.now + self.weather.latency), self._end, link)

    def vanish(self, owner: Any, *, silently: bool) -> None:
        for channel in [channel for channel in self._channels if channel.owner is owner]:
            self.close(channel, silently=silently)

    def cut(self, owner: Any, seconds: float) -> None:
        """Break a member's connections; frames in flight are lost."""
        for channel in [channel for channel in self._channels if channel.owner is owner]:
            if channel.link:
                self._sever(channel)
            self.clock.after(seconds + channel.reconnect * self._rng.random(), self._connect, channel)

    def server_gone(self) -> None:
        for channel in self._channels:
            if channel.link:
                self._sever(channel)
        # The next server gets no frame that was sent to this server, not even from a host that has vanished.
        for link in self._links.values():
            link.open_there = False
        self._links.clear()

    def server_back(self) -> None:
        for channel in list(self._channels):
            self.clock.after(channel.reconnect * self._rng.random(), self._connect, channel)

    def send(self, channel: SimulatedChannel, frame: bytes) -> None:
        if not channel.owner.alive:
            return
        if channel.link is None:
            channel.outbox.append(frame)
            return
        self.sent_up += 1
        self._carry(channel.link, frame, upwards=True)

    def answer(self, peer: bytes, frame: bytes) -> bool:
        """Sends to a peer; returns False if there is none, as a ROUTER with MANDATORY does."""
        link = self._links.get(peer)
        if link is None:
            return False
        self.sent_down += 1
        self._carry(link, frame, upwards=False)
        return True

    def _connect(self, channel: SimulatedChannel) -> None:
        if channel.link or channel not in self._channels or not self.server.up or not channel.owner.alive:
            return
        self._peers += 1
        channel.link = link = Link(self._peers.to_bytes(5, "big"), channel)
        self._links[link.peer] = link
        channel.connections += 1
        if channel.connections > 1:
            channel.connected_anew = True
            channel.owner.connected_anew(channel)
        waiting, channel.outbox = channel.outbox, []
        for frame in waiting:
            self.send(channel, frame)

    def _sever(self, channel: SimulatedChannel) -> None:
        link, channel.link = channel.link, None
        if link:
            link.open_here = link.open_there = False
            self._end(link)

    def _end(self, link: Link) -> None:
        link.open_there = False
        if self._links.pop(link.peer, None):
            self.server.disconnected()

    def _carry(self, link: Link, frame: bytes, *, upwards: bool) -> None:
        weather, rng = self.weather, self._rng
        seconds = weather.latency * (1 + rng.random())
        if not self._chances:
            self._pass(link, frame, seconds, upwards=upwards)
            return
        fate = rng.random()
        for fault, chance in self._chances:
            if fate < chance:
                self.count(fault)
                self._trace.append((self.clock.now, fault, link.channel.owner, frame))
                self._mistreat(link, frame, fault, seconds, upwards=upwards)
                return
            fate -= chance
        self._pass(link, frame, seconds, upwards=upwards)

    def _mistreat(self, link: Link, frame: bytes, fault: str, seconds: float, *, upwards: bool) -> None:
        late = seconds + self._rng.random() * self.weather.longest_delay
        if fault == "doubled":
            self._pass(link, frame, seconds, upwards=upwards)
            self._pass(link, frame, late, upwards=upwards, in_order=False)
        elif fault == "delayed":
            self._pass(link, frame, late, upwards=upwards)
        elif fault == "reordered":
            self._pass(link, frame, late, upwards=upwards, in_order=False)
        elif fault == "corrupted":
            self._pass(link, corrupt(frame, self._rng), seconds, upwards=upwards)

    def _pass(self, link: Link, frame: bytes, seconds: float, *, upwards: bool, in_order: bool = True) -> None:
        when = self.clock.now + seconds
        if upwards:
            if in_order:
                when = link.up = max(when, link.up)
            self.clock.at(when, self._arrive_there, link, frame)
        else:
            if in_order:
                when = link.down = max(when, link.down)
            self.clock.at(when, self._arrive_here, link, frame)

    def _arrive_there(self, link: Link, frame: bytes) -> None:
        if link.open_there:
            self.server.receive(link, frame)

    def _arrive_here(self, link: Link, frame: bytes) -> None:
        if link.open_here:
            self._trace.append((self.clock.now, "to member", link.channel.owner, frame))
            link.channel.inbox.append(frame)
            link.channel.owner.delivered(link.channel)


def corrupt(frame: bytes, rng: random.Random) -> bytes:
    """Damages a frame where any receiver must notice it."""
    if rng.random() < 0.4:
        return frame[: rng.randrange(len(frame))]
    # Magic, version, or a length of the header beyond its limit.
    place = rng.choice((0, 1, 2, 3, 7))
    return frame[:place] + bytes((frame[place] ^ rng.randrange(1, 256),)) + frame[place + 1 :]


class SimulatedServer:
    """Drives a real dispatcher as `server/network/service.py` does, through lives and naps."""

    def __init__(self, clock: Clock, network: Network, rng: random.Random, trace: Trace) -> None:
        self.up = False
        self.lives = 0
        self.outages: list[list[float]] = []
        self.on_receive: Callable[[Any, bytes], None] = lambda _owner, _frame: None
        self.on_answer: Callable[[bytes], None] | None = None
        self.on_start: Callable[[], None] = lambda: None
        self.on_tick: Callable[[], None] = lambda: None
        self.dispatcher: Dispatcher
        self._clock, self._network, self._rng, self._trace = clock, network, rng, trace
        # End of the current nap, and the frames that arrived in it.
        self._awake_at = 0.0
        self._backlog: list[Callable[[], None]] | None = None
        self._probing = ProbeScheduler()
        network.server = self

    def start(self) -> None:
        self.up = True
        self.lives += 1
        self._awake_at = 0.0
        self._backlog = None
        self._probing = ProbeScheduler()
        self._trace.append((self._clock.now, "server starts"))
        self.on_start()
        self.dispatcher = Dispatcher(self._rng.randbytes(8), self._clock.now, QUOTA)
        if self.outages:
            self.outages[-1][1] = self._clock.now
        self._clock.after(TICK_SECONDS, self._tick, self.lives)
        self._network.server_back()

    def kill(self) -> None:
        self._trace.append((self._clock.now, "server killed"))
        self._vanish()

    def stop(self) -> None:
        """As on SIGTERM: the last answers have a moment to leave."""
        self._trace.append((self._clock.now, "server stopped"))
        self.up = False
        self._clock.after(10 * self._network.weather.latency, self._vanish)

    def nap(self, seconds: float) -> None:
        """The whole process stands still; frames queue."""
        self._trace.append((self._clock.now, "server naps", seconds))
        if self._backlog is None:
            self._backlog = []
        self._awake_at = max(self._awake_at, self._clock.now + seconds)
        self._clock.at(self._awake_at, self._wake_up, self.lives)

    def receive(self, link: Link, frame: bytes) -> None:
        if not self.up:
            return
        if self._backlog is not None:
            self._backlog.append(lambda: self._process(link, frame))
        else:
            self._process(link, frame)

    def disconnected(self) -> None:
        if not self.up:
            return
        if self._backlog is not None:
            self._backlog.append(self.disconnected)
            return
        before = self._probing.due
        self._probing.record_disconnect(self._clock.now)
        if self._probing.due < before:
            self._clock.at(self._probing.due, self._probe, self.lives)

    def _vanish(self) -> None:
        self.up = False
        self._backlog = None
        self.outages.append([self._clock.now, float("inf")])
        self._network.server_gone()

    def _process(self, link: Link, frame: bytes) -> None:
        self._trace.append((self._clock.now, "to server", link.channel.owner, frame))
        self.on_receive(link.channel.owner, frame)
        self._send(self.dispatcher.receive(self._clock.now, link.peer, frame).replies)

    def _wake_up(self, life: int) -> None:
        if life != self.lives or self._backlog is None or self._clock.now < self._awake_at:
            return
        backlog, self._backlog = self._backlog, None
        for action in backlog:
            action()

    def _tick(self, life: int) -> None:
        if life != self.lives or not self.up:
            return
        if self._backlog is None:
            self._send(self.dispatcher.tick(self._clock.now))
            self.on_tick()
        self._clock.after(TICK_SECONDS, self._tick, life)

    def _probe(self, life: int) -> None:
        if life != self.lives or not self.up:
            return
        if self._backlog is not None:
            self._backlog.append(lambda: self._probe(life))
            return
        if self._probing.start_if_due(self._clock.now):
            if self._probing.due < math.inf:
                self._clock.at(self._probing.due, self._probe, life)
            self._try(self.dispatcher.probes(self._probing.disconnected))

    def _try(self, probes: Iterable[tuple[bytes, bytes]]) -> None:
        # Sorted, because the order of a set differs between processes.
        for peer, frame in sorted(probes):
            self._deliver(peer, frame)

    def _send(self, replies: Iterable[tuple[bytes, bytes]]) -> None:
        deliver = self._deliver
        for peer, frame in replies:
            deliver(peer, frame)

    def _deliver(self, peer: bytes, frame: bytes) -> None:
        if self.on_answer:
            self.on_answer(frame)
        if not self._network.answer(peer, frame):
            self._try(self.dispatcher.unreachable(self._clock.now, peer))


_decode_cached = functools.lru_cache(maxsize=64)(decode)


def decode_once(frame: bytes) -> Message:
    """Decodes a frame once for all its receivers, since messages are immutable."""
    message = _decode_cached(frame)
    # Except for a Failure, whose fields are a mutable dict.
    return decode(frame) if type(message) is Failure else message


def is_sound(frame: bytes) -> bool:
    try:
        decode_once(frame)
    except StatsdBNError:
        return False
    return True


class SimulatedSession(Session):
    """A session that shares decoded frames with the other sessions of its world."""

    decode = staticmethod(decode_once)
