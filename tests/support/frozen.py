"""Imported last by the process that forks others: what was loaded before costs their garbage collections 0.2 s each."""

import gc

gc.freeze()
