"""What a great job costs the viewer: 1,000 ranks and 200 layers, more than a server of ours tells of, take a few per
cent of a core.
"""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="needs the extra view")

from server.cli.status import report_of
from server.view import feed as feeds
from server.view.feed import Feed
from server.view.figures import add_figures
from server.view.heat import heat, without_figures
from server.view.metrics import Metrics
from statsd_bn.messages import Figures, Status, StatusRequest
from statsd_bn.wire import encode
from support.view_reports import group, member, report

RANKS, LAYERS, LAYERS_AT_ONCE = 1000, 200, 25

# As long as the trial pretends to last, and what it may take of a core meanwhile.
SECONDS, MOST_OF_A_CORE = 10, 0.1


class GreatServer:
    """Frames of a server, with other figures each second."""

    def __init__(self):
        self._chance = np.random.default_rng(0)
        self._status = encode(Status(report(group(*(member(rank) for rank in range(RANKS))))))

    def tick(self):
        figures = self._chance.random((LAYERS, RANKS, 4))
        figures[..., 3] /= RANKS
        self._figures = {first: self._encoded(figures, first) for first in range(0, LAYERS, LAYERS_AT_ONCE)}

    def ask(self, message):
        return self._status if isinstance(message, StatusRequest) else self._figures[message.first]

    def report(self):
        """As the command takes it."""
        found = report_of("", self.ask(StatusRequest()))
        add_figures(self.ask, found["groups"])
        return found

    def _encoded(self, figures, first):
        names = "\n".join(f"layer{at}" for at in range(first, first + LAYERS_AT_ONCE))
        return encode(Figures("digits", "world", first, LAYERS, names, figures[first : first + LAYERS_AT_ONCE]))


def test_it_takes_less_than_a_tenth_of_a_core(monkeypatch):
    clock = 1e9
    monkeypatch.setattr(feeds, "time", SimpleNamespace(time=lambda: clock))
    server, used = GreatServer(), 0.0
    feed = Feed("tcp://127.0.0.1:4555", server.report)
    metrics = Metrics(lambda: feed.snapshot)
    for _ in range(SECONDS):
        clock += 1
        server.tick()
        before = time.process_time()
        feed.ask()
        # A reader of the page, and a Prometheus that scrapes it more often than as a rule.
        json.dumps(without_figures(feed.snapshot))
        json.dumps(heat(feed.snapshot, "digits", "world"))
        metrics.text()
        used += time.process_time() - before
    assert len(feed.snapshot["groups"][0]["figures"]["layers"]) == LAYERS
    assert used / SECONDS < MOST_OF_A_CORE
