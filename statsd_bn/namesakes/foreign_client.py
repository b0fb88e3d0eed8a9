"""A foreign `client`: a module of the user's own that has the name of the package that training scripts import.

Python takes the file beside the script first, so `import client` gives that one, and `client.connect` fails with an
AttributeError that explains nothing. Whatever imports the core package can at least say so.
"""

import sys
import warnings
from pathlib import Path


def warn_of_foreign_client() -> None:
    """Warns where `client` has been imported and is not the one that lies beside this package."""
    module = sys.modules.get("client")
    if module is None:
        return
    where = getattr(module, "__file__", None)
    ours = Path(__file__).resolve().parents[2] / "client"
    if where and Path(where).resolve().parent == ours:
        return
    warnings.warn(
        f"client: expected the package of statsd_bn, {ours}, got {where or module!r}, which Python finds first; give "
        "your own module another name, or start the script from another folder",
        stacklevel=3,
    )
