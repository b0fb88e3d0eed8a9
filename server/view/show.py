"""Show: what `statsd-bn view` does with its arguments."""

import json
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from importlib import import_module
from itertools import chain
from typing import Any

from server.view.feed import PERIOD_SECONDS, Feed
from server.view.history import History
from server.view.recording import Recorder, is_recording, recorded
from server.view.snapshot import Snapshot
from statsd_bn.errors import ConfigurationError

EXTRA = "view needs the extra `view`: pip install 'statsd-bn[view]' (there is no {})"


def show(
    endpoint: str,
    report: Callable[[], dict[str, Any]],
    *,
    once: bool = False,
    as_json: bool = False,
    record: str | None = None,
    http: str | None = None,
    names: Iterable[str] = (),
    token: str = "",
) -> None:
    """Show a server's snapshots in the terminal, or as a page, until Ctrl-C.

    Args:
        endpoint: of the server, for people.
        report: asks the server.
        once: show one, and end.
        as_json: write each on one line.
        record: the file to keep them in.
        http: `HOST:PORT` of the page; None for the terminal.
        names: of the page's host, beside its addresses and `localhost`.
        token: what the page's readers have to bring; "" makes one where one is needed.

    Raises:
        ConfigurationError: the extra `view` is not installed, or the file cannot be written.
        ServerUnreachable: there was no server from the beginning.
    """
    with closing(Recorder(record)) if record else nullcontext() as recorder:
        history = History() if http else None
        feed = Feed(endpoint, report, recorder, history)
        first = feed.ask()
        if http:
            _module("web").serve(feed, history, http, names=names, token=token)
        elif once or as_json:
            _write([first] if once else _following(feed, first), as_json=as_json)
        else:
            _live(feed)


def replay(path: str, *, once: bool = False, as_json: bool = False) -> None:
    """Show a recording: its last snapshot, or with `as_json` and without `once` all of them.

    Raises:
        ConfigurationError: this is not a recording, or an empty one.
    """
    snapshots = recorded(path, last=once or not as_json)
    first = next(snapshots, None)
    if first is None:
        raise ConfigurationError(f"expected a recording with a snapshot, got an empty one: {path!r}")
    _write(chain([first], snapshots), as_json=as_json)


def is_file(endpoint: str | None) -> bool:
    """Whether what stands for the endpoint is a recording."""
    return endpoint is not None and "://" not in endpoint and is_recording(endpoint)


def _following(feed: Feed, first: Snapshot) -> Iterable[Snapshot]:
    pause = threading.Event()
    yield first
    while not pause.wait(PERIOD_SECONDS):
        yield feed.ask()


def _write(snapshots: Iterable[Snapshot], *, as_json: bool) -> None:
    try:
        for snapshot in snapshots:
            if as_json:
                sys.stdout.write(json.dumps(snapshot, ensure_ascii=False, sort_keys=True, default=list) + "\n")
            else:
                terminal = _module("terminal")
                console = terminal.Console()
                console.print(terminal.drawn(snapshot))
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass


def _live(feed: Feed) -> None:
    terminal = _module("terminal")
    from rich.live import Live  # noqa: PLC0415 - of the extra `view`

    runner = threading.Thread(target=feed.run, name="view")
    console = terminal.Console()
    number = 0
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            runner.start()
            while True:
                number, snapshot = feed.next(number, PERIOD_SECONDS)
                live.update(terminal.fitting(snapshot, console), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        feed.stop()
        runner.join()


def _module(name: str) -> Any:
    """A module of this package that needs the extra `view`."""
    try:
        return import_module(f"server.view.{name}")
    except ModuleNotFoundError as error:
        raise ConfigurationError(EXTRA.format(error.name)) from error
