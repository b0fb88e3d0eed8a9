"""Every claim in docs/features.md leads to a test that is there."""

import re

import pytest

from support.paths import ROOT

ROWS = [
    line.strip("|").split("|")
    for line in (ROOT / "docs" / "features.md").read_text().splitlines()
    if line.startswith("| ") and "statsd_bn" not in line
]
LINK = re.compile(r'\[yes\]\(\.\./(tests/[\w/]*test_\w+\.py) "(test_\w+)"\)')


def test_the_table_has_rows():
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_a_row_says_something_of_every_peer_and_names_its_test(row):
    *peers, ours = (cell.strip() for cell in row[1:])
    assert len(peers) == 5
    assert set(peers) <= {"yes", "no", "partly", "-"}
    file, test = LINK.fullmatch(ours).groups()
    assert f"def {test}(" in (ROOT / file).read_text()
