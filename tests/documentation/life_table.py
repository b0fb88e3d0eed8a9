"""Writes the table of `server.membership.life` into docs/protocol.md; `scripts/docs write` calls it."""

from server.membership import life
from support.paths import ROOT

PAGE = ROOT / "docs" / "protocol.md"

BEGIN, END = "<!-- made by scripts/docs write -->\n", "<!-- The end of the table. -->\n"


def table() -> str:
    """The table in Markdown."""
    head, *rows = life.rows()
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def page() -> str:
    """The page with the table as the code has it."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise LookupError(f"{PAGE}: expected the lines {BEGIN!r} and {END!r}")
    return before + begin + table() + end + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
