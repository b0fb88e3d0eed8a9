"""Lets a program import modules of `client` without the package, and so without torch; it must name each module."""

import sys
from importlib.util import find_spec, module_from_spec

if "client" not in sys.modules:
    # Its own code, which imports everything, is not run.
    sys.modules["client"] = module_from_spec(find_spec("client"))
