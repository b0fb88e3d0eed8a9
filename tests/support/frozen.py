"""The fork server imports this last: garbage collections of its children then skip all loaded objects (0.2 s each)."""

import gc

gc.freeze()
