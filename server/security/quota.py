"""Quota: how much the server accepts and keeps, and how long it waits; each limit is an option with a reason.

The protocol's own limits (docs/protocol.md) are the highest values: both sides rely on them. An option lowers one for
this server. What exceeds a limit is answered with a `limit` Failure, and counted.

Bytes are kept for owners. With keys each tenant is one; without keys anybody can claim to be anybody, and each job is
one. Errors show an owner's name as it is: "job 'digits'", "tenant 'team-a'".
"""

from dataclasses import Field, dataclass, field, fields
from typing import Any

from statsd_bn import limits
from statsd_bn.checks import shown
from statsd_bn.errors import ConfigurationError, LimitExceeded
from statsd_bn.messages import Register
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows

# Frames of one connection that wait to be read, by the peer or by the server: a member has one or two in flight.
SEND_HIGH_WATER_MARK = 64

# What objects take, measured with tracemalloc and rounded up, with names and addresses of the greatest length.

# A contribution beside its numbers: 0.4 kB.
CONTRIBUTION_BYTES = 1024

# A round before its first contribution: 0.8 kB, and its key may have 0.8 more.
ROUND_BYTES = 2048

# What a round keeps for each member it waits for: 94 bytes.
FUTURE_BYTES = 128

# A member: what its group knows of it, its record and its pulse, and what it tells, 2.5 kB.
MEMBER_BYTES = 3072

# A group without members: 6.5 kB.
GROUP_BYTES = 8192

# A member that others have named after a restart of the server, before it is back: a number in a set.
NAMED_BYTES = 96

# A run in a set of members that a result names: two small tuples.
RUN_BYTES = 128


def _option(default: float, most: float, reason: str, least: float = 1) -> Any:
    return field(default=default, metadata={"least": least, "most": most, "reason": reason})


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one server; every field is a flag of `python -m server` and a variable STATSD_BN_*.

    Raises:
        ConfigurationError: the protocol does not allow a value.
    """

    max_frame_bytes: int = _option(
        limits.MAX_FRAME_BYTES,
        limits.MAX_FRAME_BYTES,
        "size of a message; the default takes 64 replicas at 16,384 channels",
        least=1024,
    )
    max_name_bytes: int = _option(
        limits.MAX_NAME_BYTES, limits.MAX_NAME_BYTES, "length of the name of a job, group or layer; they fill logs"
    )
    max_channels: int = _option(limits.MAX_CHANNELS, limits.MAX_CHANNELS, "channels of a layer; the widest have 8,192")
    max_replicas: int = _option(limits.MAX_REPLICAS, limits.MAX_REPLICAS, "replicas of one member; a host has 16 GPUs")
    max_members: int = _option(
        limits.MAX_MEMBERS, limits.MAX_MEMBERS, "members of a group; each is answered in every round"
    )
    max_jobs: int = _option(limits.MAX_GROUPS, limits.MAX_GROUPS, "jobs at a time; each has a group at least")
    max_groups: int = _option(limits.MAX_GROUPS, limits.MAX_GROUPS, "groups of all jobs; each keeps some 0.2 MB")
    max_tenant_groups: int = _option(
        256, limits.MAX_GROUPS, "groups that members of one tenant may be in, and no more than are free for others"
    )
    max_open_rounds: int = _option(
        limits.MAX_OPEN_ROUNDS, limits.MAX_OPEN_ROUNDS, "open rounds of a group; each thread of a member opens one"
    )
    max_server_bytes: int = _option(
        2**29, 2**44, "bytes kept in all; the process takes some 120 MB more, and a container is best given twice this"
    )
    max_tenant_bytes: int = _option(
        3 * 2**27,
        2**44,
        "bytes kept for a tenant, or without keys for a job: 1,024 members at 2,048 channels keep 320 MB. With keys it "
        "should be below --max-server-bytes, or one tenant can take all the room",
    )
    max_unread: int = _option(
        SEND_HIGH_WATER_MARK,
        SEND_HIGH_WATER_MARK,
        "messages that wait on a connection whose peer, or the server, does not read; a member has one or two",
        least=2,
    )
    max_refusals: int = _option(
        limits.MAX_GROUPS,
        2**20,
        "messages refused on one connection in a quarter of a second, before it is closed; after a restart a member in "
        "every group there may be needs as many",
    )
    silence_seconds: float = _option(
        limits.SILENCE_SECONDS,
        limits.MAX_DEADLINE,
        "time that a member may be silent before it is taken for lost; 20 on a network that loses every fifth packet",
        least=2 * limits.HEARTBEAT_SECONDS,
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if not option.metadata["least"] <= value <= option.metadata["most"]:
                name = option.name.replace("_", "-")
                raise ConfigurationError(f"{name}: expected {span(option)}, got {shown(value)}")

    @property
    def narrows_contributions(self) -> bool:
        """Whether a contribution that the protocol allows may exceed a limit here."""
        return (
            self.max_name_bytes < limits.MAX_NAME_BYTES
            or self.max_channels < limits.MAX_CHANNELS
            or self.max_replicas < limits.MAX_REPLICAS
        )


def span(option: "Field[Any]") -> str:
    """The values of an option of `Quota` that the protocol allows, in words."""
    return f"{option.metadata['least']:g} to {option.metadata['most']:.15g}"


@dataclass(slots=True)
class Tally:
    """What was refused since the server started, for the status report.

    Attributes:
        over_limits: messages answered with a `limit` Failure.
        strangers: messages of sessions that are not registered.
        refused_connections: handshakes that failed: an unknown key, or garbage.
        idle_connections: connections closed because no member spoke over them.
        flooding_connections: connections closed because too much had to be refused.
        dropped_answers: answers to peers that did not read, or had gone.
    """

    over_limits: int = 0
    strangers: int = 0
    refused_connections: int = 0
    idle_connections: int = 0
    flooding_connections: int = 0
    dropped_answers: int = 0


class Budget:
    """The quota, and what is used of it; one for all groups of a server.

    Args:
        quota: the limits.

    Attributes:
        quota: the limits.
        tally: what was refused.
        held: how many bytes are kept.
        held_of: the same by owner.
        narrows_contributions: whether a contribution that the protocol allows may be too large.
    """

    def __init__(self, quota: Quota | None = None) -> None:
        self.quota = quota or Quota()
        self.tally = Tally()
        self.held = 0
        self.held_of: dict[str, int] = {}
        self.narrows_contributions = self.quota.narrows_contributions

    def exceeded(self, text: str, limit: int, what: str) -> LimitExceeded:
        """Count a refusal, and return its error."""
        self.tally.over_limits += 1
        return LimitExceeded(text, limit=limit, what=what)

    def check_frame(self, frame: bytes) -> None:
        """Refuse a frame that is too large, with LimitExceeded."""
        self._check("frame", len(frame), self.quota.max_frame_bytes, "bytes")

    def check_registration(self, register: Register) -> None:
        """Refuse a name that is too long, or a group that is too big, with LimitExceeded."""
        self._check("job", len(register.job.encode()), self.quota.max_name_bytes, "bytes in its name")
        self._check("group", len(register.group.encode()), self.quota.max_name_bytes, "bytes in its name")
        self._check("group", register.world_size, self.quota.max_members, "members")
        # A member of an elastic group may have any rank, and so make the group larger than it began.
        self._check("rank", register.member + 1, self.quota.max_members, "members")

    def check_contribution(self, key: RoundKey, shape: tuple[int, ...]) -> None:
        """Refuse a contribution that is too large, with LimitExceeded; `shape` is that of its values."""
        self._check("layer", len(key.layer.encode()), self.quota.max_name_bytes, "bytes in its name")
        self._check("contribution", shape[2], self.quota.max_channels, "channels")
        self._check("contribution", shape[0], self.quota.max_replicas, "replicas")

    def check_room(self, owner: str, size: int) -> None:
        """Refuse to keep more bytes than allowed, for an owner or in all, with LimitExceeded."""
        held, quota = self.held_of.get(owner, 0), self.quota
        if held + size > quota.max_tenant_bytes:
            raise self.exceeded(
                f"{owner} keeps {held} bytes here, and {size} more are above the limit of "
                f"{quota.max_tenant_bytes}; raise --max-tenant-bytes if this is legitimate",
                quota.max_tenant_bytes,
                "bytes kept for a tenant",
            )
        if self.held + size > quota.max_server_bytes:
            raise self.exceeded(
                f"the server keeps {self.held} bytes, and {size} more for {owner} are above the limit of "
                f"{quota.max_server_bytes}; raise --max-server-bytes if there is memory for it",
                quota.max_server_bytes,
                "bytes kept in all",
            )

    def check_groups(self, groups: int, jobs: int, *, is_job_new: bool) -> None:
        """Refuse another group, with LimitExceeded, if the server has so many groups and jobs already."""
        for what, number, most in (
            ("jobs", jobs + is_job_new, self.quota.max_jobs),
            ("groups", groups + 1, self.quota.max_groups),
        ):
            if number > most:
                raise self.exceeded(f"the server has as many {what} as it may have, {most}", most, what)

    def check_tenant_groups(self, owner: str, its_groups: int, groups: int) -> None:
        """Refuse a tenant's next group, with LimitExceeded: it has too many, or as many as are left for others.

        Args:
            owner: the tenant.
            its_groups: how many of the groups it began.
            groups: how many there are.
        """
        most = min(self.quota.max_tenant_groups, self.quota.max_groups - groups)
        if its_groups >= most:
            what = "groups of a tenant"
            raise self.exceeded(f"{owner} has {its_groups} groups already, the limit is {most}", most, what)

    def _check(self, what: str, got: int, most: int, unit: str) -> None:
        if got > most:
            raise self.exceeded(f"{what}: expected at most {most} {unit}, got {got}", most, f"{what}: {unit}")


class Room:
    """The bytes that one group keeps.

    Args:
        budget: what the server agrees to keep.
        owner: whose group it is.

    Attributes:
        held: how many there are.
    """

    def __init__(self, budget: Budget, owner: str) -> None:
        self.held = 0
        self._budget = budget
        self._owner = owner

    def check(self, size: int) -> None:
        """Refuse so many bytes more, with LimitExceeded, if there is no room for them."""
        self._budget.check_room(self._owner, size)

    def take(self, size: int) -> None:
        """Count bytes that are kept, or refuse them with LimitExceeded."""
        self._budget.check_room(self._owner, size)
        self.keep(size)

    def keep(self, size: int) -> None:
        """Count bytes that are kept, without a check; a negative size gives bytes back."""
        self.held += size
        budget, owner = self._budget, self._owner
        budget.held += size
        if left := budget.held_of.get(owner, 0) + size:
            budget.held_of[owner] = left
        else:
            budget.held_of.pop(owner, None)

    def empty(self) -> None:
        """Give all bytes back."""
        self.keep(-self.held)


def size_of(rows: Rows) -> int:
    """Bytes that a contribution takes while it is kept."""
    return rows.values.nbytes + CONTRIBUTION_BYTES
