"""Write each table between the marks of its page."""

from pathlib import Path

from bench.results import ROOT, Result
from bench.tables import TABLES

BEGIN, END = "<!-- scripts/bench writes this -->\n", "<!-- until here -->\n"


def page_of(name: str) -> Path:
    """Returns the path of a benchmark's page."""
    return ROOT / "benchmarks" / name / "README.md"


def written(name: str, text: str, result: Result) -> str:
    """Returns the text of a page with the table of a saved result.

    Raises:
        ValueError: the text has no marks.
    """
    before, begins, rest = text.partition(BEGIN)
    _, ends, behind = rest.partition(END)
    if not (begins and ends):
        raise ValueError(f"{page_of(name)}: expected {BEGIN.strip()!r} and, behind it, {END.strip()!r}")
    return f"{before}{BEGIN}{TABLES[name].in_markdown(result.found)}\n{result.caption}\n{END}{behind}"
