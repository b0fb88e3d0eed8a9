"""Fuzz a server through marked connections: an answer has no other connection's mark, and an honest job stays exact."""

import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from attacks import servers
from attacks.fuzz_frames import BETWEEN_FENCES, BURST, FENCE, FENCE_ANSWER, NO_MARK, identities, random_frames
from attacks.honest import Workers
from attacks.peers import Peers
from attacks.servers import Attacked
from server.security.keygen import generate
from statsd_bn.errors import ServerUnreachable

CONNECTIONS = 100

# Marks that replace NO_MARK in a connection's frames; the first letter is not hexadecimal.
MARK = re.compile(rb"[g-w][0-9a-f]{5}")

# Bursts prepared in advance.
BURSTS = 12

# The share of connections that set a routing id.
CLAIMS = 0.1

# The wait without an answer that ends a burst.
SILENT_SECONDS = 0.2

# A server slower than 500 frames a second counts as stuck.
SECONDS_FOR_EACH_MILLION = 2000


class Fuzzed(AssertionError):
    """The server broke a rule."""


@dataclass
class Tally:
    frames: int = 0  # sent, some of them lost with their connections
    decoded: int = 0  # decoded by the server, the honest job's included
    lives: int = 0  # connections
    answer_bytes: int = 0  # bytes received
    rounds: int = 0  # of the honest job
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.frames} frames over {self.lives} connections in {self.seconds:.0f} s; the server looked at "
            f"{self.decoded} ({self.decoded / max(self.seconds, 1e-9):.0f} in a second); {self.answer_bytes} bytes "
            f"came back, and the honest job had {self.rounds} rounds"
        )


@dataclass
class Fuzz:
    server: Attacked
    seed: int
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._marks: set[bytes] = set()

    def until_decoded(self, frames: int) -> Iterator[None]:
        last = time.monotonic() + 60 + SECONDS_FOR_EACH_MILLION * frames / 1e6
        while self._count_decoded() < frames:
            if time.monotonic() > last:
                raise Fuzzed(f"the server reads no more frames: {self.tally}")
            yield

    def _count_decoded(self) -> int:
        if self.server.ending:
            raise Fuzzed(f"the server was ended by {self.server.ending}\n{self.server.log_text()[-2000:]}")
        report = self._report()
        self.tally.decoded = int(report["received"])
        return self.tally.decoded

    def _report(self) -> dict[str, Any]:
        # A request may fail: its connection may get a local port that an old connection still holds.
        for _ in range(2):
            with suppress(ServerUnreachable):
                return self.server.report(seconds=5.0)
        return self.server.report(seconds=10.0)

    def mark(self) -> bytes:
        while True:
            found = self._chance.choice(b"ghijklmnopqrstuvw").to_bytes() + b"%05x" % self._chance.randrange(2**20)
            if found not in self._marks:
                self._marks.add(found)
                return found

    def check(self, mark: bytes, data: bytes) -> None:
        found = {each for each in MARK.findall(data) if each != mark and each in self._marks}
        if found:
            place = data.index(min(found))
            raise Fuzzed(f"connection {mark!r} received {found}: {data[max(0, place - 200) : place + 200]!r}")


def play(fuzz: Fuzz, frames: int) -> None:
    """Sends until the server has decoded so many frames."""
    chance = random.Random(fuzz.seed + 1)
    pool = [random_frames(chance, BURST) for _ in range(BURSTS)]
    with Peers(fuzz.server) as peers:
        parts = _parts(fuzz, peers, pool, chance)
        for _ in fuzz.until_decoded(frames):
            next(parts)


def _parts(fuzz: Fuzz, peers: Peers, pool: list[list[bytes]], chance: random.Random) -> Iterator[None]:
    while True:
        yield from _lives(fuzz, peers, pool, chance)


def _lives(fuzz: Fuzz, peers: Peers, pool: list[list[bytes]], chance: random.Random) -> Iterator[None]:
    there: dict[zmq.Socket[bytes], bytes] = {}
    for _ in range(CONNECTIONS):
        # Only some connections set a routing id: the server may close one that does and has a key.
        name = b"".join(identities(chance, fuzz.tally.lives)[:1]) if chance.random() < CLAIMS else b""
        there[peers.open(name).socket] = fuzz.mark()
    bursts = [chance.choice(pool) for _ in there]
    fuzz.tally.lives += len(there)
    for start in range(0, BURST, BETWEEN_FENCES):
        for (plain, mark), frames in zip(there.items(), bursts, strict=True):
            part = [frame.replace(NO_MARK, mark) for frame in frames[start : start + BETWEEN_FENCES]]
            fuzz.tally.frames += _send(plain, [*part, FENCE])
        _receive_answers(fuzz, there)
        yield
    for peer in peers.all:
        peer.close()
    peers.all.clear()


def _send(plain: "zmq.Socket[bytes]", frames: list[bytes]) -> int:
    """Sends frames; returns the number sent, since a closed connection may have no room."""
    for number, frame in enumerate(frames):
        try:
            plain.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return number
    return len(frames)


def _receive_answers(fuzz: Fuzz, there: dict["zmq.Socket[bytes]", bytes]) -> None:
    """Reads answers until each connection has its fence's answer, or none arrived for `SILENT_SECONDS`."""
    poller = zmq.Poller()
    for plain in there:
        poller.register(plain, zmq.POLLIN)
    behind = set(there)
    while behind and (events := poller.poll(1000 * SILENT_SECONDS)):
        for plain, _ in events:
            data = b"".join(plain.recv_multipart())
            fuzz.tally.answer_bytes += len(data)
            fuzz.check(there[plain], data)
            if FENCE_ANSWER in data:
                behind.discard(plain)


@contextmanager
def honest_bits(workers: Workers, server: Attacked, tally: Tally) -> Iterator[None]:
    """Run the honest job; raise Fuzzed if a bit of it is wrong, or it does not finish."""
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


def fuzz_socket(frames: int, seed: int, workers: Workers) -> Tally:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for tenant in ("alice", "bob"):
            generate(folder / "keys", [tenant])
        with servers.attacked(folder, with_keys=True) as server:
            fuzz = Fuzz(server, seed)
            began = time.monotonic()
            with honest_bits(workers, server, fuzz.tally):
                play(fuzz, frames)
            fuzz.tally.seconds = time.monotonic() - began
            if server.ending or "Traceback" in server.log_text() or "Assertion" in server.log_text():
                raise Fuzzed(f"{server.ending}\n{server.log_text()[-4000:]}")
    return fuzz.tally


def main(frames: int, seed: int) -> None:
    workers = Workers()
    try:
        tally = fuzz_socket(frames, seed, workers)
        os.write(1, f"through the socket: {tally}\n".encode())
    finally:
        workers.close()
