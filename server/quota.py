"""Quota: how much the server takes, keeps and waits for; each limit an option with a default and a reason.

The protocol's own limits (docs/protocol.md) are the highest values: both sides rely on them. An option lowers them for
one server. What is beyond one is answered with a `limit` Failure, and counted.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from server.past import Name
from statsd_bn import limits
from statsd_bn.errors import ConfigurationError, LimitExceeded
from statsd_bn.messages import Contribution, Register
from statsd_bn.rows import Rows

# What a contribution keeps beside its numbers: objects, its key, and its place in the round.
OVERHEAD_BYTES = 1024

# Frames of one connection that wait to be read, by the peer or by the server: a member has one or two in flight.
SEND_HIGH_WATER_MARK = 64


def _option(default: float, most: float, reason: str, least: float = 1) -> Any:
    return field(default=default, metadata={"least": least, "most": most, "reason": reason})


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one server; every field is a flag of `python -m server` and a variable STATSD_BN_*.

    Raises:
        ConfigurationError: a value is outside of what the protocol allows.
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
    max_key_groups: int = _option(
        256, limits.MAX_GROUPS, "groups that members with one key may be in, so that one tenant leaves room for others"
    )
    max_open_rounds: int = _option(
        limits.MAX_OPEN_ROUNDS, limits.MAX_OPEN_ROUNDS, "open rounds of a group; each thread of a member opens one"
    )
    max_job_bytes: int = _option(
        2**30, 2**44, "bytes kept for a job: 256 members at 2,048 channels keep 80 MB, a stranger all that there are"
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
        "messages refused on one connection in a quarter of a second, before it is closed if no member has spoken over "
        "it; after a restart a member in every group there may be needs as many",
    )
    handshake_seconds: float = _option(
        10.0, 30.0, "time for a connection's handshake; it takes milliseconds, over a bad network a second", least=0.1
    )
    idle_seconds: float = _option(
        60.0, 86_400.0, "time that a connection may be silent over which no member has spoken yet", least=0.1
    )

    silence_seconds: float = _option(
        limits.SILENCE_SECONDS,
        limits.MAX_DEADLINE,
        "time that a member may be silent before it is taken for lost; 20 on a network that loses every fifth packet",
        least=2 * limits.HEARTBEAT_SECONDS,
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value, least, most = getattr(self, option.name), option.metadata["least"], option.metadata["most"]
            if not least <= value <= most:
                name = option.name.replace("_", "-")
                raise ConfigurationError(f"{name}: expected {least:g} to {most:.15g}, got {value:.15g}")

    @property
    def narrows_contributions(self) -> bool:
        """Whether a contribution that the protocol allows may be too large."""
        return (
            self.max_name_bytes < limits.MAX_NAME_BYTES
            or self.max_channels < limits.MAX_CHANNELS
            or self.max_replicas < limits.MAX_REPLICAS
        )


@dataclass(slots=True)
class Tally:
    """What was refused since the server began, for the status report.

    Attributes:
        over_limits: messages answered with a `limit` Failure.
        strangers: messages of sessions that are unknown, or have ended.
        refused_connections: handshakes that failed, for want of a known key or of any sense.
        idle_connections: connections closed because no member spoke over them.
        flooding_connections: connections closed because too much had to be refused.
        dropped_answers: answers to peers that did not read, or had gone.
        forged_results: aggregates that members told of after a restart and that this server had not made.
    """

    over_limits: int = 0
    strangers: int = 0
    refused_connections: int = 0
    idle_connections: int = 0
    flooding_connections: int = 0
    dropped_answers: int = 0
    forged_results: int = 0


class Budget:
    """The quota, and what is used of it; one for all groups of a server.

    Args:
        quota: the limits.

    Attributes:
        quota: the limits.
        tally: what was refused.
        narrows_contributions: whether a contribution that the protocol allows may be too large.
    """

    def __init__(self, quota: Quota | None = None) -> None:
        self.quota = quota or Quota()
        self.tally = Tally()
        # Asked for each frame.
        self._max_frame_bytes, self._max_job_bytes = self.quota.max_frame_bytes, self.quota.max_job_bytes
        self.narrows_contributions = self.quota.narrows_contributions
        self._kept: dict[str, int] = {}

    def exceeded(self, text: str, limit: int, what: str) -> LimitExceeded:
        """Counts a refusal, and returns its error."""
        self.tally.over_limits += 1
        return LimitExceeded(text, limit=limit, what=what)

    def check_frame(self, frame: bytes) -> None:
        """Raises LimitExceeded for a frame that is too large."""
        if len(frame) > self._max_frame_bytes:
            self._check("frame", len(frame), self._max_frame_bytes, "bytes")

    def check_registration(self, register: Register) -> None:
        """Raises LimitExceeded for a name that is too long, or a group that is too big."""
        self._check("job", len(register.job.encode()), self.quota.max_name_bytes, "bytes in its name")
        self._check("group", len(register.group.encode()), self.quota.max_name_bytes, "bytes in its name")
        self._check("group", register.world_size, self.quota.max_members, "members")
        # Members of an elastic group may have any number, and so make it larger than it began.
        self._check("member number", register.member + 1, self.quota.max_members, "members")

    def check_contribution(self, contribution: Contribution) -> None:
        """Raises LimitExceeded for a contribution that is too large."""
        shape = contribution.rows.values.shape
        self._check("layer", len(contribution.key.layer.encode()), self.quota.max_name_bytes, "bytes in its name")
        self._check("contribution", shape[2], self.quota.max_channels, "channels")
        self._check("contribution", shape[0], self.quota.max_replicas, "replicas")

    def check_room(self, job: str, size: int) -> None:
        """Raises LimitExceeded where a job would keep too many bytes."""
        if self.kept(job) + size > self._max_job_bytes:
            raise self._no_room(job, size)

    def take(self, job: str, size: int) -> None:
        """Keeps bytes for a job.

        Raises:
            LimitExceeded: they would be too many.
        """
        kept = self._kept.get(job, 0) + size
        if kept > self._max_job_bytes:
            raise self._no_room(job, size)
        self._kept[job] = kept

    def keep(self, job: str, size: int) -> None:
        """Takes note of bytes that are kept for a job, or with a size below zero no longer are."""
        kept = self._kept.get(job, 0) + size
        if kept:
            self._kept[job] = kept
        else:
            self._kept.pop(job, None)

    def kept(self, job: str) -> int:
        """Returns how many bytes are kept for a job."""
        return self._kept.get(job, 0)

    def check_new_group(self, name: Name, groups: list[Name], of_key: int) -> None:
        """Raises LimitExceeded where a new group would be one too many, or its job.

        Args:
            name: of the new one.
            groups: those there are.
            of_key: in how many of them the newcomer's key has members.
        """
        if of_key >= self.quota.max_key_groups:
            raise self.exceeded(
                f"the members with this key are in {of_key} groups already",
                self.quota.max_key_groups,
                "groups of a key",
            )
        if len(groups) >= self.quota.max_groups:
            raise self.exceeded(f"the server has {len(groups)} groups already", self.quota.max_groups, "groups")
        jobs = {job for job, _ in groups}
        if name[0] not in jobs and len(jobs) >= self.quota.max_jobs:
            raise self.exceeded(f"the server has {len(jobs)} jobs already", self.quota.max_jobs, "jobs")

    def _no_room(self, job: str, size: int) -> LimitExceeded:
        return self.exceeded(
            f"job {job!r} keeps {self.kept(job)} bytes here, and {size} more are above the limit of "
            f"{self._max_job_bytes}; raise --max-job-bytes if the job is in its right",
            self._max_job_bytes,
            "bytes kept for a job",
        )

    def _check(self, what: str, got: int, most: int, unit: str) -> None:
        if got > most:
            raise self.exceeded(f"{what}: expected at most {most} {unit}, got {got}", most, f"{what}: {unit}")


def size_of(rows: Rows) -> int:
    """Returns how many bytes a contribution takes while it is kept."""
    return rows.values.nbytes + OVERHEAD_BYTES
