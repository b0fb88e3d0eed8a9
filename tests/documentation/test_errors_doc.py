"""docs/errors.md agrees with the code about every error."""

import re

import pytest

from statsd_bn import errors
from statsd_bn.errors import BY_CODE
from support.paths import ROOT

DOCS = ROOT / "docs"
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (DOCS / "errors.md").read_text(), re.MULTILINE | re.DOTALL))
NAMES = {error.__name__: error for error in BY_CODE.values()}

every_error = pytest.mark.parametrize("name", NAMES)


def documented(name: str) -> set[str]:
    (line,) = re.findall(r"^- Fields: (.*)$", SECTIONS[name], re.MULTILINE)
    return set() if line == "none" else set(line.split(", "))


def test_every_error_has_its_section_in_the_order_of_the_tree():
    assert list(SECTIONS) == list(NAMES)


@every_error
def test_a_section_names_the_code(name):
    assert f"- Code: `{NAMES[name].code}`\n" in SECTIONS[name]


# RoundMismatch's docstring describes two kinds; a test below compares them.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"StatsdBNError", "RoundMismatch"}])
def test_a_section_names_the_fields_that_the_docstring_names(name):
    found = re.search(r"Fields: (.*?)\.( |$)", " ".join(NAMES[name].__doc__.split()))
    text = re.sub("the parts of its key|the key's", "round key", found[1]) if found else ""
    assert documented(name) == set(text.split(", ")) - {""}


def test_both_kinds_of_a_mismatch_are_described_with_their_fields():
    docstring = " ".join(errors.RoundMismatch.__doc__.split())
    for field in ("expected", "got", "member", "table", "places"):
        assert field in docstring
        assert field in SECTIONS["RoundMismatch"]


def test_errors_that_travel_have_the_same_fields_in_the_protocol():
    rows = re.findall(
        r"^\| (\w+) \| (?:yes|no|both) \| (?:.*?) \| (.*?) \|$", (DOCS / "protocol.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 12
    for code, fields in rows:
        if code == "mismatch":
            continue  # the text below the table describes its three kinds
        name = BY_CODE[code].__name__
        stated = set(fields.split(", ")) if fields.strip() else set()
        expected = documented(name)
        assert stated == expected, name


def test_the_page_quotes_the_causes_of_the_code():
    sources = "\n".join(
        path.read_text() for folder in ("server", "client") for path in (DOCS.parent / folder).rglob("*.py")
    )
    for cause in (
        *("the connection was lost", "no sign of life for", "did not reconnect after the server was restarted"),
        *("registered too late", "declared lost", "its key was revoked"),
    ):
        assert cause in SECTIONS["ReplicaLost"]
        assert f'"{cause}' in sources
