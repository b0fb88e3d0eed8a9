"""Lines that a program prints for the test that started it."""

import sys


def print_line(*words: object) -> None:
    """Print and flush a line in a single write, because ranks share stdout."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()
