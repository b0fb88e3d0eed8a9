"""`python -m server`: parses the command line, runs a command, and returns its exit code."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from server.cli import bug_report
from server.cli.status import CHECK_SECONDS, ask, is_greeted, own_endpoint, refuses_malformed, watch
from server.config import Parser, from_arguments, host_and_port, suggestion
from server.network.service import run_master
from server.security.keygen import generate, load_query_keys, write_secret
from server.view.snapshot import SnapshotBuilder
from server.view.text import describe, describe_snapshot, with_verdicts
from statsd_bn.endpoints import check_key, check_server_socket, needs_keys
from statsd_bn.environment import boolean
from statsd_bn.errors import AuthenticationRefused, BindError, ConfigurationError, ServerUnreachable
from statsd_bn.keys import ClientKeys
from statsd_bn.text import escape, log_line, wrap

DEFAULT_HTTP = "127.0.0.1:8321"  # address of `view`'s page
MISSING_EXTRA = "view needs the extra `view`: pip install '.[view]' in a clone (there is no {})"

# Maximum characters of the first line of a command's error, and of a line of the log: the longest error of the project
# has 600, but a peer can cause one of 4,096 bytes.
ERROR_LINE, MAX_LINE = 120, 1000

MAX_PER_PERIOD, PERIOD_SECONDS = 30, 60.0  # messages of one kind in the log

EXIT_CODES = {ConfigurationError: 2, BindError: 3, ServerUnreachable: 4, AuthenticationRefused: 5}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 2 usage, 3 cannot bind, 4 no server, 5 a refused key."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name, *rest = given if given and not given[0].startswith("-") else ("serve", *given)
    try:
        if name not in COMMANDS:
            known = tuple(COMMANDS)
            nearest = suggestion(name, known) or f"; expected one of {known}"
            raise ConfigurationError(f"unknown command {name!r}{nearest}")
        COMMANDS[name](rest)
        sys.stdout.flush()
    except BrokenPipeError:
        # The pipe's reader, such as `head`, has exited. Discard what the interpreter would write at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except tuple(EXIT_CODES) as error:
        print(wrap(f"statsd_bn: {log_line(error)}", ERROR_LINE), file=sys.stderr)  # noqa: T201 - the command's error
        return EXIT_CODES[type(error)]
    return 0


class PlainFormatter(logging.Formatter):
    """Writes each message on one short line, so that text from peers cannot forge lines or control a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The escaped message, without a traceback."""
        line = escape(super().formatMessage(record))
        more = len(line) - MAX_LINE
        return line if more <= 0 else f"{line[:MAX_LINE]}... ({more} more characters)"


class RateLimitFilter(logging.Filter):
    """Logs at most 30 messages of a kind per minute; the next minute's first message gives the number suppressed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # By kind: the start of its period, and the number of messages since.
        self._kinds: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record; messages with the same format string are of one kind."""
        now, kind = self._clock(), str(record.msg)
        since, number = self._kinds.get(kind, (now, 0))
        if now - since >= PERIOD_SECONDS:
            if number > MAX_PER_PERIOD:
                record.msg = f"{record.msg} ({number - MAX_PER_PERIOD} similar messages were suppressed)"
            since, number = now, 0
        self._kinds[kind] = since, number + 1
        return number < MAX_PER_PERIOD


def _serve(arguments: list[str]) -> None:
    config = from_arguments(arguments, os.environ)
    log = logging.StreamHandler()
    log.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=config.logging_level, handlers=[log])
    logging.getLogger("statsd_bn.server").addFilter(RateLimitFilter())
    run_master(config)


def _status(arguments: list[str]) -> None:
    default = "as STATSD_BN_ENDPOINT or STATSD_BN_BIND says, else this user's own server"
    parser = _asking_parser("status", "Prints the status of a running server.", default)
    parser.add_argument("--json", action="store_true", help="print the report as JSON, on one line")
    parser.add_argument("--watch", action="store_true", help="print it again every second, until Ctrl-C")
    found = parser.parse_args(arguments)
    endpoint = _endpoint(found)
    keys = _keys(endpoint, found.curve)
    builder = SnapshotBuilder(endpoint)

    def text() -> str:
        report = ask(endpoint, keys=keys)
        if found.json:
            return json.dumps(with_verdicts(report, time.time()), ensure_ascii=False, sort_keys=True)
        once = describe(report)  # raises for a malformed report, before the builder stores any part of it
        with refuses_malformed():
            return describe_snapshot(builder.update(time.time(), report)) if found.watch else once

    def failed(error: ServerUnreachable) -> str:
        text = log_line(error)
        return text if found.json else describe_snapshot(builder.fail(time.time(), text))

    if found.watch:
        watch(text, failed=failed)
    else:
        print(text())  # noqa: T201 - the command's result


def _view(arguments: list[str]) -> None:
    about = "Serves a page with the status of a running server, and /metrics for Prometheus, until Ctrl-C."
    about += " It only reads. The page asks for a token; the printed link contains it."
    parser = _asking_parser("view", about)
    where = f"address of the page; port 0 picks a free one (default {DEFAULT_HTTP}); the token of the page is "
    where += "STATSD_BN_VIEW_TOKEN (default: a new one)"
    parser.add_argument("--http", type=host_and_port, metavar="HOST:PORT", default=DEFAULT_HTTP, help=where)
    found = parser.parse_args(arguments)
    try:
        from server.view.feed import Feed, FigureReader, fetch_report  # noqa: PLC0415 - of the extra `view`
        from server.view.web import serve, token_for  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigurationError(MISSING_EXTRA.format(error.name)) from error
    token = token_for(os.environ.get("STATSD_BN_VIEW_TOKEN", "").strip())
    endpoint = _endpoint(found)
    keys = _keys(endpoint, found.curve)
    feed = Feed(endpoint, partial(fetch_report, endpoint, keys, FigureReader()))
    feed.refresh()
    host, port = found.http
    serve(feed, host, port, token)


def _asking_parser(command: str, description: str, default: str = "as for status") -> Parser:
    """Parser of a command that asks a running server."""
    parser = Parser(command, description=description)
    where = f"where the server listens (default: {default})"
    parser.add_argument("endpoint", metavar="ENDPOINT", nargs="?", help=where)
    which = "for a server with --curve: a client's secret key, or the server's own folder to see all jobs "
    curve = os.environ.get("STATSD_BN_CURVE") or None
    parser.add_argument("--curve", metavar="FILE", default=curve, help=f"{which}(STATSD_BN_CURVE)")
    return parser


def _endpoint(found: Any) -> str:
    endpoint: str = found.endpoint or os.environ.get("STATSD_BN_ENDPOINT") or own_endpoint(os.environ)
    return endpoint


def _keys(endpoint: str, curve: str | None) -> ClientKeys | None:
    check_server_socket(endpoint)
    keys = load_query_keys(curve) if curve else None
    check_key(endpoint, has_key=keys is not None, insecure=boolean(os.environ, "STATSD_BN_INSECURE"))
    return keys


def _keygen(arguments: list[str]) -> None:
    about = "Makes keys for --curve: the server's if DIR has none yet, and clients'. Overwrites nothing."
    parser = Parser("keygen", description=about)
    parser.add_argument("folder", metavar="DIR", help="folder of the keys")
    parser.add_argument("--client", action="append", metavar="NAME", help='a client; repeatable; default "client"')
    jobs = "names of jobs that these clients may join and see, such as 'team-a-*'; repeatable; default: all"
    parser.add_argument("--jobs", action="append", metavar="PATTERN", help=jobs)
    tenant = "tenant of these clients, which share its limits; default: one tenant per client"
    parser.add_argument("--tenant", default="", metavar="NAME", help=tenant)
    found = parser.parse_args(arguments)
    for path in generate(found.folder, found.client or (), found.jobs or (), found.tenant):
        print(f"wrote {path}")  # noqa: T201 - the command's result


def _secret(arguments: list[str]) -> None:
    about = "Makes the secret of a job on several nodes, for STATSD_BN_SECRET_FILE. Overwrites nothing."
    parser = Parser("secret", description=about)
    parser.add_argument("file", metavar="FILE", help="file to write")
    found = parser.parse_args(arguments)
    write_secret(found.file)
    print(f"wrote {found.file}")  # noqa: T201 - the command's result


def _check(arguments: list[str]) -> None:
    about = "Exits with 0 if a server answers, with 4 if not, and with 2 if ENDPOINT is invalid; for health checks and "
    about += "probes. Without a key it only sees that a server is there, and the server counts a refused connection."
    default = "as STATSD_BN_BIND or STATSD_BN_ENDPOINT says, else this user's own server"
    parser = _asking_parser("check", about, default)
    found = parser.parse_args(arguments)
    # STATSD_BN_BIND wins: it is set on the server's own host.
    elsewhere = "" if os.environ.get("STATSD_BN_BIND") else os.environ.get("STATSD_BN_ENDPOINT")
    endpoint = found.endpoint or elsewhere or own_endpoint(os.environ)
    check_server_socket(endpoint)
    keys = load_query_keys(found.curve) if found.curve else None
    may_ask = keys or boolean(os.environ, "STATSD_BN_INSECURE") or not needs_keys(endpoint)
    if may_ask or not is_greeted(endpoint):
        with suppress(AuthenticationRefused):  # a refusal is an answer too
            ask(endpoint, CHECK_SECONDS, keys)


def _report(arguments: list[str]) -> None:
    about = "Prints versions, devices, settings, and a server's state for a bug report"
    parser = _asking_parser("report", f"{about}, without names, hosts, addresses and keys.")
    parser.add_argument("--log", type=Path, metavar="FILE", help="log file: add its last lines, redacted")
    found = parser.parse_args(arguments)
    keys = partial(_keys, curve=found.curve)
    print(bug_report.describe(partial(_endpoint, found), keys, found.log))  # noqa: T201 - the command's result


_COMMANDS = (_serve, _status, _check, _view, _report, _keygen, _secret)
COMMANDS = {command.__name__.removeprefix("_"): command for command in _COMMANDS}


if __name__ == "__main__":
    sys.exit(main())
