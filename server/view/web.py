"""Web: the page, its stream of snapshots, the heat map, and `/metrics`, on one port."""

import json
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
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
from server.view.guard import App, BoundedProtocol, Guard
from server.view.heat import heat, without_figures
from server.view.metrics import Metrics
from statsd_bn.errors import BindError, ConfigurationError

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/heat.js": ("heat.js", "text/javascript"),
}

# Streams that are open at once. Each holds one thread while it waits, of anyio's 40.
MAX_STREAMS = 16

# A stream says something at least so often, so that a proxy keeps it and a reader that has gone is noticed.
SILENCE_SECONDS = 5.0

# Seconds that streams have to end after Ctrl-C.
END_SECONDS = 1

# Connections that the kernel queues, and that are accepted at once: a queue longer than the number of files that the
# process may open makes asyncio log a traceback for each.
BACKLOG = 32

# Letters of a token: 64 bits where each letter is one of 16.
MIN_TOKEN = 16


def app(feed: Feed, token: str) -> App:
    """The page of a feed, as an ASGI application.

    Args:
        feed: where snapshots come from.
        token: what readers have to bring.
    """
    metrics = Metrics(lambda: feed.snapshot)
    streams = threading.BoundedSemaphore(MAX_STREAMS)

    async def events(_: Request) -> Response:
        if not streams.acquire(blocking=False):
            return Response(f"too many readers, {MAX_STREAMS} follow already", 503, media_type="text/plain")
        return StreamingResponse(_stream(feed, streams), media_type="text/event-stream")

    async def scrape(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def cells(request: Request) -> Response:
        asked = [request.query_params.get(name) for name in ("job", "group")]
        if None in asked:
            return Response("expected job and group in the query", 400, media_type="text/plain")
        # In a thread: of many ranks it takes a while.
        return await run_in_threadpool(lambda: _heat(feed, *map(str, asked)))

    routes = [Route(path, _file(*named)) for path, named in FILES.items()]
    routes += [Route("/events", events), Route("/metrics", scrape), Route("/heat", cells)]
    return Guard(Starlette(routes=routes), token)


def _heat(feed: Feed, job: str, group: str) -> Response:
    """The heat map as JSON; nothing (204) where it is not known."""
    found = heat(feed.snapshot, job, group)
    return JSONResponse(found) if found else Response(status_code=204)


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    body = (PAGE / name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(body, media_type=media_type)

    return answer


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


def token_for(given: str) -> str:
    """The token that was given, or a new one.

    Raises:
        ConfigurationError: it can be guessed, or no header can bring it.
    """
    expected = f"STATSD_BN_VIEW_TOKEN: expected at least {MIN_TOKEN} printable letters of ASCII without blanks"
    if not (given.isascii() and given.isprintable() and " " not in given):
        raise ConfigurationError(f"{expected}, got others")
    if given and len(given) < MIN_TOKEN:
        raise ConfigurationError(f"{expected}, such as `openssl rand -hex 16` makes, got {len(given)}")
    return given or secrets.token_urlsafe(32)


def serve(endpoint: str, report: Callable[[], dict[str, Any]], host: str, port: int, token: str) -> None:
    """Serve a page of what a server reports, until Ctrl-C.

    Args:
        endpoint: of the server, for people.
        report: asks the server; called once a second, in a thread.
        host: of the page.
        port: of the page; 0 picks a free one.
        token: what readers have to bring.

    Raises:
        BindError: nobody can listen there.
        ServerUnreachable: there was no server from the beginning.
    """
    feed = Feed(endpoint, report)
    feed.ask()
    listener = _listening(host, port)
    link = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/?token={quote(token, safe='')}"
    sys.stderr.write(f"statsd_bn view: {link}\n")
    # Neither requests nor what is wrong with them are logged: the first one's address has the token, and anybody who
    # reaches the port can send garbage.
    config = uvicorn.Config(
        app(feed, token),
        http=BoundedProtocol,
        ws="none",
        headers=[("connection", "close")],
        backlog=BACKLOG,
        log_level=logging.ERROR,
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


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(found[:2], family=family)
    except OSError as error:
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        address = f"{host}:{port}"
        raise BindError(f"--http: cannot listen at {address!r}: {why}", endpoint=address) from error
