"""Access: the identity of each accepted key, and the jobs that it may join."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

REVOKED = "its key was revoked"  # cause of the loss of a member whose key may no longer join the job
OPERATOR = "(operator)"  # not a valid client name


@dataclass(frozen=True, slots=True)
class Principal:
    """Identity and rights of a client key."""

    name: str
    key: str  # empty without CURVE
    jobs: tuple[str, ...] = ("*",)  # `fnmatch` patterns of the jobs that it may join and see
    tenant: str = ""  # account of its memory and requests, which several keys may share; default: its name
    read_only: bool = False  # whether it may only see these jobs, not join them

    def may_access(self, job: str) -> bool:
        """Whether it may see a job, and join it unless `read_only`."""
        return any(fnmatchcase(job, pattern) for pattern in self.jobs)

    def tenant_of(self, job: str) -> str:
        """Account that a job's memory counts for."""
        return f"tenant {self.tenant or self.name!r}" if self.key else f"job {job!r}"


ANONYMOUS = Principal("anybody", "")  # of all connections to a server without keys
