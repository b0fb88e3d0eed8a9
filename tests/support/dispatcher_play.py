"""A dispatcher and its members without sockets; a test is a sequence of their messages."""

from typing import Any

from server.core.dispatcher import Dispatcher
from statsd_bn.messages import Failure, Leave, Message
from statsd_bn.reduction import Rows
from statsd_bn.round_key import RoundKey
from statsd_bn.wire import decode, encode
from support.strategies import KEY, contribution, register, session_of

SERVER = b"server-0"

Answers = dict[bytes, Message]


class Play:
    """A dispatcher and its members; each member of each job has its own peer id."""

    def __init__(self) -> None:
        self.now = 100.0
        self.dispatcher = Dispatcher(SERVER, self.now)

    def send(self, message: Message, at: bytes) -> Answers:
        return read(self.dispatcher.receive(self.now, at, encode(message)).replies)

    def join(self, member: int, world_size: int = 2, at: bytes = b"", **given: Any) -> Answers:
        registration = register(member, world_size, **given)
        return self.send(registration, at or peer(member, registration.job))

    def open(self, world_size: int = 2, **given: Any) -> None:
        for member in range(world_size):
            self.join(member, world_size, **given)

    def contribute(self, member: int, own_rows: Rows | float = 1.0, key: RoundKey = KEY, **given: Any) -> Answers:
        return self.send(contribution(member, own_rows, key, **given), peer(member, key.job))

    def leave(self, member: int, cause: str = "", job: str = "job") -> Answers:
        return self.send(Leave(session_of(member, job), cause), peer(member, job))

    @property
    def report(self) -> dict[str, Any]:
        return self.dispatcher.report(self.now)

    @property
    def groups(self) -> list[tuple[str, str, int]]:
        return [(group["job"], group["group"], group["epoch"]) for group in self.report["groups"]]


def read(replies: list[tuple[bytes, bytes]]) -> Answers:
    """The messages by peer; asserts that no peer gets two."""
    answers = {peer_id: decode(frame) for peer_id, frame in replies}
    assert len(answers) == len(replies)
    return answers


def peer(member: int, job: str = "job") -> bytes:
    return f"{job} {member}".encode()


def codes(answers: Answers) -> dict[bytes, str]:
    """The error code of each peer; asserts that every answer is a Failure."""
    assert all(isinstance(answer, Failure) for answer in answers.values())
    return {peer_id: answer.code for peer_id, answer in answers.items()}


def mismatches(answers: dict[Any, Message]) -> set[Any]:
    """The members with a message; asserts that each message is a mismatch error."""
    assert set(codes(answers).values()) <= {"mismatch"}, answers
    return set(answers)
