"""The shared core of statsd_bn: moments, messages, the wire and the errors.

It knows neither torch nor sockets, threads or clocks, so both sides and every test can build on it.
"""

from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Aggregate
from statsd_bn.moments import Moments
from statsd_bn.namesakes.foreign_client import warn_of_foreign_client
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.wire import PROTOCOL_VERSION

__version__ = "0.1.0"

__all__ = [
    "PROTOCOL_VERSION",
    "Aggregate",
    "Moments",
    "RoundKey",
    "Rows",
    "StatsdBNError",
    "__version__",
]

warn_of_foreign_client()
