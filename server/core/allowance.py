"""Allowance: how many bytes of long answers each tenant is sent, so that asking does not take the server's time."""

# Bytes that one tenant is sent at once, and then each second: all answers wait while ZeroMQ encrypts them, some 3 ms
# for a megabyte. A report of eight groups of 16 takes 8 kB, so 500 of them fit into a second.
SENT_AT_ONCE, SENT_EACH_SECOND = 2**23, 2**22


class Allowance:
    """That of all tenants, for one kind of answer."""

    def __init__(self) -> None:
        # For each owner: bytes sent, less what it may be sent since; and when that was.
        self._sent: dict[str, tuple[float, float]] = {}

    def is_spent(self, now: float, owner: str) -> bool:
        """Whether an owner has to wait for a while."""
        return self._left_over(now, owner) > SENT_AT_ONCE

    def spend(self, now: float, owner: str, size: int) -> None:
        """Count so many bytes that an owner is sent."""
        self._sent[owner] = (self._left_over(now, owner) + size, now)

    def _left_over(self, now: float, owner: str) -> float:
        sent, since = self._sent.get(owner, (0.0, now))
        return max(0.0, sent - SENT_EACH_SECOND * (now - since))
