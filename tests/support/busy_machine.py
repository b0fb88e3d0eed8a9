"""Tests that hold times against each other, on a machine that others use too."""

import pytest
from bench.quiet import Others

# Processors that others may use. One that is always busy takes turns with what is measured: whatever comes of that says
# nothing of this project.
QUIET = 0.5


def skip_if_busy(others: Others) -> None:
    """Skips a test whose other assertions hold, where others have used the machine while it measured."""
    if others.processors > QUIET:
        pytest.skip(
            f"times were not compared: other processes used {others.processors:.1f} processors, "
            f"expected at most {QUIET:g}; everything else holds"
        )
