import asyncio
import time

import pytest

pytest.importorskip("uvicorn", reason="needs the extra view")

from server.view.web import COOKIE, REQUEST_BYTES, Guard

TOKEN = "s3cret"  # noqa: S105 - it opens nothing


async def page(_scope, _receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})


def answer(guard, method="GET", host="127.0.0.1:8321", query="", **headers):
    messages = []

    async def send(message):
        messages.append(message)

    named = [(b"host", host.encode()), *((name.encode(), value.encode()) for name, value in headers.items())]
    scope = {"type": "http", "method": method, "headers": named, "query_string": query.encode()}
    asyncio.run(guard(scope, None, send))
    return messages[0]["status"], dict(messages[0]["headers"])


def test_the_token_is_accepted_in_a_header_or_a_cookie():
    guard = Guard(page, TOKEN)
    assert answer(guard)[0] == 401
    assert answer(guard, authorization="Bearer wrong")[0] == 401
    assert answer(guard, authorization=f"Bearer {TOKEN}")[0] == 200
    assert answer(guard, cookie=f"a=b; {COOKIE}_8321={TOKEN}")[0] == 200
    assert answer(guard, cookie=f"{COOKIE}_8321=; x={TOKEN}")[0] == 401


@pytest.mark.parametrize("cookies", [("wrong", TOKEN), (TOKEN, "wrong")], ids=["last", "first"])
def test_the_token_in_one_of_several_cookies_of_the_same_name_is_enough(cookies):
    assert answer(Guard(page, TOKEN), cookie="; ".join(f"{COOKIE}_8321={value}" for value in cookies))[0] == 200


@pytest.mark.parametrize("name", ["x", f"{COOKIE}_8321"])
def test_a_long_cookie_without_the_token_costs_little(name):
    guard, cookie = Guard(page, TOKEN), name + '="' + "\\" * (REQUEST_BYTES - 100) + '"'
    began = time.thread_time()
    assert answer(guard, cookie=cookie)[0] == 401
    assert time.thread_time() - began < 0.1


@pytest.mark.parametrize(("host", "cookie"), [("view.lan", COOKIE), ("[::1]:80", f"{COOKIE}_80"), ("[::1]", COOKIE)])
def test_the_cookie_is_named_by_port_so_that_two_pages_of_a_host_differ(host, cookie):
    _, headers = answer(Guard(page, TOKEN), host=host, query=f"token={TOKEN}")
    assert headers[b"set-cookie"].startswith(f"{cookie}=".encode())
    assert answer(Guard(page, TOKEN), host=host, cookie=f"{cookie}={TOKEN}")[0] == 200
    assert answer(Guard(page, TOKEN), host="localhost:81", cookie=f"{cookie}={TOKEN}")[0] == 401


def test_the_first_link_sets_the_cookie_and_leaves_no_token_in_the_address():
    guard = Guard(page, TOKEN)
    status, headers = answer(guard, query=f"token={TOKEN}")
    assert (status, headers[b"location"]) == (303, b"/")
    assert headers[b"set-cookie"] == f"{COOKIE}_8321={TOKEN}; Path=/; HttpOnly; SameSite=Lax".encode()
    assert answer(guard, query="token=wrong")[0] == 401
    assert answer(guard, query="token=%FF")[0] == 401
