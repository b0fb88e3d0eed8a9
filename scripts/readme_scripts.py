"""Writes README's scripts into a folder, each to the file that the line above it names: `readme_scripts.py FOLDER`."""

import re
import sys
from pathlib import Path

SCRIPT = re.compile(r"`(\w+\.py)`[^\n]*:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main(folder: Path) -> None:
    """Writes the scripts, and prints their names."""
    for name, text in SCRIPT.findall((Path(__file__).parents[1] / "README.md").read_text()):
        (folder / name).write_text(text)
        print(name)  # noqa: T201 - the command's result


if __name__ == "__main__":
    main(Path(sys.argv[1]))
