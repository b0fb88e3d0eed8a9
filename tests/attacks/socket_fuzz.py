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
from attacks.honest import Workers
from attacks.peers import LONG, MORE, Peers, framed, greeting, handshake, ready
from attacks.servers import Attacked
from fuzzing.fuzz_target import JOBS, SOUND, TOKENS
from server.secrets.keygen import generate
from statsd_bn.errors import ServerUnreachable
from statsd_bn.messages import StatusRequest
from statsd_bn.wire import encode

CONNECTIONS = 100

# Where a connection's mark goes; a mark never looks like hexadecimal, and never like this.
NO_MARK = b"000000"
MARK = re.compile(rb"[g-w][0-9a-f]{5}")

# What a ROUTER that nobody has seeded gives first.
UNSEEDED = 0x6B8B4567

# Bursts that are made before, each of so many frames at most; a connection says a part of one.
BURSTS, BURST = 48, 3000

# Which part of a burst is no sound frame.
CHANGES = (0.005, 0.005, 0.005, 0.65)

# How much is sent at a time, and how long a connection may have nothing to say or to hear.
CHUNK = 65_536
QUIET_SECONDS, HANDSHAKE_SECONDS = 2.0, 1.0

# Connections that say nothing, or half of a greeting, at a time.
HALF_OPEN = 20

# The server's greeting and READY have more than this.
READY_BYTES = 80

# The part of connections that end without hearing their answers, and by a reset.
BROKEN = 0.2

# How many frames may be on their way to the server: what it has not come to read is not played yet.
AHEAD = 50_000

# The server would let so many new connections wait; this is about what they say.
UNHINDERED = ("--max-new-connections", str(2**20), "--connections-per-second", str(2**20))

# A round beside such a flood may take long, and no longer.
SECONDS_FOR_EACH_MILLION = 600


class Fuzzed(AssertionError):
    """The server did what it must not."""


@dataclass
class Tally:
    """What was played.

    Attributes:
        frames: that were sent, of which some were lost in connections that broke.
        reached: that the server has read from its socket, as it says itself, but for those of connections that it
            was about to end, which it does not count.
        dropped: of these, that it had no time for, because others had a right to it; all others it has looked at.
        lives: how many connections there were.
        answered: how many bytes came back.
        rounds: of the honest job beside it.
        seconds: how long it took.
    """

    frames: int = 0
    reached: int = 0
    dropped: int = 0
    lives: int = 0
    answered: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.frames} frames over {self.lives} connections in {self.seconds:.0f} s; {self.reached} reached the "
            f"server ({self.reached / max(self.seconds, 1e-9):.0f} in a second), which looked at "
            f"{self.reached - self.dropped}; {self.answered} bytes came back, and the honest job had {self.rounds} "
            "rounds"
        )


def templates() -> list[bytes]:
    """Sound frames with room for a mark in the job's name and the session."""
    found = []
    for frame in SOUND:
        if frame == encode(StatusRequest()):
            continue  # without keys it tells of all jobs
        marked = frame
        for number, token in enumerate(TOKENS):
            marked = marked.replace(token, bytes([64 + number]) + b"-" + NO_MARK)
        for job in JOBS:
            marked = marked.replace(job.encode(), b"e" * (len(job) - len(NO_MARK)) + NO_MARK)
        found.append(marked)
    return found


def changed(frame: bytes, chance: random.Random) -> bytes:
    """A frame with some of its bytes changed, cut or repeated; the mark stays, or several would have the same."""
    found = bytearray(frame)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        found[chance.randrange(len(found))] = chance.randrange(256)
    if found.count(NO_MARK) < frame.count(NO_MARK):
        return frame
    cut = chance.random()
    if cut < 0.1:
        return bytes(found[: chance.randrange(len(found))])
    return bytes(found) * 2 if cut < 0.13 else bytes(found)


def random_frames(chance: random.Random, number: int) -> list[bytes]:
    """Frames as a connection may say them, one after the other; in most lists few are changed.

    A connection with many that make no sense is soon ended, and the rest of them is not looked at.
    """
    changes = chance.choice(CHANGES)
    sound = templates()
    frames = []
    for _ in range(number):
        what = chance.random()
        if what > changes:
            frames.append(chance.choice(sound))
        elif what < 0.85 * changes:
            frames.append(changed(chance.choice(sound), chance))
        else:
            frames.append(chance.randbytes(chance.choice((0, 1, 8, 40, 300))))
    return frames


@dataclass(slots=True)
class Burst:
    """Frames as bytes of ZMTP, and where each of them ends."""

    data: bytes
    ends: list[int]

    @classmethod
    def random(cls, chance: random.Random) -> "Burst":
        parts, ends, size = [], [], 0
        for frame in random_frames(chance, chance.randrange(1, BURST)):
            flags = chance.choice((0,) * 40 + (MORE, LONG))
            parts.append(framed(frame, flags))
            size += len(parts[-1])
            ends.append(size)
        return cls(b"".join(parts), ends)


def identities(chance: random.Random, lives: int) -> tuple[bytes, ...]:
    """The routing ids that a handshake names: none, one or two."""
    kinds = (
        (),
        (),
        (chance.randbytes(chance.randrange(1, 20)),),
        (b"\0" + struct.pack(">I", (UNSEEDED + lives + chance.randrange(-50, 200)) % 2**32),),
        (chance.choice((b"one", b"two", b"three")),),
        (b"i" * 255,),
        (chance.randbytes(5), b"\0" + chance.randbytes(4)),
        (b"\0",),
    )
    return chance.choice(kinds)


def beginning(chance: random.Random, lives: int) -> bytes:
    """The handshake of a connection, sound or not."""
    what = chance.random()
    kind = chance.choice((b"DEALER",) * 6 + (b"REQ", b"ROUTER", b"PUB"))
    if what < 0.9:
        return handshake(*identities(chance, lives), kind=kind)
    if what < 0.93:
        return greeting(chance.choice((b"CURVE", b"PLAIN", b"GSSAPI", b"")), chance.randrange(256)) + ready([])
    if what < 0.96:
        found = bytearray(handshake())
        found[chance.randrange(len(found))] = chance.randrange(256)
        return bytes(found)
    return chance.randbytes(chance.randrange(200))


@dataclass
class Life:
    """A connection, what it still has to say, and what it was told."""

    socket: socket.socket
    mark: bytes
    data: memoryview
    ends: list[int]
    offset: int
    until: float
    is_patient: bool
    sent: int = 0
    heard: int = 0
    tail: bytes = b""

    @property
    def may_say(self) -> int:
        """How much it may send by now: ZeroMQ ends a connection that goes on before both sides are READY."""
        return len(self.data) if self.heard >= READY_BYTES or not self.is_patient else self.offset

    def frames(self) -> int:
        """How many of its frames have gone, all their bytes."""
        return bisect_right(self.ends, self.sent - self.offset)


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
        """Plays until so many frames have reached the server.

        Raises:
            Fuzzed: somebody is told what is another's, or the server ends.
        """
        last = time.monotonic() + 60 + SECONDS_FOR_EACH_MILLION * frames / 1e6
        try:
            while self.look() < frames:
                if time.monotonic() > last:
                    raise Fuzzed("the server takes nothing any more")
                most = self.tally.frames + AHEAD
                while self.tally.frames < most and time.monotonic() < last:
                    while len(self._lives) < CONNECTIONS:
                        self._open()
                    self._turn()
        finally:
            for life in list(self._lives.values()):
                self._end(life)
            for one in self._half_open:
                one.close()
            self._poll.close()

    def look(self) -> int:
        """How many frames have reached the server; waits until it has come to most of those that were sent."""
        while True:
            if self.server.ending:
                raise Fuzzed(f"the server was ended by {self.server.ending}\n{self.server.said()[-2000:]}")
            before = self.tally.reached
            self._ask()
            if self.tally.reached - before < AHEAD // 50:
                return self.tally.reached

    def _ask(self) -> None:
        report = self._report()
        self.tally.dropped = int(report["dropped_messages"])
        self.tally.reached = int(report["received"]) + self.tally.dropped

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
            burst.ends,
            len(first),
            time.monotonic() + QUIET_SECONDS,
            chance.random() > 0.05,
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
        if life.heard < READY_BYTES <= life.heard + len(data):
            self._poll.modify(life.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
        life.heard += len(data)
        self.check(life.mark, life.tail + data)
        life.tail = data[-len(NO_MARK) :]
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
            if life.sent < len(life.data):
                life.until = now + HANDSHAKE_SECONDS
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
    last = time.monotonic() + 60 + SECONDS_FOR_EACH_MILLION * frames / 1e6
    with Peers(fuzz.server) as peers:
        while fuzz.look() < frames:
            fuzz.tally.frames += _lives_with_keys(fuzz, peers, pool, chance)
            if time.monotonic() > last:
                raise Fuzzed("the server takes nothing any more")


def _lives_with_keys(fuzz: Fuzz, peers: Peers, pool: list[list[bytes]], chance: random.Random) -> int:
    """A hundred connections from beginning to end; returns how many frames they have sent."""
    done = 0
    there = []
    for _ in range(CONNECTIONS):
        name = b"".join(identities(chance, fuzz.tally.lives)[:1])
        peer = peers.open(name)
        there.append((peer, fuzz.mark(), chance.choice(pool)))
    fuzz.tally.lives += len(there)
    for start in range(0, BURST // 4, 100):
        for peer, mark, frames in there:
            part = [frame.replace(NO_MARK, mark) for frame in frames[start : start + 100]]
            done += _say(peer.socket, part)
            _hear(fuzz, peer.socket, mark)
    for peer, mark, _ in there:
        _hear(fuzz, peer.socket, mark)
        peer.close()
    peers.all.clear()
    return done


def _say(plain: "zmq.Socket[bytes]", frames: list[bytes]) -> int:
    done = 0
    for frame in frames:
        try:
            plain.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            plain.poll(20, zmq.POLLOUT)
            continue
        done += 1
    return done


def _hear(fuzz: Fuzz, plain: "zmq.Socket[bytes]", mark: bytes) -> None:
    while True:
        try:
            data = b"".join(plain.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return
        fuzz.tally.answered += len(data)
        fuzz.check(mark, data)


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
        with servers.attacked(folder, *UNHINDERED, with_keys=with_keys) as server:
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
    """Plays nine tenths of the frames without keys, and a tenth with keys; says what was played."""
    workers = Workers()
    try:
        for with_keys, share in ((False, frames - frames // 10), (True, frames // 10)):
            tally = fuzz_socket(share, seed, with_keys=with_keys, workers=workers)
            os.write(1, f"through the socket, {'with' if with_keys else 'without'} keys: {tally}\n".encode())
    finally:
        workers.close()
