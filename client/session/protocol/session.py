"""Session: the client half of the protocol, pure.

It turns a layer's rows into a frame and the answer's frame back into an aggregate or an error, and it gives every round
its key, by the steps that the member counts.
"""

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np

from client.session.protocol.member import BY_ELASTIC, Member, TransportInUse
from statsd_bn import limits
from statsd_bn.error_text import error_text
from statsd_bn.errors import DuplicateMember, ReplicaLost, RoundFailed, StatsdBNError, UnknownSession, from_wire
from statsd_bn.members import NOBODY, ranks_in_words
from statsd_bn.messages import (
    NO_SERVER,
    Aggregate,
    Contribution,
    Failure,
    Heartbeat,
    LatenessReport,
    Leave,
    Message,
    Participation,
    Pending,
    Register,
    Registered,
    Result,
    RoundDone,
    RoundTrips,
    SkewStats,
    StackRequest,
)
from statsd_bn.reduction import Rows
from statsd_bn.round_key import FORWARD, FORWARD_PHASES, GATHER, RoundKey
from statsd_bn.skew_samples import Sample, told_by
from statsd_bn.text import told
from statsd_bn.timing import ToldTimes
from statsd_bn.tokens import digest
from statsd_bn.wire import decode, encode

# What is about a round.
_ANSWERS = (Aggregate, Pending)

# The phases that may begin a step.
BEGINNINGS = (*FORWARD_PHASES, GATHER)

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)

# What a machine wants now: the frames to send, in order; when to call `step` without a frame if none comes before; and
# the result, which is None while the wait goes on. A plain tuple, because every round makes two.
Turn: TypeAlias = tuple[Sequence[bytes], float, ResultT | None]


class Machine(Protocol[ResultT_co]):
    """A wait for the server that ends with a result of one type, or with an error that `begin` or `step` raises.

    It has no clock and no socket: `client.session.channel_pool.run_machine` runs it on a channel, and the tests'
    simulator in virtual time.
    """

    def begin(self, now: float) -> Turn[ResultT_co]:
        """Begins the wait; called once, before any `step`."""

    def step(self, now: float, frame: bytes | None) -> Turn[ResultT_co]:
        """Goes on with a frame, or with None when the time is over or the connection is a new one."""


class LastSettled:
    """What this process has said last of a round that is over in memory, in any group; one for all its sessions.

    It is said again ahead of the next contribution. What was lost with a connection would else leave a member at the
    server that seems to wait there still for this one, while this one waits for it elsewhere.

    Attributes:
        frame: the RoundDone; empty once the server has answered what came behind it.
    """

    def __init__(self) -> None:
        self.frame = b""

    def was_heard(self, frame: bytes) -> None:
        """The server has answered what came behind a frame; meanwhile another thread may have said something else."""
        if self.frame == frame:
            self.frame = b""


class Steps:
    """How a member counts its rounds: which step it is in, and which call of a layer comes next.

    All members run the same program, so each counts for itself and all arrive at the same keys: a step begins with the
    first forward round after a backward round, and `call` counts a layer's forward rounds within the step. A backward
    round keeps the key of its forward round, whatever step has come.
    """

    def __init__(self) -> None:
        self.step = 0
        self._calls: Counter[str] = Counter()
        self._backward_seen = False

    def next(self, layer: str) -> tuple[int, int]:
        """Returns the step and the call of the next forward round, or gather, of a layer."""
        if self._backward_seen:
            self.begin_at(self.step + 1)
        call = self._calls[layer]
        self._calls[layer] += 1
        return self.step, call

    def begins(self, phase: str) -> None:
        """A round of this phase takes place now."""
        self._backward_seen = self._backward_seen or phase not in BEGINNINGS

    def begin_at(self, step: int) -> None:
        """Begins a step."""
        self.step = step
        self._calls.clear()
        self._backward_seen = False


class Session:
    """One member's conversation with one server.

    Args:
        token: random bytes that name this life of the member.

    Attributes:
        participation: whether it takes part in the group's rounds.
        first_step: the first step it takes part in, as the server said.
        members: who belongs to the group, as it last heard.
        is_uneven: whether members of the group have been away, or may have been, so that not all are in each round.
        lateness: how much later than all others it came, each time that it came last to a round in memory.
        steps: counts its rounds.
        spoke: when it last sent anything, by `time.monotonic`; for whoever sends its frames to keep.
    """

    decode = staticmethod(decode)

    def __init__(self, token: bytes, member: Member, last_settled: LastSettled | None = None) -> None:
        self.token = token
        self.last_settled = last_settled or LastSettled()
        self._digest = digest(token)
        self.member = member
        self.participation = Participation.TAKES_PART
        self.first_step = 0
        self.members = NOBODY
        self.transport = TransportInUse()
        self.times = ToldTimes(member.world_size)
        self.lateness = ToldTimes(member.world_size)
        # What they are made of is checked once for each layer.
        self._keys: dict[tuple[str, str], RoundKey] = {}
        if member.is_elastic:
            self.transport.refuse(BY_ELASTIC)
        self.spoke = 0.0
        self._server = NO_SERVER
        # What a restarted server has said that had another process of this number.
        self._refusal: DuplicateMember | None = None
        self.steps = Steps()
        self.is_uneven = False
        self._results: deque[Aggregate] = deque(maxlen=limits.KEPT_ROUNDS)

    @property
    def is_known(self) -> bool:
        """Whether a server has taken it in."""
        return self._server != NO_SERVER

    @property
    def has_layers(self) -> bool:
        """Whether a layer has begun a forward round."""
        return any(key.is_forward for key in tuple(self._keys.values()))

    def register(self) -> bytes:
        """Returns the frame that asks to belong to the group, and how the group stands."""
        who = self.member
        return encode(
            Register(
                self.token,
                who.job,
                who.group,
                who.epoch,
                who.rank,
                who.world_size,
                who.min_members,
                who.round_timeout,
                who.host_and_pid,
                self.participation.value,
                self._server,
                self.steps.step,
                self.first_step,
                len(self._results),
                self.members,
            )
        )

    def introduction(self) -> list[bytes]:
        """Returns the frames that tell a server without a memory who this member is and what it was given.

        Another member may wait still for an answer that this one has, which was lost with the old server. Nobody can be
        further behind than these: no round ends without its contribution.
        """
        # Results last: the server waits for as many as the registration announces, or for more.
        return [self.register(), *(encode(Result(self.token, result)) for result in tuple(self._results))]

    def leave(self, cause: str) -> bytes:
        """Returns the frame that says goodbye."""
        return encode(Leave(self.token, told(cause)))

    def heartbeat(self) -> bytes:
        """Returns the frame that says that this process is alive, and what the server does not see otherwise."""
        transport = self.transport
        why = told(transport.why_not_faster, limits.MAX_NAME_BYTES)
        waited = int(1e3 * transport.seconds_in_memory)
        return encode(Heartbeat(self.token, self.steps.step, transport.rounds_in_memory, transport.name, why, waited))

    def forward_key(self, layer: str, phase: str = FORWARD) -> RoundKey:
        """Returns the key of the next forward round, or gather, of `layer`."""
        who = self.member
        step, call = self.steps.next(layer)
        if (before := self._keys.get((layer, phase))) is not None and before.epoch == who.epoch:
            return before.at(step, call)
        key = self._keys[layer, phase] = RoundKey(who.job, who.group, who.epoch, step, layer, call, phase)
        return key

    def begins(self, key: RoundKey) -> None:
        """This member takes part in a round now, whichever way its rows go."""
        self.steps.begins(key.phase)

    def contribution(self, key: RoundKey, rows: Rows, attempt: int = 0) -> bytes:
        """Returns the frame that brings `rows` to the round `key`; `attempt` counts how often they were sent before."""
        return encode(Contribution(self.token, key, attempt, rows))

    def settled(self, key: RoundKey) -> bytes:
        """Returns the frame that says that the round `key` is over for this member, which got its rows elsewhere."""
        self.last_settled.frame = frame = encode(RoundDone(self.token, key))
        return frame

    def figures(self, samples: Sequence[Sample]) -> bytes | None:
        """Returns the frame that tells of rounds of a step which the server has not seen; None without any figures."""
        if (told := told_by(samples)) is None:
            return None
        step, figures = told
        return encode(SkewStats(self.token, step, "\n".join(figures), np.stack(list(figures.values()))))

    def told_times(self, now: float) -> list[bytes]:
        """Returns the frames that tell how long its rounds took and how late it came, where it is time to."""
        frames = []
        for times, kind in ((self.times, RoundTrips), (self.lateness, LatenessReport)):
            times.count()
            if times.is_due(now):
                told = times.tell(now)
                frames.append(encode(kind(self.token, int(1e6 * told.sum), tuple(told.counts))))
        return frames

    def registered(self, frame: bytes) -> Registered | None:
        """Returns the answer to `register`; None if `frame` is about something else.

        Raises:
            StatsdBNError: the server refused.
        """
        message = self._read(frame, None)
        if not self._is_registered(message):
            return None
        # One that is back begins at a step above its last one; without, this answers what it asked before.
        is_late = self.participation is Participation.REJOINING and not message.missing
        return None if is_late else message

    def answer(self, key: RoundKey, frame: bytes) -> Aggregate | Pending | None:
        """Returns what the server says of the round `key`; None if `frame` is about something else.

        Raises:
            UnknownSession: the server has no memory, and wants an `introduction`.
            DuplicateMember: a server has had another process of this number; the answer may have that one's rows.
            ReplicaLost: the round has ended, or will end, without this member.
            StatsdBNError: the round failed; the error is the server's.
        """
        if self._refusal:
            raise self._refusal.with_traceback(None)
        self._check_takes_part(key)
        try:
            message = self._read(frame, key)
        except DuplicateMember as error:
            self._take_refusal(error)
            raise
        if not isinstance(message, _ANSWERS):
            self._is_registered(message)
            self._check_takes_part(key)
            return None
        if message.key != key:
            return None
        if isinstance(message, Aggregate):
            self._take(message)
        return message

    def overhear(self, frame: bytes) -> list[bytes]:
        """Takes a frame that came while nothing was asked; returns what is to be sent because of it."""
        try:
            self._is_registered(self._read(frame, None))
        except UnknownSession as error:
            is_asked = error.fields.get("digest") == self._digest.hex() and not self._refusal
            return self.introduction() if is_asked else []
        except DuplicateMember as error:
            self._take_refusal(error)
        except StatsdBNError:
            # Whatever ends it, its next contribution will be told.
            pass
        return []

    def _take_refusal(self, error: DuplicateMember) -> None:
        """Remembers for good that another process has its number; by its next contribution the server may be another.

        Rounds may have ended with the other one's rows. A later server would take them for this member's, since an
        aggregate says which members it covers, not which processes. One that was in no open group waits for no round.
        """
        who, fields = self.member, error.fields
        is_mine = (fields.get("job"), fields.get("group"), fields.get("member")) == (who.job, who.group, who.rank)
        if is_mine and self.members:
            self._refusal = error

    def asked(self, frame: bytes) -> StackRequest | None:
        """Returns the question where this process is, if a frame is one to this session."""
        message = self._overheard(frame)
        return message if isinstance(message, StackRequest) and message.digest == self._digest else None

    def news(self, frame: bytes) -> StatsdBNError | None:
        """Returns why the strict job is broken, if a frame that came while nothing was asked says so."""
        message = self._overheard(frame)
        if not isinstance(message, Failure) or message.key is not None or self.member.is_elastic:
            return None
        error = from_wire(message.code, message.message, message.fields)
        return error if isinstance(error, RoundFailed) and error.fields.get("job") == self.member.job else None

    def _overheard(self, frame: bytes) -> Message | None:
        with suppress(StatsdBNError):
            return self.decode(frame)
        return None

    def _is_registered(self, message: Message | None) -> TypeGuard[Registered]:
        if not isinstance(message, Registered) or message.digest != self._digest:
            return False
        self._server = message.server
        if not message.missing:
            self.members = message.present
            self._begin_at(message.first_step)
        return True

    def _begin_at(self, first_step: int) -> None:
        if first_step <= self.first_step:
            return
        self.participation = Participation.TAKES_PART
        self.first_step = first_step
        self.steps.begin_at(first_step)

    def _check_takes_part(self, key: RoundKey) -> None:
        """A server may have taken this member for a new one meanwhile, which begins at a later step."""
        if key.step < self.first_step:
            raise self._taken_for_lost(key, f"was taken in again from step {self.first_step} on")

    def _take(self, aggregate: Aggregate) -> None:
        if self.member.rank not in aggregate.members:
            raise self._taken_for_lost(aggregate.key, f"{ranks_in_words(aggregate.members)} went on without it")
        self.members = aggregate.members
        self._results.append(aggregate)

    def _taken_for_lost(self, key: RoundKey, what_then: str) -> ReplicaLost:
        who = self.member
        return ReplicaLost(
            error_text(f"rank {who.rank} was taken for lost, and {what_then}", where=str(key)),
            job=who.job,
            group=who.group,
            member=who.rank,
            step=key.step,
            cause="taken for lost",
        )

    def _read(self, frame: bytes, key: RoundKey | None) -> Message | None:
        message = self.decode(frame)
        if not isinstance(message, Failure):
            return message
        if message.key is not None and message.key != key:
            return None
        raise from_wire(message.code, message.message, message.fields)
