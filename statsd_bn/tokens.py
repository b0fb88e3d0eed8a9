"""Digests of tokens: how a session is named to whoever may not be its owner.

Whoever knows a session speaks in its name, so a session travels in one direction only, from the member to the server.
What the server says of a session names its digest: the owner recognises it, and nobody gets the session out of it.
"""

from hashlib import blake2b

from statsd_bn import limits

# Keeps this digest apart from any other that somebody makes of the same bytes.
_PURPOSE = b"sbn session"


def digest(token: bytes) -> bytes:
    """Returns what names a token to others, as many bytes as a token has."""
    return blake2b(token, digest_size=limits.TOKEN_BYTES, person=_PURPOSE).digest()
