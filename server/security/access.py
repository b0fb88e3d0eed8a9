"""Access: the accepted keys, and the jobs that each may join."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from statsd_bn.errors import AuthenticationRefused
from statsd_bn.keys import PublicKey

# Cause of a loss after the key was revoked for the job.
REVOKED = "its key was revoked"

# Not a valid client name.
OPERATOR = "(operator)"


@dataclass(frozen=True, slots=True)
class Principal:
    """Identity and rights of a client key."""

    name: str
    key: str  # empty without CURVE
    jobs: tuple[str, ...]  # patterns of the jobs that it may join and see
    tenant: str = ""  # that its memory and requests count for; several keys may share one
    read_only: bool = False

    def may_access(self, job: str) -> bool:
        """Whether it may join and see a job."""
        return any(fnmatchcase(job, pattern) for pattern in self.jobs)

    def tenant_of(self, job: str) -> str:
        """Account that a job's memory counts for."""
        return f"tenant {self.tenant or self.name!r}" if self.key else f"job {job!r}"


# The principal of all connections to a server without keys.
ANONYMOUS = Principal("anybody", "", ("*",))


class Access:
    """The accepted keys: those of the clients, and the operator's, which may see all jobs and join none."""

    def __init__(self, clients: Iterable[PublicKey], operator: str = "") -> None:
        self._principals = {one.key: Principal(one.name, one.key, one.jobs, one.tenant) for one in clients}
        if operator:
            self._principals[operator] = Principal(OPERATOR, operator, ("*",), read_only=True)

    @property
    def keys(self) -> set[str]:
        """All accepted public keys."""
        return set(self._principals)

    def principal(self, key: str) -> Principal | None:
        """Identity of a key; None if it is not accepted."""
        return self._principals.get(key)

    def allows(self, key: str, job: str) -> bool:
        """Whether a key may join a job."""
        tenant = self._principals.get(key)
        return tenant is not None and tenant.may_access(job)


def revoked() -> AuthenticationRefused:
    """Error for a client with a revoked key."""
    return AuthenticationRefused("authentication refused: this key was revoked", reason="revoked")
