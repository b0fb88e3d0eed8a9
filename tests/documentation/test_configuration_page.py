"""docs/configuration.md is what the code says, and leaves nothing out."""

from documentation import configuration_page
from server import __main__ as command_line


def test_the_page_is_what_the_code_would_write():
    page = configuration_page.PAGE.read_text()
    assert page == configuration_page.page(), "docs/configuration.md is older than the code; run scripts/docs write"


def test_no_variable_is_described_that_nobody_reads():
    assert set(configuration_page.CLIENT_VARIABLES) == configuration_page.variables_of("client")


def test_every_variable_that_the_server_reads_is_on_the_page():
    read = configuration_page.variables_of("server")
    assert read >= {"STATSD_BN_BIND", "STATSD_BN_CURVE", "STATSD_BN_LOG_LEVEL", "STATSD_BN_INSECURE"}
    page = configuration_page.PAGE.read_text()
    assert [name for name in read if name not in page] == []


def test_every_exit_code_has_a_meaning():
    assert set(configuration_page.EXIT_CODES) == set(command_line.EXIT_CODES)
