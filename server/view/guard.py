"""Guard: what reaches the page at all. It answers GET, to a name of this host, and to whoever has the token."""

import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, quote, unquote

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "statsd_bn_view"

# Scripts, styles and data come from this host alone, and no other page shows this one in a frame.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """Lets a request through to the page, or answers it.

    A page of another host cannot read this one by a name that it lets point here (DNS rebinding): the `Host` has to be
    an address, `localhost`, or a name that was told.

    Args:
        app: what is guarded.
        token: what a request has to bring: as `Authorization: Bearer`, as the cookie, or once as `/?token=`, which
            sets the cookie and leads to `/`, so that the token does not stay in the address; "" asks for none.
        names: further names of this host.
    """

    def __init__(self, app: App, token: str = "", names: Iterable[str] = ()) -> None:
        self._app = app
        self._token = token
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI has it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] not in {"GET", "HEAD"}:
            await _answer(send, 405, "this page only reads", ((b"allow", b"GET, HEAD"),))
        elif not self._is_ours(headers.get(b"host", "")):
            await _answer(send, 421, "not a name of this host; view --name NAME allows it")
        elif self._token and self._is_token(parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]):
            cookie = f"{COOKIE}={quote(self._token, safe='')}; Path=/; HttpOnly; SameSite=Lax"
            await _answer(send, 303, "", ((b"location", b"/"), (b"set-cookie", cookie.encode())))
        elif self._token and not self._brings_token(headers):
            await _answer(send, 401, "open the link that view has printed", ((b"www-authenticate", b"Bearer"),))
        else:
            await self._app(scope, receive, _with_headers(send))

    def _is_ours(self, host: str) -> bool:
        name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        try:
            ip_address(name)
        except ValueError:
            return name.lower() in self._names
        return True

    def _brings_token(self, headers: dict[bytes, str]) -> bool:
        kind, _, bearer = headers.get(b"authorization", "").partition(" ")
        pairs = (part.strip().partition("=") for part in headers.get(b"cookie", "").split(";"))
        cookies = [unquote(value) for name, _, value in pairs if name == COOKIE]
        return any(self._is_token(given) for given in (*cookies, bearer if kind.lower() == "bearer" else ""))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _with_headers(send: Send) -> Send:
    async def sends(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *HEADERS]
        await send(message)

    return sends


async def _answer(send: Send, status: int, text: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    body = text.encode()
    told = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *headers]
    await _with_headers(send)({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body})
