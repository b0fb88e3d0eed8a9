"""The fenced code blocks of README.md, docs/ and docker/README.md, as `test_docs.py` runs them."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "docker" / "README.md", ROOT / "CONTRIBUTING.md"]

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: str  # path from the root of the repository
    line: int  # its first line on the page, from 1
    language: str  # after the fence
    text: str
    before: str = ""  # the nearest line above it that is not empty

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = [_block(page, text, match) for match in FENCE.finditer(text)]
    # A fence that the expression does not understand would hide its block from the tests.
    fences = len(re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE))
    assert fences == 2 * len(found), (
        f"{page}: expected fences of ``` in pairs, with at most a language behind the first"
    )
    return found


def _block(page: Path, text: str, match: re.Match[str]) -> Block:
    line = text.count("\n", 0, match.start("text")) + 1
    name = page.relative_to(ROOT).as_posix()
    before = text[: match.start()].rstrip().rpartition("\n")[2]
    return Block(name, line, match["language"], textwrap.dedent(match["text"]), before)


def all_blocks() -> Iterator[Block]:
    for page in PAGES:
        yield from blocks_of(page)


def script_before(block: Block, name: str) -> Block:
    """The Python block before `block` that the page calls by the script's name, else the last one before `block`."""
    before = [one for one in all_blocks() if one.page == block.page and one.line < block.line]
    scripts = [one for one in before if one.language == "python"]
    assert scripts, f"{block} runs a script: expected a Python block before it on the page, found none"
    return next((one for one in scripts if f"`{name}`" in one.before), scripts[-1])
