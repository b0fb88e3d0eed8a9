"""Ended: the sessions and groups that have ended, so that a late message does not begin them again.

The number remembered is bounded; what ended longest ago is forgotten first.
"""

from dataclasses import dataclass

from statsd_bn.errors import StatsdBNError

# All members of a large job may end at once.
REMEMBERED_SESSIONS = 32_768

# For each group its name and an epoch.
REMEMBERED_GROUPS = 4096

Name = tuple[str, str]
"""Of a group: its job, and its name there."""


@dataclass(frozen=True, slots=True)
class _Reason:
    """What an ended session is told, and the epoch it ended in; it may register again in a later one."""

    error: StatsdBNError
    epoch: int


class Ended:
    """The sessions and groups that have ended."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, _Reason] = {}
        self._groups: dict[Name, int] = {}

    def end_session(self, session: bytes, epoch: int, error: StatsdBNError) -> None:
        """Remember that a session has ended, and the error that it is told from now on."""
        self._sessions[session] = _Reason(error, epoch)
        if len(self._sessions) > REMEMBERED_SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def begin_session(self, session: bytes) -> None:
        """Forget that a session has ended: it is registered, perhaps again."""
        self._sessions.pop(session, None)

    def why(self, session: bytes, epoch: int | None = None) -> StatsdBNError | None:
        """Error that tells a session why it has ended; None if it has not, or ended before this epoch."""
        reason = self._sessions.get(session)
        return reason.error if reason and (epoch is None or epoch <= reason.epoch) else None

    def end_group(self, name: Name, epoch: int) -> None:
        """Remember that all members of an open group have left."""
        self._groups[name] = epoch
        if len(self._groups) > REMEMBERED_GROUPS:
            del self._groups[next(iter(self._groups))]

    def has_ended(self, name: Name, epoch: int) -> bool:
        """Whether a group has ended in this epoch or in a later one."""
        return self._groups.get(name, -1) >= epoch
