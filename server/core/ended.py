"""Past: what has ended on this server, remembered so that what is late, or comes back, begins nothing anew.

It is bounded: what ended longest ago is forgotten first.
"""

from dataclasses import dataclass

from statsd_bn.errors import StatsdBNError

# The members of a big job may all end at once.
REMEMBERED_SESSIONS = 32_768

# Groups, each with a name and a number.
REMEMBERED_GROUPS = 4096

Name = tuple[str, str]
"""Of a group: its job, and its name there."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a session is told that has no seat any more; in a later epoch it may have one again."""

    error: StatsdBNError
    epoch: int


class Past:
    """The sessions and groups that have ended."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, Ended] = {}
        self._groups: dict[Name, int] = {}

    def end_session(self, session: bytes, epoch: int, error: StatsdBNError) -> None:
        """A session has ended; the error is what it is told from now on."""
        self._sessions[session] = Ended(error, epoch)
        if len(self._sessions) > REMEMBERED_SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def begin_session(self, session: bytes) -> None:
        """A session has a seat, perhaps again."""
        self._sessions.pop(session, None)

    def fate(self, session: bytes, epoch: int | None = None) -> StatsdBNError | None:
        """Returns what a session is told that has ended; None if it has not, or had not come to this epoch."""
        ended = self._sessions.get(session)
        return ended.error if ended and (epoch is None or epoch <= ended.epoch) else None

    def end_group(self, name: Name, epoch: int) -> None:
        """All members of an open group have gone."""
        self._groups[name] = epoch
        if len(self._groups) > REMEMBERED_GROUPS:
            del self._groups[next(iter(self._groups))]

    def has_ended(self, name: Name, epoch: int) -> bool:
        """Returns whether a life of a group has ended, in this epoch or a later one."""
        return self._groups.get(name, -1) >= epoch
