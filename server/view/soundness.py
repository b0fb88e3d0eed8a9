"""Soundness: what a report raises that is not as this version expects it, and how that is told."""

from statsd_bn.errors import ProtocolError, ServerUnreachable

UNSOUND = (KeyError, TypeError, ValueError, AttributeError, ProtocolError)


def unsound(error: BaseException) -> ServerUnreachable:
    """Error that tells that a report makes no sense."""
    return ServerUnreachable(
        f"expected a status report of this version, got one that makes no sense: {type(error).__name__}"
    )
