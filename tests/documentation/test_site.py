"""The site that `scripts/docs` makes: it needs no other host, has every public name, and copies of linked files."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import client
import server
from statsd_bn import errors
from support.paths import ROOT

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocstrings") is None, reason="needs mkdocs, of the extra docs; scripts/docs installs it"
)

PUBLIC = [
    *(f"client.{name}" for name in client.__all__),
    *(f"server.{name}" for name in server.__all__),
    *(
        f"statsd_bn.errors.{name}"
        for name, kind in vars(errors).items()
        if getattr(kind, "__module__", "") == errors.__name__
    ),
]

# Modules in the folder of the integrations that are no integrations.
HELPERS = {"__init__"}

# Tags with targets that a browser fetches, and their attributes.
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


def build(repository: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site as scripts/docs does; with `--quiet` mkdocs would not see the warnings that `--strict` counts."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        command, cwd=repository, env=environ, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Fetched(HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes) -> None:
        found = dict(attributes)
        if tag in FETCHED and found.get("rel") != "canonical":
            self.targets.append(found.get(FETCHED[tag]) or "")


def test_every_public_name_is_on_a_page_of_the_api():
    pages = (ROOT / "scripts" / "docs_site.py").read_text()
    assert [name for name in PUBLIC if f'"{name}"' not in pages and not name.startswith("statsd_bn.errors.")] == []


def test_every_integration_is_on_a_page_of_the_api():
    pages = (ROOT / "scripts" / "docs_site.py").read_text()
    modules = [path for path in (ROOT / "client" / "integrations").glob("*.py") if path.stem not in HELPERS]
    public = [
        f"client.integrations.{path.stem}.{part.name}"
        for path in modules
        for part in ast.parse(path.read_text()).body
        if isinstance(part, ast.ClassDef | ast.FunctionDef) and not part.name.startswith("_")
    ]
    assert len(public) >= len(modules)
    assert [name for name in public if f'"{name}"' not in pages] == []


@needs_mkdocs
def test_no_page_fetches_anything_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    fetched = {target for page in pages for target in Fetched(page).targets}
    assert any("stylesheets" in target for target in fetched)
    assert not [target for target in fetched if re.match(r"(\w+:)?//", target)]
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\([\"']?(?:https?:)?//[^)]*|@import[^;]*", styles)


@needs_mkdocs
def test_every_public_name_is_in_the_site(site):
    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    assert [name for name in PUBLIC if f'id="{name}"' not in text] == []


@needs_mkdocs
def test_links_out_of_the_pages_lead_to_copies_in_the_site(site):
    page = (site / "features.html").read_text()
    (target,) = set(re.findall(r'href="([^"]*test_second_order\.py[^"]*)"', page))
    assert "def test_first_and_second_gradients" in (site / target).read_text()
    assert 'href="getting-started.html#several-hosts"' in (site / "readme.html").read_text()
    assert (site / "benchmarks/train_step/index.html").is_file()
