"""Lines that a program prints for the test that started it."""

import sys


def say(*words: object) -> None:
    """Print a line at once and in one piece, since ranks share stdout."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()
