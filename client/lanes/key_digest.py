"""The digest of a round's key: by it members see that they have come for the same round."""

from hashlib import blake2b

from statsd_bn.round_key import RoundKey
from statsd_bn.wire.kept import packed_key

_BYTES = 8


def digest_of(key: RoundKey) -> int:
    """Returns the digest: 64 bits, without a sign."""
    return int.from_bytes(blake2b(packed_key(key), digest_size=_BYTES).digest(), "little")
