"""A play: bytes that stand for peers' frames to the pure server (mostly sound frames with changes) and for time."""

from collections.abc import Iterator

import numpy as np

from client.session.protocol.member import Member
from client.session.protocol.session import Session
from server.core.dispatcher import Dispatcher
from server.group.rounds import Reply
from statsd_bn import messages
from statsd_bn.members import Members
from statsd_bn.messages import digest
from statsd_bn.reduction import Rows
from statsd_bn.round_key import BACKWARD, GATHER, RoundKey
from statsd_bn.skew_samples import Sample
from statsd_bn.wire import decode, encode

# Longer plays find nothing that shorter ones do not.
MOST_TURNS = 64

JOBS = {"strict": 0, "elastic": 1}  # `min_members` of a strict job and of an elastic one
GROUP = "world"
WORLD = 2

PEERS = [bytes([number]) for number in range(8)]

SERVER, EARLIER = b"server-1", b"server-0"

SECONDS = (0.25, 1.0, 3.6, 40.0)


class Play:
    def __init__(self) -> None:
        self.dispatcher = Dispatcher(SERVER, 0.0)
        self.frames = 0
        self._now = 0.0
        self._life = 0
        self._register()

    def begin_again(self) -> None:
        """Passes time until all members are lost by their silence, and then registers new ones in new jobs."""
        self._life += 1
        for _ in range(20):
            self._now += SECONDS[0]
            self._check(self.dispatcher.tick(self._now))
        self._register()

    def run(self, data: bytes) -> None:
        source = iter(data)
        for _ in range(MOST_TURNS):
            turn = next(source, None)
            if turn is None:
                return
            self._turn(turn, source)

    def _turn(self, turn: int, source: Iterator[int]) -> None:
        what, who = turn >> 3, PEERS[turn & 7]
        if what < 4:
            self._now += SECONDS[what]
            self._check(self.dispatcher.tick(self._now))
        elif what == 4:
            self._check(self.dispatcher.unreachable(self._now, who))
        elif what == 5:
            self._check(self.dispatcher.probes(self._now))
        elif what == 6:
            self._receive(who, bytes(_take(source, next(source, 0))))
        else:
            frame = self._of_this_life(SOUND[next(source, 0) % len(SOUND)])
            self._receive(who, _changed(frame, source, changes=what & 3))

    def _register(self) -> None:
        for number, frame in enumerate(REGISTRATIONS):
            self._receive(PEERS[number], self._of_this_life(frame))

    def _of_this_life(self, frame: bytes) -> bytes:
        if self._life == 0:
            return frame
        for token in TOKENS:
            frame = frame.replace(token, token[:1] + self._life.to_bytes(7, "big"))
        for job in JOBS:
            frame = frame.replace(job.encode(), f"{self._life:0{len(job)}d}".encode())
        return frame

    def _receive(self, peer: bytes, frame: bytes) -> None:
        self.frames += 1
        self._check(self.dispatcher.receive(self._now, peer, frame).replies)

    def _check(self, replies: list[Reply]) -> None:
        for peer, frame in replies:
            if type(peer) is not bytes or not peer:
                raise AssertionError(f"expected a peer to answer, got {peer!r}")
            decode(frame)


def _changed(frame: bytes, source: Iterator[int], changes: int) -> bytes:
    found = bytearray(frame)
    for _ in range(changes):
        place = next(source, 0) << 8 | next(source, 0)
        found[place % len(found)] = next(source, 0)
    return bytes(found)


def _take(source: Iterator[int], size: int) -> Iterator[int]:
    for _ in range(size):
        each = next(source, None)
        if each is None:
            return
        yield each


def _sessions() -> list[Session]:
    members = [
        Member(job, GROUP, 0, member, WORLD, 30.0, "here", min_members)
        for job, min_members in JOBS.items()
        for member in range(WORLD)
    ]
    return [Session(bytes([number]) * 8, member) for number, member in enumerate(members, start=1)]


def _sound_frames() -> Iterator[bytes]:
    rows = Rows((2,), np.arange(6.0).reshape(1, 2, 3))
    yield encode(messages.StatusRequest())
    yield from (encode(messages.FiguresRequest(job, GROUP)) for job in JOBS)
    for session in _sessions():
        yield session.register()
        key = session.forward_key("bn")
        aggregate = messages.Aggregate(key, 2, 4, Members.of(range(WORLD)), rows.values[0])
        for attempt in (0, 1):
            yield session.contribution(key, rows, attempt)
        session.steps.record_phase(BACKWARD)
        yield session.contribution(key.of_phase(BACKWARD), rows)
        yield session.contribution(session.forward_key("bn"), rows)
        yield from _gather(session)
        yield session.heartbeat()
        for number in (1, 2):
            report = session.member_token, number, "train.py:1 main", number % 2, "0", Members.of([0, 1]), 7
            yield encode(messages.StackReport(*report))
        yield session.leave("")
        yield session.leave("it failed")
        yield _figures(session, key)
        yield encode(messages.RoundTrips(session.member_token, 500, (0, 3, *[0] * 22)))
        yield encode(messages.LatenessReport(session.member_token, 500, (0, 3, *[0] * 22)))
        yield encode(messages.NonFiniteRound(session.member_token, key, Members.of([0]), "1 of 3 channels (inf)"))
        if session.member.rank == 0:  # if each member could send it, few rounds would end in another way
            yield session.round_done(key)
        yield encode(messages.Result(session.member_token, aggregate))
        session.on_unsolicited(_registered(session))
        yield from session.resync_frames()


def _gather(session: Session) -> Iterator[bytes]:
    key = session.forward_key("bytes", GATHER)
    channels = 2 + session.member.rank
    yield session.contribution(key, Rows((0,), np.arange(float(channels)).reshape(1, 1, channels)))
    joined = messages.Aggregate(key, WORLD, 0, Members.of(range(WORLD)), np.arange(5.0).reshape(1, 5))
    yield encode(messages.Result(session.member_token, joined))


def _figures(session: Session, key: RoundKey) -> bytes:
    frame = session.skew_frame([Sample(key, np.full(WORLD, 2.0), np.arange(WORLD * 6.0).reshape(WORLD, 2, 3))])
    if frame is None:
        raise AssertionError("expected figures of a sample with data, got none")
    return frame


def _registered(session: Session) -> bytes:
    """A registration from an earlier life of the server."""
    return encode(messages.Registered(digest(session.member_token), EARLIER, 0, 0, 0, Members.of(range(WORLD))))


TOKENS = [session.member_token for session in _sessions()]
REGISTRATIONS = [session.register() for session in _sessions()]
SOUND = list(_sound_frames())
