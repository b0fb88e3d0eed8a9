"""The shared core of statsd_bn: moments, messages, the wire format and the errors.

It has no torch, socket, thread or clock, so server, client and every test can build on it.
"""

from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Moments, Rows
from statsd_bn.round_key import RoundKey
from statsd_bn.wire import PROTOCOL_VERSION

__version__ = "0.1.0"

__all__ = ["PROTOCOL_VERSION", "Aggregate", "Moments", "RoundKey", "Rows", "StatsdBNError", "__version__"]
