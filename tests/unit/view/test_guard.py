import asyncio

import pytest

from server.view.guard import COOKIE, Guard

TOKEN = "s3cret"  # noqa: S105 - it opens nothing


async def page(_scope, _receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})


def answer(guard, method="GET", host="127.0.0.1:8321", query="", **headers):
    told = []

    async def send(message):
        told.append(message)

    named = [(b"host", host.encode()), *((name.encode(), value.encode()) for name, value in headers.items())]
    scope = {"type": "http", "method": method, "headers": named, "query_string": query.encode()}
    asyncio.run(guard(scope, None, send))
    return told[0]["status"], dict(told[0]["headers"])


@pytest.mark.parametrize("host", ["127.0.0.1:8321", "localhost", "[::1]:80", "10.0.0.5:8321", "view.lan:8321"])
def test_addresses_and_told_names_of_this_host_are_answered(host):
    status, headers = answer(Guard(page, names=["view.lan"]), host=host)
    assert status == 200
    assert b"default-src 'none'" in headers[b"content-security-policy"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8321", "127.0.0.1.evil.example", "", "localhost.evil"])
def test_a_name_that_leads_here_is_not_ours(host):
    assert answer(Guard(page), host=host)[0] == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_only_reads(method):
    assert answer(Guard(page), method)[0] == 405


def test_a_token_comes_by_header_or_by_cookie():
    guard = Guard(page, TOKEN)
    assert answer(guard)[0] == 401
    assert answer(guard, authorization="Bearer wrong")[0] == 401
    assert answer(guard, authorization=f"Bearer {TOKEN}")[0] == 200
    assert answer(guard, cookie=f"a=b; {COOKIE}={TOKEN}")[0] == 200
    assert answer(guard, cookie=f"{COOKIE}=; x={TOKEN}")[0] == 401


def test_the_first_link_sets_the_cookie_and_leaves_no_token_in_the_address():
    guard = Guard(page, TOKEN)
    status, headers = answer(guard, query=f"token={TOKEN}")
    assert (status, headers[b"location"]) == (303, b"/")
    assert headers[b"set-cookie"] == f"{COOKIE}={TOKEN}; Path=/; HttpOnly; SameSite=Lax".encode()
    assert answer(guard, query="token=wrong")[0] == 401
    assert answer(guard, query="token=%FF")[0] == 401
