"""docs/configuration.md agrees with the code, and docs/features.md with the tests."""

import re

import pytest

from client.launch import connect
from documentation import configuration_page
from server import __main__ as command_line
from support.contract_interface import variables_of
from support.paths import ROOT


def test_the_page_is_what_the_code_would_write():
    page = configuration_page.PAGE.read_text()
    assert page == configuration_page.page(), "docs/configuration.md is older than the code; run scripts/docs write"


def test_every_described_variable_is_read():
    assert set(configuration_page.CLIENT_VARIABLES) == variables_of("client")


def test_connect_knows_every_variable_of_ours_that_the_client_reads():
    assert {name for name in configuration_page.CLIENT_VARIABLES if name.startswith("STATSD_BN_")} <= connect.VARIABLES


def test_every_variable_that_the_server_reads_is_on_the_page():
    read = variables_of("server")
    assert read >= {"STATSD_BN_BIND", "STATSD_BN_CURVE", "STATSD_BN_LOG_LEVEL", "STATSD_BN_INSECURE"}
    page = configuration_page.PAGE.read_text()
    assert [name for name in read if name not in page] == []


def test_every_exit_code_has_a_meaning():
    assert set(configuration_page.EXIT_CODES) == set(command_line.EXIT_CODES)


FEATURES, _, _ = (ROOT / "docs" / "features.md").read_text().partition("\n## Limits\n")
ROWS = [
    line.strip("|").split("|") for line in FEATURES.splitlines() if line.startswith("| ") and "statsd_bn" not in line
]
LINK = re.compile(r'\[yes\]\(\.\./(tests/[\w/]*test_\w+\.py) "(test_\w+)"\)')


def test_the_features_page_has_rows():
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_a_row_covers_every_peer_and_names_its_test(row):
    *peers, ours = (cell.strip() for cell in row[1:])
    assert len(peers) == 5
    assert set(peers) <= {"yes", "no", "partly", "-"}
    file, test = LINK.fullmatch(ours).groups()
    assert f"def {test}(" in (ROOT / file).read_text()
