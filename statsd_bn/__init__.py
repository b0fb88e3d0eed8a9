"""The shared core of statsd_bn: moments, messages, the wire format and the errors.

It has no torch, socket, thread or clock, so server, client and every test can build on it.
"""

import sys
import warnings
from pathlib import Path

from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Moments, Rows
from statsd_bn.round_key import RoundKey
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


def _check_client() -> None:
    """Warns if the imported `client` is not statsd_bn's.

    Python searches the script's folder first, so `import client` may load a module of the user's, and
    `client.connect` then fails with an AttributeError that explains nothing.
    """
    module = sys.modules.get("client")
    if module is None:
        return
    path = getattr(module, "__file__", None)
    ours = Path(__file__).resolve().parents[1] / "client"
    if path and Path(path).resolve().parent == ours:
        return
    warnings.warn(
        f"client: expected the package of statsd_bn, {ours}, got {path or module!r}, which Python finds first; give "
        "your own module another name, or start the script from another folder",
        stacklevel=3,
    )


_check_client()
