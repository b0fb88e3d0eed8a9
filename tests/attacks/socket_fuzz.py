"""Fuzzes a real server through its socket: connections, routing ids, orders, breaks and half-open handshakes.

A hundred connections at a time, each with a mark of its own in all that it says. Nothing that comes back may have the
mark of another one; the server must neither end nor raise; and beside all this an honest job is held to its bits.
"""

import os
import random
import re
import select
import socket
import struct
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from attacks import servers
from attacks.fuzz_frames import (
    BETWEEN_FENCES,
    BURST,
    FENCE,
    FENCE_ANSWER,
    NO_MARK,
    Burst,
    beginning,
    identities,
    random_frames,
)
from attacks.honest import Workers
from attacks.peers import Peers, handshake
from attacks.servers import Attacked
from server.secrets.keygen import generate
from statsd_bn.errors import ServerUnreachable

CONNECTIONS = 100

# What a connection has in place of NO_MARK: never hexadecimal, and never like that.
MARK = re.compile(rb"[g-w][0-9a-f]{5}")

# Bursts that are made before.
BURSTS = 48

# How much is sent at a time, and how long a connection may have nothing to say or to hear.
CHUNK = 65_536
QUIET_SECONDS, HANDSHAKE_SECONDS = 2.0, 1.0

# Connections that say nothing, or half of a greeting, at a time.
HALF_OPEN = 20

# The server's greeting and READY have more than this.
READY_BYTES = 80

# The part of connections that end without hearing their answers, and by a reset.
BROKEN = 0.2

# The part of connections that wait for no answer to a fence: the server drops most of what they say.
GREEDY = 0.05

# The part of connections with a key that set a routing id.
CLAIMS = 0.1

# How often the server is asked for its counts, and how long no connection with a key may hear anything.
LOOK_SECONDS, SILENT_SECONDS = 0.5, 0.2

# A server that looks at fewer frames than 500 in a second takes nothing any more.
SECONDS_FOR_EACH_MILLION = 2000


class Fuzzed(AssertionError):
    """The server did what it must not."""


@dataclass
class Tally:
    """What was played.

    Attributes:
        frames: that were sent, of which some were lost in connections that broke.
        looked_at: that the server has decoded, as it says itself, those of the honest job as well.
        dropped: that the server has read and had no time for, because others had a right to it.
        lives: how many connections there were.
        answered: how many bytes came back.
        rounds: of the honest job beside it.
        seconds: how long it took.
    """

    frames: int = 0
    looked_at: int = 0
    dropped: int = 0
    lives: int = 0
    answered: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.frames} frames over {self.lives} connections in {self.seconds:.0f} s; the server looked at "
            f"{self.looked_at} ({self.looked_at / max(self.seconds, 1e-9):.0f} in a second) and dropped "
            f"{self.dropped}; {self.answered} bytes came back, and the honest job had {self.rounds} rounds"
        )


@dataclass
class Life:
    """A connection, what it still has to say, and what it was told."""

    socket: socket.socket
    mark: bytes
    data: memoryview
    burst: Burst
    offset: int
    until: float
    is_patient: bool
    is_greedy: bool
    sent: int = 0
    heard: int = 0
    passed: int = 0
    tail: bytes = b""

    @property
    def may_say(self) -> int:
        """How much it may send by now: up to the first fence whose answer it has not heard.

        ZeroMQ ends a connection that goes on before both sides are READY.
        """
        if self.heard < READY_BYTES and self.is_patient:
            return self.offset
        fences = self.burst.fences
        if self.is_greedy or self.passed >= len(fences):
            return len(self.data)
        return min(len(self.data), self.offset + fences[self.passed])

    def hear(self, data: bytes) -> bytes:
        """Takes note of what came, and returns it with the end of what came before."""
        self.heard += len(data)
        data = self.tail + data
        self.passed += data.count(FENCE_ANSWER)
        # Less than an answer, so that none counts twice.
        self.tail = data[1 - len(FENCE_ANSWER) :]
        return data

    def frames(self) -> int:
        """How many of its frames have gone, all their bytes."""
        return bisect_right(self.burst.ends, self.sent - self.offset)


@dataclass
class Fuzz:
    """Connections to a server.

    Args:
        server: the attacked one.
        seed: what all chance comes from.
    """

    server: Attacked
    seed: int
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._bursts = [Burst.random(self._chance) for _ in range(BURSTS)]
        self._marks: set[bytes] = set()
        self._lives: dict[int, Life] = {}
        self._half_open: list[socket.socket] = []
        self._poll = select.epoll()

    def play(self, frames: int) -> None:
        """Plays until the server has looked at so many frames.

        Raises:
            Fuzzed: somebody is told what is another's, or the server ends.
        """
        try:
            for _ in self.looks(frames):
                until = time.monotonic() + LOOK_SECONDS
                while time.monotonic() < until:
                    while len(self._lives) < CONNECTIONS:
                        self._open()
                    self._turn()
        finally:
            for life in list(self._lives.values()):
                self._end(life)
            for one in self._half_open:
                one.close()
            self._poll.close()

    def looks(self, frames: int) -> Iterator[None]:
        """Goes on until the server has looked at so many frames."""
        last = time.monotonic() + 60 + SECONDS_FOR_EACH_MILLION * frames / 1e6
        while self._look() < frames:
            if time.monotonic() > last:
                raise Fuzzed(f"the server takes nothing any more: {self.tally}")
            yield

    def _look(self) -> int:
        if self.server.ending:
            raise Fuzzed(f"the server was ended by {self.server.ending}\n{self.server.said()[-2000:]}")
        report = self._report()
        self.tally.dropped, self.tally.looked_at = int(report["dropped_messages"]), int(report["received"])
        return self.tally.looked_at

    def _report(self) -> dict[str, Any]:
        # An asker may come over a port that is not free yet, as everybody may.
        for _ in range(2):
            with suppress(ServerUnreachable):
                return self.server.report(seconds=5.0)
        return self.server.report(seconds=10.0)

    def mark(self) -> bytes:
        """A mark that no other connection has had."""
        while True:
            found = self._chance.choice(b"ghijklmnopqrstuvw").to_bytes() + b"%05x" % self._chance.randrange(2**20)
            if found not in self._marks:
                self._marks.add(found)
                return found

    def check(self, mark: bytes, data: bytes) -> None:
        """Raises Fuzzed if an answer has the mark of another connection."""
        found = {each for each in MARK.findall(data) if each != mark and each in self._marks}
        if found:
            place = data.index(min(found))
            raise Fuzzed(f"connection {mark!r} was told of {found}: {data[max(0, place - 200) : place + 200]!r}")

    def _open(self) -> None:
        chance = self._chance
        plain = self._connect()
        if len(self._half_open) < HALF_OPEN and chance.random() < 0.2:
            with suppress(OSError):  # it is not there yet
                plain.send(handshake()[: chance.randrange(70)])
            self._half_open.append(plain)
            plain = self._connect()
        elif self._half_open and chance.random() < 0.2:
            self._half_open.pop(0).close()
        burst, first, mark = chance.choice(self._bursts), beginning(chance, self.tally.lives), self.mark()
        data = first + burst.data.replace(NO_MARK, mark)
        if chance.random() < 0.3:
            data = data[: chance.randrange(len(data))]
        life = Life(
            plain,
            mark,
            memoryview(data),
            burst,
            len(first),
            time.monotonic() + QUIET_SECONDS,
            is_patient=chance.random() > 0.05,
            is_greedy=chance.random() < GREEDY,
        )
        self._lives[plain.fileno()] = life
        self._poll.register(plain.fileno(), select.EPOLLIN | select.EPOLLOUT)
        self.tally.lives += 1

    def _connect(self) -> socket.socket:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK)
        plain.settimeout(0.0)
        # One that waits long, such as for a port that was reset, is to hold up nobody else.
        plain.connect_ex(("127.0.0.1", self.server.port))
        return plain

    def _turn(self) -> None:
        now = time.monotonic()
        for number, events in self._poll.poll(0.1):
            life = self._lives[number]
            if events & select.EPOLLIN and not self._hear(life):
                continue
            if events & (select.EPOLLERR | select.EPOLLHUP):
                self._end(life)
            elif events & select.EPOLLOUT:
                self._say(life, now)
        for life in [one for one in self._lives.values() if one.until < now]:
            self._end(life)

    def _hear(self, life: Life) -> bool:
        try:
            data = life.socket.recv(4 * CHUNK)
        except OSError:  # the server has cut it, or it has ended
            data = b""
        if not data:
            self._end(life)
            return False
        self.tally.answered += len(data)
        before = life.may_say
        self.check(life.mark, life.hear(data))
        if life.may_say > before:
            self._poll.modify(life.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
        return True

    def _say(self, life: Life, now: float) -> None:
        try:
            life.sent += life.socket.send(life.data[life.sent : min(life.may_say, life.sent + CHUNK)])
        except BlockingIOError:
            return
        except OSError:
            self._end(life)
            return
        life.until = now + QUIET_SECONDS
        if life.sent == life.may_say:
            self._poll.modify(life.socket.fileno(), select.EPOLLIN)
            if life.sent == life.offset < len(life.data):
                life.until = now + HANDSHAKE_SECONDS
            elif life.sent < len(life.data):
                pass  # it waits for the answer to a fence
            elif self._chance.random() < BROKEN:
                life.until = now + self._chance.choice((0.0, 0.05))
            else:
                # Closed at once, with answers unread, it would be reset, and what it said be lost.
                with suppress(OSError):  # the server was faster
                    life.socket.shutdown(socket.SHUT_WR)

    def _end(self, life: Life) -> None:
        self.tally.frames += life.frames()
        del self._lives[life.socket.fileno()]
        self._poll.unregister(life.socket.fileno())
        if self._chance.random() < BROKEN:
            # As a host that vanishes: with a reset.
            life.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        life.socket.close()


def play_with_keys(fuzz: Fuzz, frames: int) -> None:
    """As `Fuzz.play` over connections with a key, by ZeroMQ's own sockets."""
    chance = random.Random(fuzz.seed + 1)
    pool = [random_frames(chance, BURST // 4) for _ in range(BURSTS // 4)]
    with Peers(fuzz.server) as peers:
        parts = _parts_with_keys(fuzz, peers, pool, chance)
        for _ in fuzz.looks(frames):
            next(parts)


def _parts_with_keys(fuzz: Fuzz, peers: Peers, pool: list[list[bytes]], chance: random.Random) -> Iterator[None]:
    """Goes on for ever: what a hundred connections say until a fence, from their beginning to their end."""
    while True:
        yield from _lives_with_keys(fuzz, peers, pool, chance)


def _lives_with_keys(fuzz: Fuzz, peers: Peers, pool: list[list[bytes]], chance: random.Random) -> Iterator[None]:
    there: dict[zmq.Socket[bytes], bytes] = {}
    for _ in range(CONNECTIONS):
        # With a key a routing id is no more than a reason to be cut off.
        name = b"".join(identities(chance, fuzz.tally.lives)[:1]) if chance.random() < CLAIMS else b""
        there[peers.open(name).socket] = fuzz.mark()
    said = [chance.choice(pool) for _ in there]
    fuzz.tally.lives += len(there)
    for start in range(0, BURST // 4, BETWEEN_FENCES):
        for (plain, mark), frames in zip(there.items(), said, strict=True):
            part = [frame.replace(NO_MARK, mark) for frame in frames[start : start + BETWEEN_FENCES]]
            fuzz.tally.frames += _say(plain, [*part, FENCE])
        _hear(fuzz, there)
        yield
    for peer in peers.all:
        peer.close()
    peers.all.clear()


def _say(plain: "zmq.Socket[bytes]", frames: list[bytes]) -> int:
    """Returns how many frames were sent: those of a connection that was cut off may have no room."""
    for number, frame in enumerate(frames):
        try:
            plain.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return number
    return len(frames)


def _hear(fuzz: Fuzz, there: dict["zmq.Socket[bytes]", bytes]) -> None:
    """Takes in the answers, until each connection has that to its fence, or nothing comes any more."""
    poller = zmq.Poller()
    for plain in there:
        poller.register(plain, zmq.POLLIN)
    behind = set(there)
    while behind and (events := poller.poll(1000 * SILENT_SECONDS)):
        for plain, _ in events:
            data = b"".join(plain.recv_multipart())
            fuzz.tally.answered += len(data)
            fuzz.check(there[plain], data)
            if FENCE_ANSWER in data:
                behind.discard(plain)


@contextmanager
def honest_bits(workers: Workers, server: Attacked, tally: Tally) -> Iterator[None]:
    """Runs the honest job, and raises Fuzzed if a bit of it is wrong, or it does not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        beside = workers.begin(server, Path(folder))
        try:
            yield
            played = beside.end()
        except BaseException:
            workers.begin_again()
            raise
    if faults := [one.problem or f"{one.wrong} wrong aggregates" for one in played if one.problem or one.wrong]:
        raise Fuzzed("; ".join(faults))
    tally.rounds = len(played[0].rounds)


def fuzz_socket(frames: int, seed: int, *, with_keys: bool, workers: Workers) -> Tally:
    """Plays so many frames to a server of its own.

    Raises:
        Fuzzed: the server ended or raised, or somebody was told what is another's.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if with_keys:
            generate(folder / "keys", ["alice"])
            generate(folder / "keys", ["bob"])
        with servers.attacked(folder, with_keys=with_keys) as server:
            fuzz = Fuzz(server, seed)
            began = time.monotonic()
            with honest_bits(workers, server, fuzz.tally):
                if with_keys:
                    play_with_keys(fuzz, frames)
                else:
                    fuzz.play(frames)
            fuzz.tally.seconds = time.monotonic() - began
            if server.ending or "Traceback" in server.said() or "Assertion" in server.said():
                raise Fuzzed(f"{server.ending}\n{server.said()[-4000:]}")
    return fuzz.tally


def main(frames: int, seed: int) -> None:
    """Plays until servers have looked at so many frames, a tenth of them with keys; says what was played."""
    workers = Workers()
    try:
        for with_keys, share in ((False, frames - frames // 10), (True, frames // 10)):
            tally = fuzz_socket(share, seed, with_keys=with_keys, workers=workers)
            os.write(1, f"through the socket, {'with' if with_keys else 'without'} keys: {tally}\n".encode())
    finally:
        workers.close()
