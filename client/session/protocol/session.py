"""Session: one member's registration with one server; it encodes requests, decodes answers and counts steps; pure."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np

from client.session.protocol.member import BY_ELASTIC, Member, TransportState
from statsd_bn import limits, messages
from statsd_bn.errors import DuplicateMember, ReplicaLost, RoundFailed, StatsdBNError, UnknownSession, from_wire
from statsd_bn.members import NO_MEMBERS, format_ranks
from statsd_bn.messages import Aggregate, Contribution, Failure, Message, Participation, Pending, Registered
from statsd_bn.reduction import Rows
from statsd_bn.round_key import FORWARD, FORWARD_PHASES, GATHER, RoundKey
from statsd_bn.skew_samples import Sample, figures_of_step
from statsd_bn.text import error_text, wire_text
from statsd_bn.timing import DurationReporter
from statsd_bn.wire import decode, encode

_ANSWERS = (Aggregate, Pending)  # messages about a round
STEP_STARTING_PHASES = (*FORWARD_PHASES, GATHER)

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)

Actions: TypeAlias = tuple[Sequence[bytes], float, ResultT | None]
"""Next actions of a state machine: the frames to send, in order; the time for a `step` without a frame, unless one
arrives before; and the result, None until the end. A plain tuple, because every round makes two of them."""


class StateMachine(Protocol[ResultT_co]):
    """A wait for the server, without clock and socket; it ends with a result, or `begin` or `step` raises an error."""

    def begin(self, now: float) -> Actions[ResultT_co]:
        """Begin; called before any `step`."""

    def step(self, now: float, frame: bytes | None) -> Actions[ResultT_co]:
        """Handle a frame; it is None at the timeout, and after a reconnect."""


class LastRoundDone:
    """The latest RoundDone of this process, in any group; shared by all its sessions."""

    # It is sent again before the next contribution. If it were lost with a connection, the server would count this
    # member as waiting in the finished round while it waits in another, and report a false deadlock.

    def __init__(self) -> None:
        self.frame = b""  # empty once an aggregate has answered a later frame

    def acknowledge(self, frame: bytes) -> None:
        """Clear the frame, unless another thread has replaced it: an aggregate has answered a later frame."""
        if self.frame == frame:
            self.frame = b""


class StepCounter:
    """Counts a member's steps, and each layer's calls within the step, alike on all members."""

    # A step begins with the first forward round, or gather, after a backward round. A backward round keeps the key of
    # its forward round, even in a later step.

    def __init__(self) -> None:
        self.step = 0
        self._calls: Counter[str] = Counter()
        self._backward_seen = False

    def next(self, layer: str) -> tuple[int, int]:
        """Return step and call of the next forward round, or gather, of a layer."""
        if self._backward_seen:
            self.start_step(self.step + 1)
        call = self._calls[layer]
        self._calls[layer] += 1
        return self.step, call

    def record_phase(self, phase: str) -> None:
        """Record that a round of this phase begins."""
        self._backward_seen = self._backward_seen or phase not in STEP_STARTING_PHASES

    def start_step(self, step: int) -> None:
        """Begin a step."""
        self.step = step
        self._calls.clear()
        self._backward_seen = False


class Session:
    """One member's registration with one server; random bytes, the `member_token`, identify this life of the member."""

    decode = staticmethod(decode)

    def __init__(self, member_token: bytes, member: Member, last_round_done: LastRoundDone | None = None) -> None:
        self.member_token = member_token
        self.last_round_done = last_round_done or LastRoundDone()
        self._digest = messages.digest(member_token)
        self.member = member
        self.participation = Participation.TAKES_PART
        self.first_step = 0
        self.members = NO_MEMBERS
        self.transport = TransportState()
        self.times = DurationReporter(member.world_size)
        # This member's delay behind all others, each time that it was the last in a round that bypassed the server.
        self.lateness = DurationReporter(member.world_size)
        self._keys: dict[tuple[str, str], RoundKey] = {}  # validated once per layer
        if member.is_elastic:
            self.transport.fall_back(BY_ELASTIC)
        self.last_sent = 0.0  # by `time.monotonic`; set by the sender of its frames
        self._server = messages.NO_SERVER
        self._conflict: DuplicateMember | None = None  # error of a server that knows another process of this rank
        self.steps = StepCounter()
        self.has_uneven_inputs = False  # whether members may have been paused, and a round need not cover all of them
        self._results: deque[Aggregate] = deque(maxlen=limits.CACHED_ROUNDS)

    @property
    def is_registered(self) -> bool:
        """Whether a server has registered it."""
        return self._server != messages.NO_SERVER

    @property
    def has_forward_rounds(self) -> bool:
        """Whether a layer has begun a forward round."""
        return any(key.is_forward for key in tuple(self._keys.values()))

    def register(self) -> bytes:
        """Frame that registers the member, with the state of the group that it knows."""
        member = self.member
        return encode(messages.Register(
            self.member_token, member.job, member.group, member.epoch, member.rank, member.world_size,
            member.min_members, member.round_timeout, member.host_and_pid, self.participation.value,
            self._server, self.steps.step, self.first_step, len(self._results), self.members,
        ))  # fmt: skip

    def resync_frames(self) -> list[bytes]:
        """Frames that register the member with a restarted server and send it the latest aggregates."""
        # Another member may still wait for an aggregate that only this member received from the old server. The latest
        # aggregates suffice: no member is further behind, since no round ends without all contributions.
        # Encode Register first: the server waits for the number of results in it, and other threads may add results.
        frames = [self.register()]
        return frames + [encode(messages.Result(self.member_token, result)) for result in tuple(self._results)]

    def leave(self, cause: str) -> bytes:
        """Frame that ends the registration."""
        return encode(messages.Leave(self.member_token, wire_text(cause)))

    def heartbeat(self) -> bytes:
        """Frame that shows that this process is alive, with its rounds that bypassed the server."""
        transport, step = self.transport, self.steps.step
        why = wire_text(transport.why_not_faster, limits.MAX_NAME_BYTES)
        waited, rounds = int(1e3 * transport.bypassed_seconds), transport.bypassed_rounds
        return encode(messages.Heartbeat(self.member_token, step, rounds, transport.name, why, waited))

    def forward_key(self, layer: str, phase: str = FORWARD) -> RoundKey:
        """Key of the next forward round, or gather, of `layer`."""
        member = self.member
        step, call = self.steps.next(layer)
        if (before := self._keys.get((layer, phase))) is not None and before.epoch == member.epoch:
            return before.with_call(step, call)
        key = self._keys[layer, phase] = RoundKey(member.job, member.group, member.epoch, step, layer, call, phase)
        return key

    def contribution(self, key: RoundKey, rows: Rows, attempt: int = 0) -> bytes:
        """Frame with the rows of a round; `attempt` counts how often they were sent before."""
        return encode(Contribution(self.member_token, key, attempt, rows))

    def round_done(self, key: RoundKey) -> bytes:
        """Frame that says that this member has finished a round over another transport."""
        self.last_round_done.frame = frame = encode(messages.RoundDone(self.member_token, key))
        return frame

    def skew_frame(self, samples: Sequence[Sample]) -> bytes | None:
        """Frame with the skew statistics of one step's rounds that bypassed the server; None without any."""
        if (stats := figures_of_step(samples)) is None:
            return None
        step, layers = stats
        return encode(messages.SkewStats(self.member_token, step, "\n".join(layers), np.stack(list(layers.values()))))

    def timing_frames(self, now: float) -> list[bytes]:
        """Frames with the durations of its rounds and its lateness, as far as they are due."""
        frames = []
        for times, kind in ((self.times, messages.RoundTrips), (self.lateness, messages.LatenessReport)):
            times.collect()
            if times.is_due(now):
                histogram = times.report(now)
                frames.append(encode(kind(self.member_token, int(1e6 * histogram.sum), tuple(histogram.counts))))
        return frames

    def registered(self, frame: bytes) -> Registered | None:
        """Decode the answer to `register`; None for another frame."""
        message = self._read(frame, None)
        if not self._is_registered(message):
            return None
        # The answer to a rejoin increases `first_step`, which ends REJOINING; any other answers an earlier request.
        is_stale = self.participation is Participation.REJOINING and not message.missing
        return None if is_stale else message

    def answer(self, key: RoundKey, frame: bytes) -> Aggregate | Pending | None:
        """Decode the server's answer in the round `key`; None for another frame."""
        if self._conflict:
            raise self._conflict.with_traceback(None)
        self._check_first_step(key)
        try:
            message = self._read(frame, key)
        except DuplicateMember as error:
            self._record_conflict(error)
            raise
        if not isinstance(message, _ANSWERS):
            self._is_registered(message)
            self._check_first_step(key)
            return None
        if message.key != key:
            return None
        if isinstance(message, Aggregate):
            if self.member.rank not in message.members:
                raise self._declared_lost(key, f"{format_ranks(message.members)} continued without it")
            self.members = message.members
            self._results.append(message)
        return message

    def on_unsolicited(self, frame: bytes) -> list[bytes]:
        """Handle a frame that answers no request; return the replies."""
        try:
            self._is_registered(self._read(frame, None))
        except UnknownSession as error:
            is_asked = error.fields.get("digest") == self._digest.hex() and not self._conflict
            return self.resync_frames() if is_asked else []
        except DuplicateMember as error:
            self._record_conflict(error)
        except StatsdBNError:
            pass  # its next contribution gets the error
        return []

    def _record_conflict(self, error: DuplicateMember) -> None:
        """Record for good that another process has this rank: a server that replaces this one would not know it."""
        # Rounds may have ended with the other process's rows. A later server would take them for this member's, since
        # an aggregate lists ranks, not processes. A member that was in no open group waits for no round.
        member, fields = self.member, error.fields
        conflicting = fields.get("job"), fields.get("group"), fields.get("member")
        if conflicting == (member.job, member.group, member.rank) and self.members:
            self._conflict = error

    def request(self, frame: bytes) -> messages.StackRequest | StatsdBNError | None:
        """The stack request to this session in a frame, or why its strict job is broken; None for another frame."""
        try:
            message = self.decode(frame)
        except StatsdBNError:
            return None
        if isinstance(message, messages.StackRequest) and message.digest == self._digest:
            return message
        if not isinstance(message, Failure) or message.key is not None or self.member.is_elastic:
            return None
        error = from_wire(message.code, message.message, message.fields)
        return error if isinstance(error, RoundFailed) and error.fields.get("job") == self.member.job else None

    def _is_registered(self, message: Message | None) -> TypeGuard[Registered]:
        """Whether a message answers this session's registration; if so, update the session from it."""
        if not isinstance(message, Registered) or message.digest != self._digest:
            return False
        self._server = message.server
        if not message.missing:
            self.members = message.present
            if message.first_step > self.first_step:
                self.participation = Participation.TAKES_PART
                self.first_step = message.first_step
                self.steps.start_step(message.first_step)
        return True

    def _check_first_step(self, key: RoundKey) -> None:
        """Raise ReplicaLost if the server has since registered this member anew, from a step after the round's."""
        if key.step < self.first_step:
            raise self._declared_lost(key, f"rejoined at step {self.first_step}")

    def _declared_lost(self, key: RoundKey, consequence: str) -> ReplicaLost:
        member = self.member
        fields = {"job": member.job, "group": member.group, "member": member.rank, "step": key.step}
        text = error_text(f"rank {member.rank} was declared lost, and {consequence}", where=str(key))
        return ReplicaLost(text, **fields, cause="declared lost")

    def _read(self, frame: bytes, key: RoundKey | None) -> Message | None:
        message = self.decode(frame)
        if not isinstance(message, Failure):
            return message
        if message.key is not None and message.key != key:
            return None
        raise from_wire(message.code, message.message, message.fields)
