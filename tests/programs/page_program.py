"""The page of a pretended server (`HOST:PORT FILE`); FILE has arguments of `view_states.snapshot`, and may change."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from server.config import host_and_port
from server.view import web
from support import view_states

TOKEN = "of-the-test-0123"  # noqa: S105 - it opens nothing

PERIOD_SECONDS = 0.5


class States:
    """Stands in for `Feed`: makes a snapshot from the file once per period."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._number = 0
        self._period = PERIOD_SECONDS
        self._new = threading.Condition()
        self.stopped = False
        self.refresh()

    def refresh(self) -> None:
        wanted = json.loads(self._file.read_text())
        self._period = wanted.pop("period", PERIOD_SECONDS)
        with self._new:
            self.snapshot: dict[str, Any] = view_states.snapshot(**{"now": time.time(), **wanted})
            self._number += 1
            self._new.notify_all()

    def next(self, after: int, seconds: float) -> tuple[int, dict[str, Any]]:
        with self._new:
            self._new.wait_for(lambda: self._number > after or self.stopped, seconds)
            return self._number, self.snapshot

    def history(self, job: str, group: str, layer: str) -> dict[str, Any] | None:
        return view_states.history(self.snapshot, job, group, layer)

    def run(self) -> None:
        while not self.stopped:
            time.sleep(self._period)
            self.refresh()

    def stop(self) -> None:
        self.stopped = True
        with self._new:
            self._new.notify_all()


def main(address: str, file: str) -> None:
    web.heat = view_states.heat  # the figures do not travel through a report here
    web.without_figures = lambda snapshot: snapshot
    host, port = host_and_port(address)
    web.serve(States(Path(file)), host, port, TOKEN)


if __name__ == "__main__":
    main(*sys.argv[1:])
