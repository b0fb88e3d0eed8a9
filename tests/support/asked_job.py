"""A job in virtual time on a server without a socket; its members answer stack requests."""

from server.core.dispatcher import Dispatcher
from server.network.service import TICK_SECONDS
from statsd_bn.members import Members
from statsd_bn.messages import Heartbeat, Message, Pending, StackReport, StackRequest, StatusRequest, digest
from statsd_bn.wire import decode, encode
from support.strategies import contribution, key, register, session_of

LINE = "torch/nn/parallel/distributed.py:1941 _sync_buffers, called from train.py:57 main"


class Process:
    """A process's answers: its stack, its collective's group and kind, and its launched operations (`of_GROUP`)."""

    def __init__(self, stack: str = "", held_in: str = "", kind: str = "", **launched: int) -> None:
        self.stack, self.held_in, self.kind, self.launched = stack, held_in, kind, launched


class Job:
    """A job on a ticking server: all members send heartbeats, and those in `processes` answer stack requests."""

    def __init__(self, world_size: int, **given) -> None:
        self.now = 100.0
        self.dispatcher = Dispatcher(b"server-0", self.now)
        self.size = world_size
        self.ranks: dict[str, tuple[int, ...] | range] = {"0": range(world_size)}
        self.processes: dict[int, Process] = {}
        self.requests: dict[int, list[tuple[float, str]]] = {member: [] for member in range(world_size)}
        self.inboxes: dict[int, list[Message]] = {member: [] for member in range(world_size)}
        for member in range(world_size):
            self.send(register(member, world_size, **given), b"%d" % member)
        self.beat()

    def send(self, message: Message, at: bytes) -> list[Message]:
        return [decode(frame) for _, frame in self.handle(message, at)]

    def handle(self, message: Message, at: bytes):
        return self.attend(self.dispatcher.receive(self.now, at, encode(message)).replies)

    def beat(self) -> None:
        for member in range(self.size):
            self.handle(Heartbeat(session_of(member)), b"beacon %d" % member)

    def contribute(self, member: int, where=None, attempt: int = 0) -> list[Message]:
        message = contribution(member, 1.0, where or key("bn1", step=3))
        return self.send(type(message)(message.session, message.key, attempt, message.rows), b"%d" % member)

    def pass_time(self, seconds: float) -> dict[int, Message]:
        answers = {}
        for tick in range(round(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            if tick % 4 == 0:  # about once a second
                self.beat()
            for peer, frame in self.attend(self.dispatcher.tick(self.now)):
                answers[int(peer)] = decode(frame)
        return answers

    def attend(self, replies):
        """Answer stack requests, keep other messages to heartbeat sockets in `inboxes`, and return the rest."""
        others = []
        for peer, frame in replies:
            if not peer.startswith(b"beacon "):
                others.append((peer, frame))
                continue
            member, message = int(peer[7:]), decode(frame)
            if isinstance(message, StackRequest):
                self.answer(member, message)
            else:
                self.inboxes[member].append(message)
        return others

    def answer(self, member: int, question: StackRequest) -> None:
        assert question.digest == digest(session_of(member))
        self.requests[member].append((self.now - 100.0, question.torch_group))
        if process := self.processes.get(member):
            group = question.torch_group or process.held_in
            launched = process.launched.get(f"of_{group}")
            what = (group, Members.of(self.ranks[group]), launched) if launched is not None else ("", Members.of(()), 0)
            place = process.stack, int(bool(process.held_in))
            answer = StackReport(session_of(member), question.number, *place, *what, process.kind)
            self.handle(answer, b"beacon %d" % member)

    def pending(self, member: int) -> Pending:
        (answer,) = self.contribute(member, attempt=1)
        assert isinstance(answer, Pending)
        return answer

    def report(self) -> dict:
        (answer,) = self.send(StatusRequest(), b"somebody")
        return answer.report["groups"][0]
