"""Every text that a user can meet stands in messages.txt, so that all are read together and changed on purpose.

After a change of a text, write the page and read it:

    PYTHONPATH=tests python tests/messages/test_messages.py
"""

import difflib
from pathlib import Path

from messages.scenarios import finished_errors
from messages.texts import page
from support.paths import ROOT

PAGE = Path(__file__).with_name("messages.txt")
RENEW = "PYTHONPATH=tests python tests/messages/test_messages.py"


def written() -> str:
    finished = [f"{name}\n" + "".join(f"    {line}\n" for line in text.split("\n")) for name, text in finished_errors()]
    return "\n".join(["# Errors of scenarios\n", *finished, "# Texts in the sources\n", page(ROOT)])


def test_all_texts_are_on_the_page():
    before, now = PAGE.read_text().splitlines(), written().splitlines()
    changes = [line for line in difflib.unified_diff(before, now, n=0, lineterm="") if line[:3] not in {"---", "+++"}]
    assert not changes, "\n".join(["messages.txt differs:", *changes, f"if that is meant, run: {RENEW}"])


if __name__ == "__main__":
    PAGE.write_text(written())
