"""Guard: what reaches the page at all. It answers GET to requests with the token, and drops unfinished requests."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from uvicorn.protocols.http.h11_impl import H11Protocol

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

# Time for a request to arrive. A browser sends one at once, after it has connected.
REQUEST_SECONDS = 5.0

# Connections whose request has not arrived; beyond, the oldest is closed. A browser opens six.
MAX_WAITING = 64


class Guard:
    """Lets a request through to the page, or answers it.

    The token also protects from a page of another host whose name leads here (DNS rebinding): the browser sends the
    cookie to the name that set it only.

    Args:
        app: what is guarded.
        token: what a request has to bring: as `Authorization: Bearer`, as the cookie, or once as `/?token=`, which
            sets the cookie and leads to `/`, so that the token does not stay in the address.
    """

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI has it."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        cookie = _cookie(headers.get(b"host", ""))
        if scope["method"] not in {"GET", "HEAD"}:
            await _answer(send, 405, "this page only reads", ((b"allow", b"GET, HEAD"),))
        elif self._is_token(parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]):
            sets = f"{cookie}={quote(self._token, safe='')}; Path=/; HttpOnly; SameSite=Lax"
            await _answer(send, 303, "", ((b"location", b"/"), (b"set-cookie", sets.encode())))
        elif not self._brings_token(headers, cookie):
            await _answer(send, 401, "open the link that view has printed", ((b"www-authenticate", b"Bearer"),))
        else:
            await self._app(scope, receive, _with_headers(send))

    def _brings_token(self, headers: dict[bytes, str], cookie: str) -> bool:
        kind, _, bearer = headers.get(b"authorization", "").partition(" ")
        pairs = (part.strip().partition("=") for part in headers.get(b"cookie", "").split(";"))
        cookies = [unquote(value) for name, _, value in pairs if name == cookie]
        return any(self._is_token(given) for given in (*cookies, bearer if kind.lower() == "bearer" else ""))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol, with bounds for connections whose request has not arrived: in number and in time.

    Each connection serves one request (`connection: close`), so that only its first one has to be timed.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start the time of the request, and make room for it."""
        super().connection_made(transport)
        self.expiry = self.loop.call_later(REQUEST_SECONDS, self.expire)
        waiting = [one for one in self.connections if isinstance(one, BoundedProtocol) and one.is_waiting]
        if len(waiting) > MAX_WAITING:
            min(waiting, key=lambda one: one.expiry.when()).expire()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what the connection held."""
        self.expiry.cancel()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """Whether the request has not arrived."""
        return self.cycle is None and not self.transport.is_closing()

    def expire(self) -> None:
        """Close the connection if its request has not arrived."""
        if self.is_waiting:
            self.transport.abort()


def _cookie(host: str) -> str:
    """Name of the cookie. It has the port, since a browser sends the cookies of one host to all of its ports."""
    port = host.rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isdecimal() and port.isascii() else COOKIE


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
