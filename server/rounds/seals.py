"""Seals: how the server knows its own aggregates when members tell it of them after a restart.

A seal is a MAC over the frame of the aggregate: job, group, epoch and the rest of the key, counts, members and values.
Members cannot make one, and they keep what they were given as it is.
"""

import hashlib
import hmac
from dataclasses import dataclass, field

from statsd_bn import limits
from statsd_bn.messages import Aggregate
from statsd_bn.wire import encode, unsealed

# A whole block of SHA-256 for the key, which is then hashed once for all seals.
_BLOCK_BYTES = 64


@dataclass(frozen=True, slots=True)
class Seals:
    """Makes seals and recognises them.

    Attributes:
        key: what they are made with, of at most 64 bytes; secret. Without one all seals are zeros, and all are genuine.
        outlives: whether an earlier life of this server has had the key: what it has sealed can then be told from what
            members make up. With a new key nothing can.
    """

    key: bytes = field(repr=False)
    outlives: bool = False
    _begun: "hashlib._Hash" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_begun", hashlib.sha256(self.key.ljust(_BLOCK_BYTES, b"\0")))

    def sealed(self, aggregate: Aggregate) -> bytes:
        """Frame of an aggregate, with its seal."""
        if not self.key:
            return encode(aggregate)
        parts = unsealed(aggregate)
        return b"".join((*parts, self._seal(*parts)))

    def is_genuine(self, aggregate: Aggregate) -> bool:
        """Whether an aggregate was sealed with this key."""
        if not self.key:
            return True
        return hmac.compare_digest(self._seal(*unsealed(aggregate)), aggregate.seal)

    def _seal(self, head: bytes, values: memoryview | bytes) -> bytes:
        # The key and then the message is a MAC where no message is the beginning of another, and a frame says how long
        # it is. 256 channels take 3 µs, as HMAC 4, with blake2b 5; 2,048 take 20, 21 and 36.
        seal = self._begun.copy()
        seal.update(head)
        seal.update(values)
        return seal.digest()[: limits.SEAL_BYTES]


# For members that are believed, because nobody else can connect.
NO_SEALS = Seals(b"", outlives=True)
