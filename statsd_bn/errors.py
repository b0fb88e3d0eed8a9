"""Every error of the project, as one small tree.

An error carries what a person needs to act: a message that says what was expected and what came, and the
same facts as `fields` for a program. Errors that travel have a `code`; `from_wire` turns the code back
into the class, so that the error a server raises about a member is the error that member sees.

    StatsdBNError
    ├── ConfigurationError      what you gave is wrong: an argument, a flag, a variable
    ├── BindError               the server cannot listen on an endpoint
    ├── ConnectionClosed        the connection was closed, or belongs to another process
    ├── ServerUnreachable       no answer from the endpoint
    ├── AuthenticationRefused   the server lets nobody in with this key, or without one
    ├── ProtocolError           a frame that breaks docs/protocol.md
    │   └── VersionMismatch     a frame of another protocol version
    ├── RegistrationRefused     the server does not take this member
    │   ├── DuplicateMember     another live process already is this member
    │   ├── WorldSizeMismatch   the members disagree on how many they are, or are more
    │   ├── StaleEpoch          a newer life of the group has begun
    │   └── GroupIncomplete     the group did not fill in time
    ├── UnknownSession          the server does not know who is speaking
    ├── MasterStopped           the server has ended for good, with the process that had started it
    ├── LimitExceeded           more than the server agrees to keep
    └── RoundFailed             one exchange failed, for everyone in it
        ├── RoundMismatch       the contributions do not fit together
        ├── ContributionConflict  other bytes under an identity that was already used
        ├── NonFinite           somebody brought NaN or infinity, which the job refuses
        ├── RoundTimeout        somebody did not arrive before the deadline
        └── ReplicaLost         a member left, died, or raised
"""

from typing import ClassVar

from statsd_bn.error_text import broken
from statsd_bn.text import readable, readable_within


class StatsdBNError(Exception):
    """Base of all errors of the project.

    Args:
        message: what was expected and what came, for a person.
        fields: the same facts for a program (ints, strings, lists of these).
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, /, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __str__(self) -> str:
        """Returns the message for a terminal, a log or a list: its first line is short."""
        return broken(self.message)


class ConfigurationError(StatsdBNError, ValueError):
    """What the caller gave is wrong: an argument, a flag or an environment variable."""

    code = "configuration"


class BindError(StatsdBNError):
    """The server cannot listen on an endpoint. Fields: endpoint."""

    code = "bind"


class ConnectionClosed(StatsdBNError):
    """The connection was closed, or was opened by another process (before a fork)."""

    code = "connection_closed"


class ServerUnreachable(StatsdBNError):
    """No answer came from the endpoint. Fields: endpoint, seconds."""

    code = "unreachable"


class AuthenticationRefused(StatsdBNError):
    """The server and this client do not accept each other's keys, or one of them has none. Fields: reason."""

    code = "authentication"


class ProtocolError(StatsdBNError):
    """A frame, or one of its fields, breaks docs/protocol.md."""

    code = "protocol"


class VersionMismatch(ProtocolError):
    """The frame is of another protocol version. Fields: expected, got."""

    code = "version"


class RegistrationRefused(StatsdBNError):
    """The server does not take this member."""

    code = "refused"


class DuplicateMember(RegistrationRefused):
    """Another live process is registered as this member. Fields: job, group, member, place."""

    code = "duplicate_member"


class WorldSizeMismatch(RegistrationRefused):
    """The members disagree on how many they are, or are more. Fields: job, group, member, expected, got."""

    code = "world_size"


class StaleEpoch(RegistrationRefused):
    """A newer life of the group has begun. Fields: job, group, expected, got."""

    code = "stale_epoch"


class GroupIncomplete(RegistrationRefused):
    """The group did not fill, or its members did not come back for another pass, in time.

    Fields: job, group, size, present, and in the world missing, by number.
    """

    code = "group_incomplete"


class UnknownSession(StatsdBNError):
    """The server does not know who is speaking, because it was restarted; members say so. Fields: digest."""

    code = "unknown_session"


class MasterStopped(StatsdBNError):
    """The server has ended for good, with the process that had started it, while members needed it."""

    code = "master_stopped"


class LimitExceeded(StatsdBNError):
    """More than the server agrees to keep. Fields: limit, what."""

    code = "limit"


class RoundFailed(StatsdBNError):
    """One exchange failed for everyone in it. Fields: the parts of its key.

    Where a member raised instead of giving its value to `mp_sync`: member, cause.
    """

    code = "round_failed"


class RoundMismatch(RoundFailed):
    """The contributions of the members do not fit together.

    Fields where they differ in shape: the key's, expected, got, member. Where the members wait for one another in
    different places: the key's (only job and group while a group fills); table: for each place, the most crowded first,
    its members, nr_members, seconds, group, and where they wait in a round step, layer, call, phase, or in a collective
    of torch stack; places: how many there are, since the table is cut. Among the replicas of one process: replicas. Of
    the values or keys of `mp_sync`: none.
    """

    code = "mismatch"


class ContributionConflict(RoundFailed):
    """Other bytes came under an identity that was already used. Fields: the key's, member."""

    code = "conflict"


class NonFinite(RoundFailed):
    """Some ranks brought NaN or infinity, where `on_nonfinite="raise"` was asked for.

    Fields: the key's, members, names, spoilt_channels, channels, kinds.
    """

    code = "non_finite"


class RoundTimeout(RoundFailed):
    """Somebody did not arrive before the deadline. Fields: the key's, missing, waiting, seconds.

    Where the server did not answer at all: the key's, seconds.
    """

    code = "timeout"


class ReplicaLost(RoundFailed):
    """A member left the group, died, raised, or was taken for lost; it may be the one that is told.

    Fields: job, group, member, step, cause.
    """

    code = "replica_lost"


def _tree(root: type[StatsdBNError]) -> list[type[StatsdBNError]]:
    return [root, *(leaf for branch in root.__subclasses__() for leaf in _tree(branch))]


BY_CODE = {error.code: error for error in _tree(StatsdBNError)}


def from_wire(code: str, message: str, fields: dict[str, object]) -> StatsdBNError:
    """Returns the error that `code` names; an unknown code (a newer server's) gives the base class.

    It ends on somebody's terminal, so all that is not printable in its texts is escaped, line feeds and tabs excepted.
    """
    return BY_CODE.get(code, StatsdBNError)(readable(message), **readable_within(fields))
