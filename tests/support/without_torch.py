"""Lets a program import modules of `client` without running `client/__init__.py`, which imports torch."""

import sys
from importlib.util import find_spec, module_from_spec

if "client" not in sys.modules:
    # The package without its code.
    sys.modules["client"] = module_from_spec(find_spec("client"))
