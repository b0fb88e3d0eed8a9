"""Access: which keys are let in, and for which jobs."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from statsd_bn.errors import AuthenticationRefused, ConfigurationError
from statsd_bn.keys import PublicKey

# Cause of the loss of a member whose key is no longer let in, or no longer for its job.
REVOKED = "its key was revoked"

# No client can have this name.
OPERATOR = "(operator)"


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a key; its sessions and its jobs are its own.

    Attributes:
        name: of the client, for people.
        key: its public key; empty where the server asks for none.
        jobs: patterns of the names of jobs that it may join and see.
        account: the name that its bytes and its time are counted under; several keys may share one.
        only_asks: whether it may join no job, only see them.
    """

    name: str
    key: str
    jobs: tuple[str, ...]
    account: str = ""
    only_asks: bool = False

    def may(self, job: str) -> bool:
        """Whether it may join a job, and see it."""
        return any(fnmatchcase(job, pattern) for pattern in self.jobs)

    def owner(self, job: str) -> str:
        """Owner that a job is counted for, see `server.security.quota`."""
        return f"tenant {self.account or self.name!r}" if self.key else f"job {job!r}"


ANYBODY = Tenant("anybody", "", ("*",))
"""The owner of every connection to a server without keys."""


class Access:
    """The keys that are let in.

    Args:
        clients: one for each key.
        operator: the public key that may ask about all jobs and join none; "" for none.

    Attributes:
        names: of the clients that are let in.

    Raises:
        ConfigurationError: two clients have one key.
    """

    def __init__(self, clients: Iterable[PublicKey], operator: str = "") -> None:
        self._tenants: dict[str, Tenant] = {}
        for client in clients:
            if other := self._tenants.get(client.key):
                raise ConfigurationError(
                    f"curve: expected a key of its own for each client, got one for {other.name!r} and {client.name!r}"
                )
            self._tenants[client.key] = Tenant(client.name, client.key, client.jobs, client.tenant)
        self.names = {tenant.name for tenant in self._tenants.values()}
        if operator:
            self._tenants[operator] = Tenant(OPERATOR, operator, ("*",), only_asks=True)

    @property
    def keys(self) -> set[str]:
        """All public keys that are let in."""
        return set(self._tenants)

    def tenant(self, key: str) -> Tenant | None:
        """Owner of a key; None if the key is not let in."""
        return self._tenants.get(key)

    def allows(self, key: str, job: str) -> bool:
        """Whether a key may take part in a job."""
        tenant = self._tenants.get(key)
        return tenant is not None and tenant.may(job)


def revoked() -> AuthenticationRefused:
    """Error for a client whose key was let in before, and no longer is."""
    return AuthenticationRefused("authentication refused: the server no longer lets this key in", reason="revoked")
