"""Members and a master without sockets, threads or a clock; real sessions exchange frames with a real dispatcher."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from client.session.protocol.member import Member
from client.session.protocol.session import Session
from server.core.dispatcher import Dispatcher
from server.core.liveness import RECONNECT_SECONDS
from statsd_bn.errors import StatsdBNError, UnknownSession
from statsd_bn.messages import Aggregate, Pending, Registered
from statsd_bn.reduction import Rows
from statsd_bn.round_key import BACKWARD, RoundKey


def rows_of(*values: float) -> Rows:
    """Rows with a replica for each value, of one vector and one channel."""
    return Rows((1,) * len(values), np.reshape(np.array(values), (-1, 1, 1)))


class PureMember:
    def __init__(self, world: "PureWorld", number: int, life: int, **given: object) -> None:
        who = Member("job", "world", 0, number, world.world_size, 60.0, f"place {number}", world.min_members)
        self.session = Session(b"%04d%04d" % (life, number), replace(who, **given))
        self.number = number
        self.answers: list[object] = []
        self.registered: Registered | None = None
        self.key: RoundKey | None = None
        self._world = world

    def register(self) -> None:
        self.answers.clear()
        self._world.send(self, self.session.register())

    def forward(self, *values: float, layer: str = "bn") -> None:
        """Contributes to the next forward round of a layer."""
        self.contribute(self.session.forward_key(layer), *values)

    def backward(self, *values: float) -> None:
        """Contributes to the backward round of its latest forward round."""
        self.contribute(self.key.of_phase(BACKWARD), *values)

    def contribute(self, key: RoundKey, *values: float, attempt: int = 0) -> None:
        self.key, self.rows, self.attempt = key, rows_of(*values), attempt
        self.answers.clear()
        self.session.steps.record_phase(key.phase)
        self._world.send(self, self.session.contribution(key, self.rows, attempt))

    def ask_again(self) -> None:
        self.attempt += 1
        self._world.send(self, self.session.contribution(self.key, self.rows, self.attempt))

    def receive(self, frame: bytes) -> None:
        """Handles a frame like a round trip and records the answer; after an error it ignores further frames."""
        if self.answers and isinstance(self.answers[-1], StatsdBNError):
            return
        try:
            answer = self.session.answer(self.key, frame) if self.key else None
            self.registered = self.session.registered(frame) or self.registered
        except UnknownSession:
            self.introduce()
            self.ask_again()
        except StatsdBNError as error:
            self.answers.append(error)
        else:
            self.answers += [answer] if answer else []

    def introduce(self) -> None:
        for frame in self.session.resync_frames():
            self._world.send(self, frame)

    def latest(self, kind: type) -> object:
        """The latest answer; asserts its type."""
        assert self.answers, "no answer"
        assert isinstance(self.answers[-1], kind), self.answers[-1]
        return self.answers[-1]

    @property
    def total(self) -> tuple[list[int], float]:
        """The members in the latest aggregate, and the first value of its sum."""
        answer = self.latest(Aggregate)
        return list(answer.members), float(answer.values[0, 0])

    @property
    def is_answered(self) -> bool:
        """Whether the latest round of this member has its aggregate."""
        return bool(self.answers) and isinstance(self.answers[-1], Aggregate) and self.answers[-1].key == self.key

    @property
    def pending(self) -> Pending:
        return self.latest(Pending)


def forward(members: Iterable[PureMember], *values: float) -> None:
    """Each member contributes the same values to its next forward round."""
    for member in members:
        member.forward(*values)


def backward(members: Iterable[PureMember], *values: float) -> None:
    """Each member contributes the same values to the backward round of its latest forward round."""
    for member in members:
        member.backward(*values)


class PureWorld:
    """Members, and a master that can be restarted; `now` is the time."""

    def __init__(self, world_size: int, min_members: int = 0, **given: object) -> None:
        self.world_size, self.min_members = world_size, min_members
        self.now = 0.0
        self.lives = 0
        self.silent: set[PureMember] = set()
        self.members: list[PureMember] = []
        self.restart()
        for number in range(world_size):
            self.join(number, **given)

    def join(self, number: int, **given: object) -> PureMember:
        member = PureMember(self, number, len(self.members), **given)
        self.members.append(member)
        member.register()
        return member

    def restart(self) -> None:
        """Replaces the master by a new one without state."""
        self.lives += 1
        self.dispatcher = Dispatcher(b"server%02d" % self.lives, self.now)

    def send(self, member: PureMember, frame: bytes) -> None:
        self._deliver(self.dispatcher.receive(self.now, member.session.member_token, frame).replies)

    def pass_time(self, seconds: float) -> None:
        """Advances the clock, with heartbeats of all members that are not silent."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            for member in self.members:
                if member not in self.silent:
                    answers = self.dispatcher.receive(
                        self.now, member.session.member_token, member.session.heartbeat()
                    ).replies
                    for _, answer in answers:
                        for frame in member.session.on_unsolicited(answer):
                            self.send(member, frame)
            self._deliver(self.dispatcher.tick(self.now))

    def kill(self, *members: PureMember) -> None:
        self.silent.update(members)
        for member in members:
            self.dispatcher.unreachable(self.now, member.session.member_token)
        self.pass_time(RECONNECT_SECONDS + 0.25)

    def _deliver(self, replies: list[tuple[bytes, bytes]]) -> None:
        alive = {member.session.member_token: member for member in self.members if member not in self.silent}
        for to, frame in replies:
            if to in alive:
                alive[to].receive(frame)
