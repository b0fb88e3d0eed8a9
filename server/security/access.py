"""Access: the accepted keys, and the jobs that each may join."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from statsd_bn.errors import AuthenticationRefused, ConfigurationError
from statsd_bn.keys import PublicKey

# Cause of a loss after the key was revoked for the job.
REVOKED = "its key was revoked"

# Not a valid client name.
OPERATOR = "(operator)"


@dataclass(frozen=True, slots=True)
class Principal:
    """Identity and rights of a client key.

    Attributes:
        name: display name of the client.
        key: its public key; empty without CURVE.
        jobs: patterns of the jobs that it may join and see.
        tenant: tenant that its memory and requests count for; several keys may share one.
        read_only: whether it may see jobs but join none.
    """

    name: str
    key: str
    jobs: tuple[str, ...]
    tenant: str = ""
    read_only: bool = False

    def may_access(self, job: str) -> bool:
        """Whether it may join and see a job."""
        return any(fnmatchcase(job, pattern) for pattern in self.jobs)

    def tenant_of(self, job: str) -> str:
        """Account that a job counts for, see `server.security.quota`."""
        return f"tenant {self.tenant or self.name!r}" if self.key else f"job {job!r}"


ANONYMOUS = Principal("anybody", "", ("*",))
"""The principal of all connections to a server without keys."""


class Access:
    """The accepted keys.

    Args:
        clients: public keys of the clients.
        operator: public key that may see all jobs and join none; "" for none.

    Attributes:
        names: names of the clients.

    Raises:
        ConfigurationError: two clients have the same key.
    """

    def __init__(self, clients: Iterable[PublicKey], operator: str = "") -> None:
        self._principals: dict[str, Principal] = {}
        for client in clients:
            if other := self._principals.get(client.key):
                raise ConfigurationError(
                    f"curve: expected different keys for all clients, got one for {other.name!r} and {client.name!r}"
                )
            self._principals[client.key] = Principal(client.name, client.key, client.jobs, client.tenant)
        self.names = {tenant.name for tenant in self._principals.values()}
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
