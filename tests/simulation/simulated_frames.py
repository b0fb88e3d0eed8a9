"""Frames that come to many members are decoded once for all of them."""

import functools

from client.session.protocol.session import Session
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Failure, Message
from statsd_bn.wire import decode

_decode_kept = functools.lru_cache(maxsize=64)(decode)


def decode_once(frame: bytes) -> Message:
    """What `decode` makes of a frame; a message cannot be changed, so all may have the same.

    Raises:
        StatsdBNError: as `decode`.
    """
    message = _decode_kept(frame)
    # But for the fields of an error, which are a dict.
    return decode(frame) if type(message) is Failure else message


def is_sound(frame: bytes) -> bool:
    """Whether a frame came undamaged."""
    try:
        decode_once(frame)
    except StatsdBNError:
        return False
    return True


class SimulatedSession(Session):
    """A session that shares what frames say with the others of its world."""

    decode = staticmethod(decode_once)
