"""Prepares an exported tree for an index: `python scripts/release_metadata.py TREE [REPOSITORY]`.

With the address of the repository, links and pictures of README become absolute, and pyproject.toml gets its urls.
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
SOURCE = re.compile(r'(src(?:set)?)="(?!\w+:)([^"]+)"')

URLS = {
    "Homepage": "",
    "Documentation": "/tree/main/docs",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
    "Source": "",
}


def absolute_links(text: str, repository: str, tag: str) -> str:
    """README with absolute links: to pages at a tag, and to pictures as files."""

    def link(match: re.Match[str]) -> str:
        picture, label, path = match.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{label}]({repository}/{kind}/{tag}/{path})"

    text = LINK.sub(link, text)
    return SOURCE.sub(lambda match: f'{match[1]}="{repository}/raw/{tag}/{match[2]}"', text)


def with_urls(pyproject: str, repository: str) -> str:
    """pyproject.toml with a table of urls before the table of scripts."""
    table = "".join(f'{name} = "{repository}{path}"\n' for name, path in URLS.items())
    return pyproject.replace("[project.scripts]\n", f"[project.urls]\n{table}\n[project.scripts]\n", 1)


def main(tree: Path, repository: str = "") -> None:
    """Rewrites the tree in place, if there is an address."""
    if not repository:
        return
    repository = repository.removesuffix("/").removesuffix(".git")
    if not re.fullmatch(r"https://[\w.-]+/[\w./-]+", repository):
        sys.exit(f"release: --repository: expected https://HOST/OWNER/NAME, got {repository!r}")
    version = re.search(r'^__version__ = "(.+)"$', (tree / "statsd_bn/__init__.py").read_text(), re.MULTILINE)
    assert version, "statsd_bn/__init__.py has the version"  # noqa: S101
    readme, pyproject = tree / "README.md", tree / "pyproject.toml"
    readme.write_text(absolute_links(readme.read_text(), repository, f"v{version[1]}"))
    pyproject.write_text(with_urls(pyproject.read_text(), repository))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
