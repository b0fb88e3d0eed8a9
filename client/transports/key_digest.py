"""The digest of a round's key: by it members see that they have come for the same round."""

from functools import lru_cache
from hashlib import blake2b

from statsd_bn.round_key import RoundKey

_BYTES = 8
_ALL = (1 << 8 * _BYTES) - 1

# Odd and random. Two rounds of one layer differ as long as steps and calls are below 2^30; those of two layers have the
# same digest by chance only.
_STEP, _CALL = 0x9FD35B1C64E8A72B, 0xC25A0F9716B3D4E9


def digest_of(key: RoundKey) -> int:
    """Returns the digest: 64 bits, without a sign."""
    job, group, epoch, step, layer, call, phase = key
    # What stays the same for a layer is hashed once.
    return (_of_layer(job, group, epoch, layer, phase) + step * _STEP + call * _CALL) & _ALL


@lru_cache(maxsize=4096)
def _of_layer(*what: str | int) -> int:
    # As Python writes a tuple of strings and integers: unambiguous, and faster than what the server would be sent.
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=_BYTES).digest(), "little")
