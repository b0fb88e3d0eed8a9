"""docs/security.md lists the abilities of every role, and a test for each defence."""

import re

import pytest

from support.paths import ROOT

PAGE = ROOT / "docs" / "security.md"
POLICY = ROOT / "SECURITY.md"

# The page's names of the roles, which it prints in bold.
EVERYBODY = (
    *("stranger on the host", "stranger on the network", "tenant", "member", "former member"),
    *("former or hostile server", "anybody, without keys"),
)

LINK = re.compile(r'\]\((?!https?:)([^)#\s]+)(?:#[^)\s]*)?(?: "(\w+)")?\)')


def table(heading: str) -> list[dict[str, str]]:
    text = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    names, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    names = [name.strip() for name in names]
    return [dict(zip(names, row, strict=True)) for row in rows]


DEFENCES = table("Defences")


def test_the_threat_model_says_what_each_role_can_see_slow_stop_and_falsify():
    rows = {re.match(r"\*\*(.+?)\*\*", row["who"])[1]: row for row in table("Threat model")}
    assert tuple(rows) == EVERYBODY
    for row in rows.values():
        assert list(row) == ["who", "can see", "can slow", "can stop", "can falsify"]
        assert all(row.values())


@pytest.mark.parametrize("row", DEFENCES, ids=[row["attack"] for row in DEFENCES])
def test_every_defence_names_existing_tests(row):
    assert row["by"]
    assert row["defence"]
    links = LINK.findall(row["test"])
    assert links
    for target, test in links:
        file = PAGE.parent / target
        assert file.is_file(), f"{target} is not there"
        assert re.search(rf"^(?:async )?def {test or 'test_'}", file.read_text(), re.MULTILINE), (
            f"{target} has no {test or 'test'}"
        )


def test_the_policy_and_the_page_link_to_each_other():
    links = {target for target, _ in LINK.findall(POLICY.read_text())}
    assert "docs/security.md" in links
    assert all((ROOT / target).exists() for target in links)
    for page in (ROOT / "README.md", PAGE):
        assert "SECURITY.md)" in page.read_text()


def test_the_policy_names_no_mail_address():
    assert not re.search(r"[\w.]+@[\w.]+", POLICY.read_text())
