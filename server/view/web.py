"""Web: the page, its stream of snapshots, what it asks for beside them, and `/metrics`, on one port."""

import json
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from server.view.feed import Feed
from server.view.guard import App, Guard
from server.view.heat import heat, without_figures
from server.view.history import History
from server.view.metrics import Metrics
from statsd_bn.errors import BindError, ConfigurationError

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/heat.js": ("heat.js", "text/javascript"),
    "/layer.js": ("layer.js", "text/javascript"),
}

# Streams that are open at once. Each holds one thread while it waits, of anyio's 40.
MAX_STREAMS = 16

# A stream says something at least so often, so that a proxy keeps it and a reader that has gone is noticed.
SILENCE_SECONDS = 5.0

# Seconds that streams have to end after Ctrl-C.
END_SECONDS = 1


def app(feed: Feed, history: History, token: str = "", names: Iterable[str] = ()) -> App:
    """The page of a feed, as an ASGI application.

    Args:
        feed: where snapshots come from.
        history: what has come from it.
        token: what readers have to bring; "" asks for none.
        names: of this host, beside its addresses and `localhost`.
    """
    metrics = Metrics(lambda: feed.snapshot)
    streams = threading.BoundedSemaphore(MAX_STREAMS)

    async def events(_: Request) -> Response:
        if not streams.acquire(blocking=False):
            return Response(f"too many readers, {MAX_STREAMS} follow already", 503, media_type="text/plain")
        return StreamingResponse(_stream(feed, streams), media_type="text/event-stream")

    async def scrape(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def now(request: Request) -> Response:
        return await _found(lambda job, group: heat(feed.snapshot, job, group), request, "job", "group")

    async def past(request: Request) -> Response:
        return await _found(history.layer, request, "job", "group", "layer")

    routes = [Route(path, _file(*named)) for path, named in FILES.items()]
    routes += [Route("/events", events), Route("/metrics", scrape), Route("/heat", now), Route("/history", past)]
    return Guard(Starlette(routes=routes), token, names)


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    body = (PAGE / name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(body, media_type=media_type)

    return answer


async def _found(look: Callable[..., dict[str, Any] | None], request: Request, *names: str) -> Response:
    """What a look-up by the address's arguments finds, as JSON; nothing (204) where it finds nothing.

    It runs in a thread: of many ranks it takes a while.
    """
    missing = [name for name in names if name not in request.query_params]
    if missing:
        return Response(f"expected {', '.join(names)}; there is no {missing[0]}", 400, media_type="text/plain")

    def answer() -> Response:
        found = look(*(request.query_params[name] for name in names))
        return JSONResponse(found) if found else Response(status_code=204)

    return await run_in_threadpool(answer)


async def _stream(feed: Feed, streams: threading.BoundedSemaphore) -> AsyncIterator[str]:
    """Server-sent events: each snapshot; a comment where there was no new one."""
    number = -1
    try:
        while not feed.stopped:
            last, (number, snapshot) = number, await run_in_threadpool(feed.next, number, SILENCE_SECONDS)
            text = json.dumps(without_figures(snapshot), separators=(",", ":")) if number > last else ""
            yield f"data: {text}\n\n" if text else ": no news\n\n"
    finally:
        streams.release()


def serve(feed: Feed, history: History, address: str, *, names: Iterable[str] = (), token: str = "") -> None:
    """Serve a feed until Ctrl-C; the feed runs in a thread.

    Args:
        feed: it has a snapshot already.
        history: what the feed fills.
        address: `HOST:PORT`; an address that is not loopback asks readers for a token.
        names: of this host, beside its addresses and `localhost`.
        token: what readers have to bring; "" makes one where one is needed.

    Raises:
        BindError: nobody can listen there.
        ConfigurationError: this is not an address, or the token has other letters than a header can bring.
    """
    host, port = _parsed(address)
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigurationError("STATSD_BN_VIEW_TOKEN: expected printable letters of ASCII without blanks, got others")
    listener = _listening(host, port, address)
    if not _is_loopback(host):
        token = token or secrets.token_urlsafe(32)
    link = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"
    sys.stderr.write(f"statsd_bn view: {link}{f'?token={quote(token)}' if token else ''}\n")
    # Requests are not logged: the first one's address has the token.
    config = uvicorn.Config(
        app(feed, history, token, names),
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=END_SECONDS,
        lifespan="off",
    )
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


def _listening(host: str, port: int, address: str) -> socket.socket:
    """A socket that listens there; port 0 picks a free one."""
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(found[:2], family=family)
    except OSError as error:
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise BindError(f"--http: cannot listen at {address!r}: {why}", endpoint=address) from error


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ConfigurationError(f"--http: expected HOST:PORT such as 127.0.0.1:8321, got {address!r}")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
