"""Quota: limits on sizes, memory and times; each is an option, within the limits of the protocol (docs/protocol.md).

The server answers a message beyond a limit with a `limit` Failure and counts it. Memory is accounted per tenant;
without keys clients have no tenant, so it is accounted per job.
"""

from dataclasses import Field, dataclass, field, fields
from typing import Any

from statsd_bn import limits
from statsd_bn.checks import short_repr
from statsd_bn.errors import ConfigurationError, LimitExceeded
from statsd_bn.messages import Register
from statsd_bn.reduction import Rows

# Memory of objects in bytes, measured with tracemalloc with names of maximum length, and rounded up.
CONTRIBUTION_BYTES = 1024  # besides its values; measured: 400
ROUND_BYTES = 2048  # before its first contribution: 800, and up to 800 for its key
FUTURE_BYTES = 128  # of each member in a round: 94
MEMBER_BYTES = 3072  # contributor, session record, liveness and reports: 2,500
GROUP_BYTES = 8192  # without members: 6,500
EXPECTED_BYTES = 96  # of an expected member after a server restart: a number in a set
RUN_BYTES = 128  # of a run of consecutive ranks in a result: two small tuples


def _option(default: float, reason: str, most: float | None = None, least: float = 1) -> Any:
    return field(default=default, metadata={"least": least, "most": most or default, "reason": reason})


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one server; each field is a flag of `python -m server` and a variable STATSD_BN_*."""

    max_members: int = _option(limits.MAX_MEMBERS, "members of a group; each is answered in every round")
    max_groups: int = _option(limits.MAX_GROUPS, "groups of all jobs; each keeps some 0.2 MB")
    max_tenant_groups: int = _option(
        256, "groups of one tenant; a tenant with n groups gets another only if more than n are free", limits.MAX_GROUPS
    )
    max_server_bytes: int = _option(
        2**29,
        "total bytes kept; the process needs up to 120 MB more, 64 of them for unread answers: give a container twice "
        "the limit, at least 256 MB",
        2**44,
    )
    max_tenant_bytes: int = _option(
        3 * 2**27,
        "bytes kept for a tenant, or without keys for a job: 1,024 members with 2,048 channels need 320 MB. With keys, "
        "set it below --max-server-bytes, or one tenant can use all memory",
        2**44,
    )
    silence_seconds: float = _option(
        limits.SILENCE_SECONDS,
        "seconds of silence after which a member is lost; use 20 on a network that loses every fifth packet",
        limits.MAX_DEADLINE,
        least=2 * limits.HEARTBEAT_SECONDS,
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if not option.metadata["least"] <= value <= option.metadata["most"]:
                name = option.name.replace("_", "-")
                raise ConfigurationError(f"{name}: expected {option_range(option)}, got {short_repr(value)}")


def option_range(option: "Field[Any]") -> str:
    """Text of the range of an option of `Quota`."""
    return f"{option.metadata['least']:g} to {option.metadata['most']:.15g}"


@dataclass(slots=True)
class Counters:
    """Refusals since the start, for the status report."""

    over_limits: int = 0  # messages answered with a `limit` Failure
    strangers: int = 0  # messages of unregistered sessions
    refused_connections: int = 0  # failed handshakes: unknown keys or malformed data
    flooding_connections: int = 0  # connections closed after too many refusals
    dropped_answers: int = 0  # replies to peers that did not read or had disconnected


class QuotaUsage:
    """The quota and its use by all groups of a server."""

    def __init__(self, quota: Quota | None = None) -> None:
        self.quota = quota or Quota()
        self.counters = Counters()  # refusals since the start
        self.allocated = 0  # bytes of all tenants
        self.allocated_by_tenant: dict[str, int] = {}  # bytes by tenant

    def exceeded(self, text: str, limit: int, what: str) -> LimitExceeded:
        """Count a refusal; returns its error."""
        self.counters.over_limits += 1
        return LimitExceeded(text, limit=limit, what=what)

    def check_members(self, register: Register) -> None:
        """Raise LimitExceeded for a group that is too large."""
        most = self.quota.max_members
        # A member of an elastic group may have any rank, and so enlarge the group.
        for what, got in (("group", register.world_size), ("rank", register.member + 1)):
            if got > most:
                text = f"{what}: expected at most {most} members, got {got}; raise --max-members"
                raise self.exceeded(text, most, f"{what}: members")

    def check_groups(self, groups: int) -> None:
        """Raise LimitExceeded if the server already has as many groups as it may."""
        if groups >= (most := self.quota.max_groups):
            text = f"the server has reached its limit of {most} groups; raise --max-groups"
            raise self.exceeded(text, most, "groups")

    def check_tenant_groups(self, tenant: str, its_groups: int, groups: int) -> None:
        """Raise LimitExceeded if a tenant has its maximum of groups, or not fewer than are free on the server."""
        most = min(self.quota.max_tenant_groups, self.quota.max_groups - groups)
        if its_groups >= most:
            what = "groups of a tenant"
            raise self.exceeded(f"{tenant} has {its_groups} groups, at most {most} are allowed", most, what)


class MemoryShare:
    """The memory of one group, which counts toward the limits of its tenant and of the server."""

    def __init__(self, usage: QuotaUsage, tenant: str) -> None:
        self.allocated = 0  # bytes of the group
        self._usage = usage
        self._tenant = tenant

    def check(self, size: int) -> None:
        """Raise LimitExceeded if the tenant or the server would exceed its memory limit."""
        usage, quota, tenant = self._usage, self._usage.quota, self._tenant
        held = usage.allocated_by_tenant.get(tenant, 0)
        if held + size > (most := quota.max_tenant_bytes):
            text = f"{tenant} holds {held} bytes, and {size} more exceed the limit of {most}; raise --max-tenant-bytes"
            raise usage.exceeded(f"{text} if this is intended", most, "bytes kept for a tenant")
        if usage.allocated + size > (most := quota.max_server_bytes):
            text = f"the server holds {usage.allocated} bytes, and {size} more for {tenant} exceed the limit of {most}"
            text += "; raise --max-server-bytes if there is memory for it"
            raise usage.exceeded(text, most, "bytes kept in all")

    def allocate(self, size: int) -> None:
        """Allocate bytes; raises LimitExceeded if they are not available."""
        self.check(size)
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
