"""Quota: limits on sizes, memory and times; each is an option with a reason.

The limits of the protocol (docs/protocol.md) are the maximum values, because both sides rely on them. An option lowers
one for this server. The server answers excess with a `limit` Failure and counts it.

Memory is accounted per tenant. Without keys any client can claim any name, so each job has its own account. Errors show
the account's name: "job 'digits'", "tenant 'team-a'".
"""

from dataclasses import Field, dataclass, field, fields
from typing import Any

from statsd_bn import limits
from statsd_bn.checks import short_repr
from statsd_bn.errors import ConfigurationError, LimitExceeded
from statsd_bn.messages import Register
from statsd_bn.reduction import Rows
from statsd_bn.round_key import RoundKey

# Unread frames of one connection in each direction: a member has one or two in flight.
SEND_HIGH_WATER_MARK = 64

# Memory of objects, measured with tracemalloc with names of maximum length, and rounded up.

# A contribution without its values: 0.4 kB.
CONTRIBUTION_BYTES = 1024

# A round before its first contribution: 0.8 kB, and up to 0.8 kB for its key.
ROUND_BYTES = 2048

# A round's future for each member: 94 bytes.
FUTURE_BYTES = 128

# A member: contributor, session record, liveness and reports, 2.5 kB.
MEMBER_BYTES = 3072

# A group without members: 6.5 kB.
GROUP_BYTES = 8192

# An expected member after a server restart: a number in a set.
EXPECTED_BYTES = 96

# A run of ranks in a result: two small tuples.
RUN_BYTES = 128


def _option(default: float, most: float, reason: str, least: float = 1) -> Any:
    return field(default=default, metadata={"least": least, "most": most, "reason": reason})


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one server; each field is a flag of `python -m server` and a variable STATSD_BN_*.

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
        256, limits.MAX_GROUPS, "groups of one tenant, but at most as many as are free for others"
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
        "unread messages of a connection in each direction; a member has one or two",
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
                raise ConfigurationError(f"{name}: expected {option_range(option)}, got {short_repr(value)}")

    @property
    def narrows_contributions(self) -> bool:
        """Whether a contribution within the protocol's limits may exceed one of these."""
        return (
            self.max_name_bytes < limits.MAX_NAME_BYTES
            or self.max_channels < limits.MAX_CHANNELS
            or self.max_replicas < limits.MAX_REPLICAS
        )


def option_range(option: "Field[Any]") -> str:
    """Text of the range of an option of `Quota`."""
    return f"{option.metadata['least']:g} to {option.metadata['most']:.15g}"


@dataclass(slots=True)
class Counters:
    """Refusals since the start, for the status report.

    Attributes:
        over_limits: messages answered with a `limit` Failure.
        strangers: messages of unregistered sessions.
        refused_connections: failed handshakes: unknown keys or malformed data.
        idle_connections: connections closed after the idle timeout.
        flooding_connections: connections closed after too many refusals.
        dropped_answers: replies to peers that did not read or had disconnected.
    """

    over_limits: int = 0
    strangers: int = 0
    refused_connections: int = 0
    idle_connections: int = 0
    flooding_connections: int = 0
    dropped_answers: int = 0


class QuotaUsage:
    """The quota and its use by all groups of a server.

    Attributes:
        counters: refusals since the start.
        allocated: bytes of all tenants.
        allocated_by_tenant: bytes by tenant.
        narrows_contributions: as in `Quota`.
    """

    def __init__(self, quota: Quota | None = None) -> None:
        self.quota = quota or Quota()
        self.counters = Counters()
        self.allocated = 0
        self.allocated_by_tenant: dict[str, int] = {}
        self.narrows_contributions = self.quota.narrows_contributions

    def exceeded(self, text: str, limit: int, what: str) -> LimitExceeded:
        """Count a refusal; returns its error."""
        self.counters.over_limits += 1
        return LimitExceeded(text, limit=limit, what=what)

    def check_frame(self, frame: bytes) -> None:
        """Raise LimitExceeded for a frame that is too large."""
        self._check("frame", len(frame), "max_frame_bytes", "bytes")

    def check_registration(self, register: Register) -> None:
        """Raise LimitExceeded for a name that is too long or a group that is too large."""
        self._check("job", len(register.job.encode()), "max_name_bytes", "bytes in its name")
        self._check("group", len(register.group.encode()), "max_name_bytes", "bytes in its name")
        self._check("group", register.world_size, "max_members", "members")
        # A member of an elastic group may have any rank, and so enlarge the group.
        self._check("rank", register.member + 1, "max_members", "members")

    def check_contribution(self, key: RoundKey, shape: tuple[int, ...]) -> None:
        """Raise LimitExceeded for a contribution that is too large; `shape` is (replicas, vectors, channels)."""
        self._check("layer", len(key.layer.encode()), "max_name_bytes", "bytes in its name")
        self._check("contribution", shape[2], "max_channels", "channels")
        self._check("contribution", shape[0], "max_replicas", "replicas")

    def check_memory(self, tenant: str, size: int) -> None:
        """Raise LimitExceeded if a tenant or the server would exceed its memory limit."""
        held, quota = self.allocated_by_tenant.get(tenant, 0), self.quota
        if held + size > quota.max_tenant_bytes:
            raise self.exceeded(
                f"{tenant} holds {held} bytes, and {size} more exceed the limit of "
                f"{quota.max_tenant_bytes}; raise --max-tenant-bytes if this is intended",
                quota.max_tenant_bytes,
                "bytes kept for a tenant",
            )
        if self.allocated + size > quota.max_server_bytes:
            raise self.exceeded(
                f"the server holds {self.allocated} bytes, and {size} more for {tenant} exceed the limit of "
                f"{quota.max_server_bytes}; raise --max-server-bytes if there is memory for it",
                quota.max_server_bytes,
                "bytes kept in all",
            )

    def check_groups(self, groups: int, jobs: int, *, is_job_new: bool) -> None:
        """Raise LimitExceeded if another group exceeds the server's limits on groups and jobs."""
        for what, number, most in (
            ("jobs", jobs + is_job_new, self.quota.max_jobs),
            ("groups", groups + 1, self.quota.max_groups),
        ):
            if number > most:
                raise self.exceeded(
                    f"the server has reached its limit of {most} {what}; raise --max-{what}", most, what
                )

    def check_tenant_groups(self, tenant: str, its_groups: int, groups: int) -> None:
        """Raise LimitExceeded if a tenant has too many groups, or as many as are free for the others."""
        most = min(self.quota.max_tenant_groups, self.quota.max_groups - groups)
        if its_groups >= most:
            what = "groups of a tenant"
            raise self.exceeded(f"{tenant} has {its_groups} groups, at most {most} are allowed", most, what)

    def _check(self, what: str, got: int, limit: str, unit: str) -> None:
        if got > (most := getattr(self.quota, limit)):
            text = f"{what}: expected at most {most} {unit}, got {got}; raise --{limit.replace('_', '-')}"
            raise self.exceeded(text, most, f"{what}: {unit}")


class MemoryShare:
    """The memory of one group, as a share of its tenant's and the server's.

    Attributes:
        allocated: bytes of the group.
    """

    def __init__(self, usage: QuotaUsage, tenant: str) -> None:
        self.allocated = 0
        self._usage = usage
        self._tenant = tenant

    def check(self, size: int) -> None:
        """Raise LimitExceeded if so many further bytes are not available."""
        self._usage.check_memory(self._tenant, size)

    def allocate(self, size: int) -> None:
        """Allocate bytes; raises LimitExceeded if they are not available."""
        self._usage.check_memory(self._tenant, size)
        self.adjust(size)

    def adjust(self, size: int) -> None:
        """Allocate bytes without a check; a negative size releases bytes."""
        self.allocated += size
        usage, tenant = self._usage, self._tenant
        usage.allocated += size
        if left := usage.allocated_by_tenant.get(tenant, 0) + size:
            usage.allocated_by_tenant[tenant] = left
        else:
            usage.allocated_by_tenant.pop(tenant, None)

    def release_all(self) -> None:
        """Release all bytes."""
        self.adjust(-self.allocated)


def size_of(rows: Rows) -> int:
    """Memory of a stored contribution in bytes."""
    return rows.values.nbytes + CONTRIBUTION_BYTES
