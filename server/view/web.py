"""Web: serves the page, its stream of snapshots, the heat map and `/metrics` on one port."""

import asyncio
import hmac
import json
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import uvicorn
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.view.feed import Feed
from server.view.metrics import Metrics
from server.view.snapshot import heat, without_figures
from statsd_bn.errors import BindError, ConfigurationError
from statsd_bn.text import log_line

logger = logging.getLogger("statsd_bn.server")

COOKIE = "statsd_bn_view"

# Allow scripts, styles and data of this host only, and no embedding in other pages.
POLICY = b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
POLICY += b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)

REQUEST_SECONDS = 5.0  # timeout of a request after the connection is accepted; a browser sends it at once
REQUEST_BYTES = 16 * 1024  # maximum of the head of a request; its body is not read
MAX_WAITING = 64  # connections without a request, beyond which the oldest is closed; a browser opens six


class Guard:
    """Passes requests to the page if the cookie or `Authorization: Bearer` has the token.

    `/?token=` sets the cookie and redirects to `/`, so that the token does not stay in the address. The token also
    protects against DNS rebinding: a browser sends the cookie only to the host name that set it.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        try:
            await (self._refusal(Request(scope)) or self._app)(scope, receive, send_with_headers)
        except Exception as error:  # noqa: BLE001 - the client has got status 500; else uvicorn would log a traceback
            logger.error("view: %s failed: %s", log_line(scope["path"]), log_line(repr(error)))  # noqa: TRY400

    def _refusal(self, request: Request) -> Response | None:
        """The response to a request that does not reach the page; None if cookie or header have the token."""
        # The cookie's name has the port, because browsers send a host's cookies to all its ports.
        port = request.headers.get("host", "").rpartition(":")[2]
        cookie = f"{COOKIE}_{port}" if port.isdecimal() and port.isascii() else COOKIE
        if request.method not in {"GET", "HEAD"}:
            return _plain("only GET and HEAD are allowed", 405, allow="GET, HEAD")
        if self._is_token(request.query_params.get("token", "")):
            sets = f"{cookie}={quote(self._token, safe='')}; Path=/; HttpOnly; SameSite=Lax"
            return Response(status_code=303, headers={"location": "/", "set-cookie": sets})
        # Starlette's own parser of cookies takes half a second of CPU for 16 kB of backslashes.
        cookies = (part.strip().partition("=") for part in request.headers.get("cookie", "").split(";"))
        given = [unquote(value) for name, _, value in cookies if name == cookie]
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if not any(map(self._is_token, [*given, bearer if kind.lower() == "bearer" else ""])):
            return _plain("open the link that view has printed", 401, **{"www-authenticate": "Bearer"})
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _plain(text: str, status: int, **headers: str) -> Response:
    return Response(text, status, headers, media_type="text/plain")


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol with limits on the number and time of connections without a request.

    Each connection serves one request (`connection: close`), so only the first request needs a timeout.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start the timeout of the request, and close the oldest idle connection beyond the limit."""
        super().connection_made(transport)
        self.expiry = self.loop.call_later(REQUEST_SECONDS, self.close_if_waiting)
        waiting = [one for one in self.connections if isinstance(one, BoundedProtocol) and one.is_waiting]
        if len(waiting) > MAX_WAITING:
            min(waiting, key=lambda one: one.expiry.when()).close_if_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        self.expiry.cancel()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """Whether the request has not arrived."""
        return self.cycle is None and not self.transport.is_closing()

    def close_if_waiting(self) -> None:
        """Close the connection if its request has not arrived."""
        if self.is_waiting:
            self.transport.abort()


PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {f"/{'' if path.suffix == '.html' else path.name}": path for path in PAGE.iterdir() if path.suffix in TYPES}

MAX_STREAMS = 16  # at a time; each occupies one of anyio's 40 threads while it waits
SILENCE_SECONDS = 5.0  # maximum silence of a stream, to keep proxies connected and to detect closed readers
END_SECONDS = 1  # for streams to end after Ctrl-C

# Connections queued by the kernel and accepted together. Beyond the limit on open files asyncio logs a traceback for
# each connection of the queue.
BACKLOG = 32

MIN_TOKEN = 16  # characters: 64 bits in hexadecimal


def app(feed: Feed, token: str) -> ASGIApp:
    """The ASGI application of a feed."""
    streams = threading.BoundedSemaphore(MAX_STREAMS)

    def metrics(_: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(generate_latest(Metrics(feed.snapshot)), media_type=kind)

    async def events(_: Request) -> Response:
        if not streams.acquire(blocking=False):
            return _plain(f"too many readers: {MAX_STREAMS} are connected", 503)
        return EventStream(feed, streams)

    routes = [Route(path, Response(file.read_bytes(), media_type=TYPES[file.suffix])) for path, file in FILES.items()]
    routes += [Route("/events", events), Route("/metrics", metrics)]
    routes.append(Route("/heat", _figures(("job", "group"), lambda *names: heat(feed.snapshot, *names))))
    routes.append(Route("/history", _figures(("job", "group", "layer"), feed.history)))
    return Guard(Starlette(routes=routes), token)


def _figures(names: tuple[str, ...], find: Callable[..., dict[str, Any] | None]) -> Callable[[Request], Response]:
    """Endpoint of figures as JSON: 400 without all names in the query, 204 if nothing is known.

    Starlette calls it in a thread, because it takes long for many ranks.
    """

    def figures(request: Request) -> Response:
        if not request.query_params.keys() >= set(names):
            return _plain(f"expected {', '.join(names[:-1])} and {names[-1]} in the query", 400)
        found = find(*(request.query_params[name] for name in names))
        return JSONResponse(found) if found else Response(status_code=204)

    return figures


class EventStream(StreamingResponse):
    """Server-sent events; releases its semaphore also if the reader disconnects before the first event."""

    def __init__(self, feed: Feed, streams: threading.BoundedSemaphore) -> None:
        super().__init__(_events(feed), media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the reader leaves or the feed stops (ASGI)."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.release()


async def _events(feed: Feed) -> AsyncIterator[str]:
    """Each new snapshot, or a comment after SILENCE_SECONDS."""
    number = -1
    while not feed.stopped:
        last, (number, snapshot) = number, await run_in_threadpool(feed.next, number, SILENCE_SECONDS)
        text = json.dumps(without_figures(snapshot), separators=(",", ":")) if number > last else ""
        yield f"data: {text}\n\n" if text else ": no news\n\n"


def token_for(given: str) -> str:
    """The given token, or a new one; raises ConfigurationError if it is too short or not valid in a header."""
    expected = f"STATSD_BN_VIEW_TOKEN: expected at least {MIN_TOKEN} printable ASCII characters without spaces"
    if not (given.isascii() and given.isprintable() and " " not in given):
        raise ConfigurationError(f"{expected}, got other characters")
    if given and len(given) < MIN_TOKEN:
        raise ConfigurationError(f"{expected}, such as `openssl rand -hex 16` makes, got {len(given)}")
    return given or secrets.token_urlsafe(32)


def serve(feed: Feed, host: str, port: int, token: str) -> None:
    """Serve the page of a feed until Ctrl-C; port 0 picks a free one. Raises BindError."""
    listener = _listening(host, port)
    link = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/?token={quote(token, safe='')}"
    sys.stderr.write(f"statsd_bn view: {link}\n")
    bounds = {"h11_max_incomplete_event_size": REQUEST_BYTES, "timeout_graceful_shutdown": END_SECONDS}
    settings: dict[str, Any] = {**bounds, "backlog": BACKLOG, "headers": [("connection", "close")]}
    # uvicorn logs no requests: the address of a valid one may have the token, and any client can send invalid ones.
    settings |= {"log_level": logging.ERROR, "access_log": False, "server_header": False}
    config = uvicorn.Config(app(feed, token), http=BoundedProtocol, ws="none", lifespan="off", **settings)
    runner = threading.Thread(target=feed.run, name="view")
    runner.start()
    try:
        uvicorn.Server(config).run([listener])
    except KeyboardInterrupt:
        pass
    finally:
        feed.stop()
        runner.join()
        listener.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(found[:2], family=family)
    except OSError as error:
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        address = f"{host}:{port}"
        raise BindError(f"--http: cannot listen at {address!r}: {why}", endpoint=address) from error
