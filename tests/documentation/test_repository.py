"""The files for a code host agree with the project: they run its scripts and have its version."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from statsd_bn import __version__

ROOT = Path(__file__).parents[2]

# Commands of a workflow other than our scripts.
TOOLS = {"rm dist/*.cdx.json"}

sys.path.append(str(ROOT / "scripts"))
from release_metadata import absolute_links, with_urls  # noqa: E402 - a script, not a module of a package


def _commands(path: Path) -> list[str]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_runs_only_scripts_that_are_here(path):
    commands = [command for command in _commands(path) if command not in TOOLS]
    assert commands
    for command in commands:
        script, *arguments = shlex.split(command)
        text = (ROOT / script).read_text()
        options = [argument for argument in arguments if re.match(r"--\w", argument)]
        assert all(option in text for option in options), command


def test_a_workflow_tests_each_python_that_is_promised():
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    matrix = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["pinned"]["strategy"]["matrix"]
    assert matrix["python"] == classifiers == ["3.11", "3.12", "3.13", "3.14"]


def test_the_citation_and_the_changelog_have_the_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    assert re.search(rf"^## {re.escape(__version__)} \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_links_and_pictures_become_absolute_at_the_tag():
    text = (
        '[a](docs/a.md#b) ![p](docs/p.svg) [w](https://w.o) [s](#s) <source srcset="docs/d.png"><img src="docs/l.png">'
    )
    at = "https://host.org/o/n"
    assert absolute_links(text, at, "v1") == (
        f"[a]({at}/blob/v1/docs/a.md#b) ![p]({at}/raw/v1/docs/p.svg) [w](https://w.o) [s](#s) "
        f'<source srcset="{at}/raw/v1/docs/d.png"><img src="{at}/raw/v1/docs/l.png">'
    )


def test_the_table_of_urls_precedes_the_table_of_scripts():
    found = with_urls((ROOT / "pyproject.toml").read_text(), "https://host.org/o/n")
    assert '\n[project.urls]\nHomepage = "https://host.org/o/n"\n' in found
    assert 'Issues = "https://host.org/o/n/issues"\n' in found


def test_an_address_that_is_not_https_is_refused(tmp_path):
    command = [sys.executable, ROOT / "scripts/release_metadata.py", tmp_path, "git@host.org:o/n"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "expected https://HOST/OWNER/NAME, got 'git@host.org:o/n'" in done.stderr
