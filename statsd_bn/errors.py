"""All errors of the project, in one small hierarchy.

An error has a message for people, with the expected and the received value and a remedy, and the same facts as `fields`
for programs. Its `code` identifies it on the wire: `from_wire` finds the class, so that a member raises the same error
as the server. docs/errors.md describes each.
"""

from typing import Any, ClassVar

from statsd_bn.text import escape_lines, escape_nested, wrap


class StatsdBNError(Exception):
    """Base of all errors of the project.

    Args:
        message: what happened, for people.
        fields: the same facts for programs (ints, strings, lists of these).
    """

    code: ClassVar[str] = "error"

    def __init_subclass__(cls, code: str = "", **named: Any) -> None:
        super().__init_subclass__(**named)
        if code:
            cls.code = code
            BY_CODE[code] = cls

    def __init__(self, message: str, /, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __str__(self) -> str:
        """Returns the message with a short first line."""
        return wrap(self.message)


BY_CODE = {StatsdBNError.code: StatsdBNError}


class ConfigurationError(StatsdBNError, ValueError, code="configuration"):
    """A wrong argument, flag or environment variable."""


class BindError(StatsdBNError, code="bind"):
    """The server cannot listen on an endpoint. Fields: endpoint."""


class ConnectionClosed(StatsdBNError, code="connection_closed"):
    """The connection is closed, or belongs to the process that this one was forked from."""


class ServerUnreachable(StatsdBNError, code="unreachable"):
    """No answer from the endpoint. Fields: endpoint, seconds."""


class AuthenticationRefused(StatsdBNError, code="authentication"):
    """The server and this client do not accept each other's keys, or one of them has none. Fields: reason."""


class ProtocolError(StatsdBNError, code="protocol"):
    """A frame, or one of its fields, violates docs/protocol.md."""


class VersionMismatch(ProtocolError, code="version"):
    """The frame has another protocol version. Fields: expected, got."""


class RegistrationRefused(StatsdBNError, code="refused"):
    """The server does not admit this member."""


class DuplicateMember(RegistrationRefused, code="duplicate_member"):
    """Another live process is registered as this member. Fields: job, group, member, place."""


class WorldSizeMismatch(RegistrationRefused, code="world_size"):
    """The members have different world sizes, or are too many. Fields: job, group, member, expected, got."""


class StaleEpoch(RegistrationRefused, code="stale_epoch"):
    """The group has a later epoch. Fields: job, group, expected, got."""


class GroupIncomplete(RegistrationRefused, code="group_incomplete"):
    """Members were missing at the deadline for a group to open, or for members to rejoin.

    Fields: job, group, size, present, missing. The last two are lists of ranks; only the group "world" has `missing`.
    """


class UnknownSession(StatsdBNError, code="unknown_session"):
    """The server has no such session, because it was restarted; the member registers again. Fields: digest."""


class MasterStopped(StatsdBNError, code="master_stopped"):
    """The server stopped for good, with the process that started it, while members needed it."""


class LimitExceeded(StatsdBNError, code="limit"):
    """The request exceeds a limit of the server. Fields: limit, what."""


class RoundFailed(StatsdBNError, code="round_failed"):
    """A round failed for all its members. Fields: the parts of its key.

    Subclasses call these fields "the key's". If a member raised instead of sending its `mp_sync` value: member, cause.
    """


class RoundMismatch(RoundFailed, code="mismatch"):
    """The members' contributions do not match, or the members wait for one another in different places.

    The fields depend on the mismatch:

    - contributions with different shapes: the key's, expected, got, member;
    - a deadlock: the key's (only job and group for a rank outside of a round); places, the number of places where ranks
      wait; table, entries for the places with the most members, in descending order. An entry has members, nr_members,
      seconds and group; for a round also step, layer, call and phase, for a collective of torch also stack;
    - replicas of one process: replicas;
    - values or keys of `mp_sync`: none.
    """


class ContributionConflict(RoundFailed, code="conflict"):
    """A member contributed twice to a round, with different bytes. Fields: the key's, member."""


class NonFinite(RoundFailed, code="non_finite"):
    """Members sent NaN or infinity, and `on_nonfinite` is "raise".

    Fields: the key's, members, names, non_finite_channels, channels, kinds.
    """


class RoundTimeout(RoundFailed, code="timeout"):
    """Members were missing at a round's deadline. Fields: the key's, missing, waiting, seconds.

    Without an answer of the server: the key's, seconds.
    """


class ReplicaLost(RoundFailed, code="replica_lost"):
    """A member left the group, died, raised, or was declared lost; it may be the member that receives the error.

    Fields: job, group, member, step, cause. If this member joined an elastic job too late: job, member, cause. If
    another replica of this process failed: replica, cause.
    """


def from_wire(code: str, message: str, fields: dict[str, object]) -> StatsdBNError:
    """Returns the error with this code, its texts escaped; the base class for an unknown code (a newer server's)."""
    return BY_CODE.get(code, StatsdBNError)(escape_lines(message), **escape_nested(fields))
