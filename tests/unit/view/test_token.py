"""Who may read the page of `view --http`: anybody on loopback, elsewhere whoever has the token that it prints."""

import os
import re
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection

import pytest

from server.__main__ import main
from support.paths import ROOT
from support.ports import free_port

pytest.importorskip("uvicorn", reason="needs the extra view")

ADDRESSES = ["/", "/page.js", "/events", "/metrics", "/heat", "/history"]

EVERYWHERE = "0.0.0.0"  # noqa: S104 - that is what is tried
GIVEN = "of-the-test"

# Of 32 bytes in base64.
LETTERS = 43


@contextmanager
def page(endpoint, host, token=""):
    """Serves the page; returns its port, and the token in the link that it prints."""
    port = free_port()
    command = [sys.executable, "-m", "server", "view", endpoint, "--http", f"{host}:{port}"]
    environment = {**os.environ, "STATSD_BN_VIEW_TOKEN": token}
    started = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        link = started.stderr.readline()
        found = re.fullmatch(rf"statsd_bn view: http://{re.escape(host)}:{port}/(?:\?token=(\S+))?\n", link)
        assert found, link
        yield port, found[1]
    finally:
        started.kill()
        started.communicate()


def answer(port, address, at="127.0.0.1", **headers):
    """The answer's code and headers, once there is one."""
    for _ in range(100):
        with (
            suppress(ConnectionRefusedError),
            closing(HTTPConnection(at, port, timeout=20)) as to,
        ):
            to.request("GET", address, headers=headers)
            found = to.getresponse()
            return found.status, found.headers
        time.sleep(0.1)  # until it listens
    pytest.fail("nobody listens")


def status(port, address, at="127.0.0.1", **headers):
    return answer(port, address, at, **headers)[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_on_loopback_anybody_reads(server, host):
    with page(server.endpoint, host) as (port, token):
        assert token is None
        at = host if host[-1] == "2" else "127.0.0.1"
        assert [status(port, address, at) for address in ("/", "/metrics")] == [200, 200]


def test_elsewhere_each_run_makes_a_token_and_asks_for_it(server):
    tokens = set()
    for _ in range(2):
        with page(server.endpoint, EVERYWHERE) as (port, token):
            assert {status(port, address) for address in ADDRESSES} == {401}
            assert status(port, "/metrics", Authorization="Bearer x") == 401
            assert status(port, "/metrics", Authorization=f"Bearer {token}") == 200
            assert len(token) >= LETTERS
            tokens.add(token)
    assert len(tokens) == 2


def test_the_printed_link_opens_the_page_and_leaves_no_token_in_the_address(server):
    with page(server.endpoint, EVERYWHERE) as (port, token):
        assert status(port, "/") == 401
        code, headers = answer(port, f"/?token={token}")
        assert (code, headers["Location"]) == (303, "/")
        assert status(port, "/", Cookie=headers["Set-Cookie"].partition(";")[0]) == 200


@pytest.mark.parametrize("host", ["127.0.0.1", EVERYWHERE])
def test_a_given_token_is_asked_for_everywhere(server, host):
    with page(server.endpoint, host, GIVEN) as (port, token):
        assert token == GIVEN
        assert status(port, "/") == 401
        assert status(port, "/", Authorization=f"Bearer {GIVEN}") == 200


def test_a_token_of_letters_that_mean_something_in_a_link_or_a_cookie_opens_the_page(server):
    odd = "ab+c/d=e&%41;#\"'"
    with page(server.endpoint, EVERYWHERE, f"{odd}\n") as (port, token):
        code, headers = answer(port, f"/?token={token}")
        assert code == 303
        assert status(port, "/", Cookie=headers["Set-Cookie"].partition(";")[0]) == 200
        assert status(port, "/", Authorization=f"Bearer {odd}") == 200


@pytest.mark.parametrize("token", ["two words", "f\u00fcnf", "a\tb"])
def test_a_token_that_no_header_can_bring_is_refused(server, token, monkeypatch, capsys):
    monkeypatch.setenv("STATSD_BN_VIEW_TOKEN", token)
    assert main(["view", server.endpoint, "--http", f"127.0.0.1:{free_port()}"]) == 2
    assert "STATSD_BN_VIEW_TOKEN: expected printable letters of ASCII" in capsys.readouterr().err
