"""Every address of `view` asks for the token, which STATSD_BN_VIEW_TOKEN gives or `view` generates."""

import time
from contextlib import closing, suppress
from http.client import HTTPConnection

import pytest

from server.__main__ import main
from statsd_bn.text import unwrap
from support.launched import free_port
from support.view_reports import view_page

pytest.importorskip("uvicorn", reason="needs the extra view")

ADDRESSES = ["/", "/page.js", "/events", "/metrics", "/heat", "/history", "/nothing"]

EVERYWHERE = "0.0.0.0"  # noqa: S104 - the address under test
GIVEN = "of-the-test-0123"

# The length of 32 bytes in base64.
LETTERS = 43


def answer(port, address, at="127.0.0.1", **headers):
    for _ in range(100):
        with suppress(ConnectionRefusedError), closing(HTTPConnection(at, port, timeout=20)) as to:
            to.request("GET", address, headers=headers)
            found = to.getresponse()
            return found.status, found.headers
        time.sleep(0.1)  # until it listens
    pytest.fail("nobody listens")


def status(port, address, at="127.0.0.1", **headers):
    return answer(port, address, at, **headers)[0]


@pytest.mark.parametrize(("host", "at"), [("127.0.0.1",) * 2, ("localhost", "127.0.0.1"), (EVERYWHERE, "127.0.0.1")])
def test_each_address_asks_for_the_token_on_loopback_too(server, host, at):
    with view_page(server.endpoint, host=host) as (_, port, token):
        assert {status(port, address, at) for address in ADDRESSES} == {401}
        assert status(port, "/metrics", at, Authorization="Bearer x") == 401
        assert status(port, "/metrics", at, Authorization=f"Bearer {token}") == 200


def test_each_run_makes_a_token(server):
    tokens = set()
    for _ in range(2):
        with view_page(server.endpoint) as (*_, token):
            assert len(token) >= LETTERS
            tokens.add(token)
    assert len(tokens) == 2


@pytest.mark.parametrize("host", ["127.0.0.1", EVERYWHERE])
def test_a_given_token_is_asked_for_everywhere(server, host):
    with view_page(server.endpoint, host=host, token=GIVEN) as (_, port, token):
        assert token == GIVEN
        assert status(port, "/") == 401
        assert status(port, "/", Authorization=f"Bearer {GIVEN}") == 200


def test_a_token_with_special_characters_opens_the_page(server):
    odd = "ab+c/d=e&%41;#\"'"
    with view_page(server.endpoint, host=EVERYWHERE, token=f"{odd}\n") as (_, port, token):
        code, headers = answer(port, f"/?token={token}")
        assert code == 303
        assert status(port, "/", Cookie=headers["Set-Cookie"].partition(";")[0]) == 200
        assert status(port, "/", Authorization=f"Bearer {odd}") == 200


@pytest.mark.parametrize(
    ("token", "got"),
    [
        ("two words with blanks", "other characters"),
        ("f\u00fcnf" * 5, "other characters"),
        ("a\tb" * 9, "other characters"),
        ("x", 1),
        ("x" * 15, 15),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", EVERYWHERE])
def test_a_token_that_is_guessable_or_unfit_for_a_header_is_refused(server, host, token, got, monkeypatch, capsys):
    monkeypatch.setenv("STATSD_BN_VIEW_TOKEN", token)
    assert main(["view", server.endpoint, "--http", f"{host}:{free_port()}"]) == 2
    error = unwrap(capsys.readouterr().err)
    assert "STATSD_BN_VIEW_TOKEN: expected at least 16 printable ASCII characters without spaces" in error
    assert error.endswith(f", got {got}\n")
