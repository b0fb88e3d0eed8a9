"""Session: the client half of the protocol, pure.

It turns a layer's rows into a frame and the answer's frame back into an aggregate or an error, and it gives
every round its key. All members run the same program, so each counts for itself and all arrive at the same
keys: a step begins with the first forward round after a backward round, and `call` counts a layer's
forward rounds within the step. A backward round keeps the key of its forward round, whatever step has come.
"""

from collections import Counter, deque
from dataclasses import dataclass

from statsd_bn import limits
from statsd_bn.errors import from_wire
from statsd_bn.messages import (
    FORWARD,
    NO_SERVER,
    Aggregate,
    Contribution,
    Failure,
    Heartbeat,
    Leave,
    Message,
    Pending,
    Register,
    Registered,
    RoundKey,
    Rows,
)
from statsd_bn.wire import decode, encode


@dataclass(frozen=True, slots=True)
class Member:
    """Who this process is among the replicas.

    Attributes:
        job: the training run.
        group: the members of the job that synchronise together.
        epoch: one life of the group's membership.
        member: this process's number in the job, the same in all its groups.
        world_size: how many members the group has.
        deadline: how long one of its rounds may take, in seconds.
        place: host and process, for people.
    """

    job: str
    group: str
    epoch: int
    member: int
    world_size: int
    deadline: float
    place: str


class Session:
    """One member's conversation with one master.

    Args:
        token: random bytes that name this life of the member.
        member: who it is.

    Attributes:
        spoke: when it last sent anything, by `time.monotonic`; for whoever sends its frames to keep.
    """

    def __init__(self, token: bytes, member: Member) -> None:
        self.token = token
        self.member = member
        self.spoke = 0.0
        self._server = NO_SERVER
        self._step = 0
        self._calls: Counter[str] = Counter()
        self._backward_seen = False
        self._latest: deque[tuple[RoundKey, Rows]] = deque(maxlen=limits.KEPT_ROUNDS)

    @property
    def server(self) -> bytes:
        """The life of the server that has taken it in."""
        return self._server

    @property
    def is_known(self) -> bool:
        """Whether a master has taken it in."""
        return self._server != NO_SERVER

    def register(self) -> bytes:
        """Returns the frame that asks to belong to the group, and whether it is open."""
        who = self.member
        return encode(
            Register(
                self.token,
                who.job,
                who.group,
                who.epoch,
                who.member,
                who.world_size,
                who.deadline,
                who.place,
                self._server if self._latest else NO_SERVER,
                self._step,
            )
        )

    def leave(self, cause: str) -> bytes:
        """Returns the frame that says goodbye."""
        text = cause.encode(errors="replace")[: limits.MAX_TEXT_BYTES].decode(errors="ignore")
        return encode(Leave(self.token, text))

    def heartbeat(self) -> bytes:
        """Returns the frame that says that this process is alive."""
        return encode(Heartbeat(self.token))

    def forward_key(self, layer: str) -> RoundKey:
        """Returns the key of the next forward round of `layer`."""
        if self._backward_seen:
            self._step += 1
            self._calls.clear()
            self._backward_seen = False
        call = self._calls[layer]
        self._calls[layer] += 1
        who = self.member
        return RoundKey(who.job, who.group, who.epoch, self._step, layer, call, FORWARD)

    def contribution(self, key: RoundKey, rows: Rows, attempt: int = 0) -> bytes:
        """Returns the frame that brings `rows` to the round `key`; `attempt` counts how often they were sent before."""
        if attempt == 0:
            self._backward_seen = self._backward_seen or key.phase != FORWARD
            self._latest.append((key, rows))
        return encode(Contribution(self.token, key, attempt, 1, rows))

    def replay(self) -> list[bytes]:
        """Returns the frames that tell a master without a memory what this member brought to its latest rounds.

        Another member may wait for one of them still, whose answer was lost with the old master. Nobody can be
        further behind: no round ends without its contribution.
        """
        return [encode(Contribution(self.token, key, 1, 0, rows)) for key, rows in self._latest]

    def registered(self, frame: bytes) -> Registered | None:
        """Returns the answer to `register`; None if `frame` is about something else.

        Raises:
            StatsdBNError: the master refused.
        """
        message = self._read(frame, None)
        if not isinstance(message, Registered) or message.session != self.token:
            return None
        self._server = message.server
        return message

    def answer(self, key: RoundKey, frame: bytes) -> Aggregate | Pending | None:
        """Returns what the master says of the round `key`; None if `frame` is about something else.

        Raises:
            StatsdBNError: the round failed; the error is the master's.
        """
        message = self._read(frame, key)
        return message if isinstance(message, Aggregate | Pending) and message.key == key else None

    def _read(self, frame: bytes, key: RoundKey | None) -> Message | None:
        message = decode(frame)
        if not isinstance(message, Failure):
            return message
        if message.key is not None and message.key != key:
            return None
        raise from_wire(message.code, message.message, message.fields)
