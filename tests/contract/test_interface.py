"""The interface equals the snapshot in this folder: signatures, flags, variables, exit codes and errors.

After an intended change, write the snapshot again, and give the reason in the commit message:

    PYTHONPATH=tests python tests/contract/test_interface.py
"""

import difflib
from pathlib import Path

from support.contract_interface import lines

SNAPSHOT = Path(__file__).with_name("interface.txt")

RENEW = "PYTHONPATH=tests python tests/contract/test_interface.py"


def test_the_interface_is_that_of_the_snapshot():
    expected, found = SNAPSHOT.read_text().splitlines(), lines()
    changes = [
        line
        for line in difflib.unified_diff(expected, found, n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert not changes, "\n".join(
        ["the interface differs from tests/contract/interface.txt:", *changes, f"if that is meant, run: {RENEW}"]
    )


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{line}\n" for line in lines()))
