"""Seals: how the server knows its own aggregates when members tell it of them after a restart.

A seal is a MAC over the frame of the aggregate: job, group, epoch and the rest of the key, counts, members and values.
Members cannot make one, and they keep what they were given as it is.
"""

import hmac
from dataclasses import dataclass, field

from statsd_bn import limits
from statsd_bn.messages import Aggregate
from statsd_bn.wire import encode_unsealed


@dataclass(frozen=True, slots=True)
class Seals:
    """Makes seals, and knows them again.

    Attributes:
        key: what they are made with; secret.
        outlives: whether an earlier life of this server has had the key: what it has sealed can then be told from what
            members make up. With a new key nothing can.
    """

    key: bytes = field(repr=False)
    outlives: bool = False

    def sealed(self, aggregate: Aggregate) -> bytes:
        """Returns the frame of an aggregate, with its seal."""
        frame = encode_unsealed(aggregate)
        return frame + self._seal(frame)

    def is_genuine(self, aggregate: Aggregate) -> bool:
        """Returns whether an aggregate was sealed with this key."""
        return hmac.compare_digest(self._seal(encode_unsealed(aggregate)), aggregate.seal)

    def _seal(self, frame: bytes) -> bytes:
        # With the processor's instructions for SHA-256, 256 channels take 4 µs; blake2b takes 5, and 36 for 2,048.
        return hmac.digest(self.key, frame, "sha256")[: limits.SEAL_BYTES]
