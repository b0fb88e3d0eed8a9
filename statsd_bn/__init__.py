"""The shared core of statsd_bn: moments, messages, the wire and the errors.

It knows neither torch nor sockets, threads or clocks, so both sides and every test can build on it.
"""

import sys
import warnings
from pathlib import Path

from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import Aggregate
from statsd_bn.moments import Moments
from statsd_bn.reduction import Rows
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


def _warn_of_foreign_client() -> None:
    """Warns where `client` has been imported and is not the one that lies beside this package.

    Python takes a file beside the script first, so `import client` may give a module of the user's own, and
    `client.connect` then fails with an AttributeError that explains nothing.
    """
    module = sys.modules.get("client")
    if module is None:
        return
    where = getattr(module, "__file__", None)
    ours = Path(__file__).resolve().parents[1] / "client"
    if where and Path(where).resolve().parent == ours:
        return
    warnings.warn(
        f"client: expected the package of statsd_bn, {ours}, got {where or module!r}, which Python finds first; give "
        "your own module another name, or start the script from another folder",
        stacklevel=3,
    )


_warn_of_foreign_client()
