"""CarriedRound: one member's part in one round of a group whose members on one host share memory, without a clock.

All of this host bring their rows to the memory. Whoever comes last carries the rows of all to the server, in one
message, and leaves the answer in the memory for the others. So the server has one message and one answer for each host.

What is carried is what each would have sent, and the server takes it as that: by the round's key and the member, with
the first bytes counting. So a member may send its own rows at any time as well, and does when it has waited for long.
It is answered for itself then, whatever became of the others and of whoever carried. That is all that there is for
faults: nothing that was carried is sent a second time, and nobody has to find out why there was no answer.

A member that is killed or frozen between two rounds does not come, and after `ESCALATE_SECONDS` those that wait for it
say so to the server, each for itself. One that dies while it carries costs the others `CARRY_SECONDS`. A server that
was restarted knows nobody; each tells it what it knows, as over ZeroMQ.

What was considered and not done: a member that always carries would have to be woken first, would need somebody to
watch it, and would cost all others a round whenever it is held up. The last to come is awake.
"""

from collections.abc import Callable

from client.conversation.machine import Turn
from client.conversation.round_trip import RoundTrip
from client.conversation.session import Session
from client.lanes.key_digest import digest_of
from client.lanes.round_in_memory import ESCALATE_SECONDS, AtServer
from client.shared_memory.host_memory import HostMemory
from statsd_bn import limits
from statsd_bn.errors import StatsdBNError, UnknownSession
from statsd_bn.messages import Aggregate, Pending
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows

# How long to wait for an answer to what was carried. The server knows by then who waits, so there is no hurry; but who
# carries may have died, or the answer may be lost.
CARRY_SECONDS = 0.25

# More than this is not carried together: the time goes into the bytes then, and not into the messages.
MOST_BYTES = 2**20


class CarriedRound:
    """A `Machine` whose result is the aggregate; or `AtServer`, where this member is to ask for itself.

    Args:
        session: who speaks.
        key: of the round.
        rows: what this member brings.
        memory: of the group's members on this host.
        begin_trip: returns what takes part in the round over the server, not begun.
    """

    def __init__(
        self, session: Session, key: RoundKey, rows: Rows, memory: HostMemory, begin_trip: Callable[[], RoundTrip]
    ) -> None:
        self._session = session
        self._key = key
        self._rows = rows
        self._memory = memory
        self._begin_trip = begin_trip
        self._carries = False
        self._began = self._due = 0.0

    def begin(self, now: float) -> Turn[Aggregate | AtServer]:
        """Writes its rows; carries those of all, if it is the last."""
        memory = self._memory
        if not memory.have_all_come:
            # It has left the last turn early, and others may be in the one before it still, and read its rows there.
            # One thread gets no answer before all have come; so these are several, and they do not keep step.
            memory.close()
        if memory.is_closed:
            return self._ask(now)
        self._began, self._due = now, now + ESCALATE_SECONDS
        if memory.come(digest_of(self._key), self._rows):
            return self._carry(now)
        return (), self._due, None

    def step(self, now: float, frame: bytes | None) -> Turn[Aggregate | AtServer]:
        """Reads what the server answers to what was carried; without a frame, looks at the memory.

        Raises:
            StatsdBNError: the round failed, with the reason.
        """
        if self._carries:
            # Without a frame the time is over, or the server may never have seen what was sent.
            return self._ask(now) if frame is None else self._read(now, frame)
        if found := self._memory.answer:
            return self._take(now, *found)
        if self._memory.is_closed:
            # Whoever has closed may have left the answer before.
            found = self._memory.answer
            return self._take(now, *found) if found else self._ask(now)
        if now >= self._due and self._memory.have_all_come:
            self._due = self._began + CARRY_SECONDS
        return ((), self._due, None) if now < self._due else self._ask(now)

    def _ask(self, now: float) -> Turn[Aggregate | AtServer]:
        # The server counts from when it hears of this member.
        self._session.lane.seconds_in_memory += now - self._began if self._began and not self._carries else 0.0
        return (), now, AtServer(self._begin_trip())

    def _carry(self, now: float) -> Turn[Aggregate | AtServer]:
        rows = self._rows_of_all()
        if rows is None:
            # All others learn the same, and nobody has to find out by waiting.
            self._memory.leave(b"", 0.0)
            return self._ask(now)
        self._carries = True
        self._session.spoke = now
        self._due = now + CARRY_SECONDS
        return (self._session.carried(self._key, self._memory.sessions, rows),), self._due, None

    def _rows_of_all(self) -> Rows | None:
        """Returns what all members of this host have brought; None where it cannot be carried together."""
        brought = self._memory.brought()
        if (
            brought is None
            or len(set(brought.replicas)) > 1
            or len(brought.counts) > limits.MAX_REPLICAS
            or brought.values.nbytes > MOST_BYTES
            or max(brought.counts) > limits.MAX_COUNT
        ):
            return None
        return Rows(tuple(brought.counts), brought.values)

    def _read(self, now: float, frame: bytes) -> Turn[Aggregate | AtServer]:
        answer = self._answer(frame)
        if isinstance(answer, Aggregate):
            self._memory.leave(frame, now - self._began)
            return (), now, answer
        # Anything else may be late, and about another round.
        return self._ask(now) if isinstance(answer, StatsdBNError) else ((), self._due, None)

    def _take(self, now: float, frame: bytes, seconds: float) -> Turn[Aggregate | AtServer]:
        answer = self._answer(frame) if frame else None
        if not isinstance(answer, Aggregate):
            return self._ask(now)
        # The server counts from when the last one of this host had come.
        self._session.lane.seconds_in_memory += max(0.0, now - self._began - seconds)
        return (), now, answer

    def _answer(self, frame: bytes) -> Aggregate | Pending | StatsdBNError | None:
        """Returns what a frame says of this round; None if nothing, or the error where it is one."""
        try:
            return self._session.answer(self._key, frame)
        except UnknownSession as error:
            return error
        except StatsdBNError as error:
            # Whatever is wrong with the round, this member is told of it again; what is wrong with carrying ends here.
            self._memory.close()
            return error
