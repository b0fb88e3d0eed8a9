"""Account: how many bytes are kept, for each owner and in all.

With keys each tenant is an owner. Without keys anybody can claim to be anybody, and each job is an owner. Errors show
an owner's name as it is: "job 'digits'", "tenant 'team-a'".
"""

from weakref import WeakValueDictionary

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


class Share:
    """An owner's part of the bytes that are kept; it lives as long as it is referenced.

    Attributes:
        held: how many there are.
    """

    __slots__ = ("__weakref__", "held")

    def __init__(self) -> None:
        self.held = 0


class Account:
    """The bytes that are kept.

    Args:
        most: in all.
        most_of_one: for one owner.

    Attributes:
        most: as given.
        most_of_one: as given.
        held: how many there are.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self.most = most
        self.most_of_one = most_of_one
        self.held = 0
        self._shares: WeakValueDictionary[str, Share] = WeakValueDictionary()

    def of(self, owner: str) -> int:
        """Bytes that are kept for an owner."""
        return self.share(owner).held

    def share(self, owner: str) -> Share:
        """An owner's share, the same object for all who hold it."""
        share = self._shares.get(owner)
        if share is None:
            share = self._shares[owner] = Share()
        return share

    def is_full(self, size: int) -> bool:
        """Whether so many more bytes exceed the limit in all."""
        return self.held + size > self.most

    def is_full_for(self, owner: str, size: int) -> bool:
        """Whether so many more bytes exceed the limit for an owner."""
        return self.of(owner) + size > self.most_of_one

    def fits(self, share: Share, size: int) -> bool:
        """Whether so many more bytes exceed neither limit; one call, because each contribution asks."""
        return self.held + size <= self.most and share.held + size <= self.most_of_one

    def keep(self, share: Share, size: int) -> None:
        """Add bytes that are kept; a negative size takes bytes off."""
        self.held += size
        share.held += size
