"""The digest of a round's key: by it members see that they have come for the same round."""

from hashlib import blake2b

from statsd_bn.round_key import RoundKey

_BYTES = 8


def digest_of(key: RoundKey) -> int:
    """Returns the digest: 64 bits, without a sign."""
    # As Python writes a tuple of strings and integers: unambiguous, and faster than what the server would be sent.
    return int.from_bytes(blake2b(tuple.__repr__(key).encode(), digest_size=_BYTES).digest(), "little")
