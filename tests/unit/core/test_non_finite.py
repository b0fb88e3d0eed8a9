"""The ranks with NaN or infinity, as found by the server."""

import logging
from typing import Any

import numpy as np
import pytest

from server.core.dispatcher import Dispatcher
from server.core.report import group_entries
from server.group.health import MAX_OVERFLOWS
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Failure, Leave, NonFiniteRound
from statsd_bn.reduction import Rows, find_non_finite, is_finite, non_finite_members, sum_in_order
from statsd_bn.round_key import BACKWARD, GATHER
from statsd_bn.wire import decode, encode
from support.strategies import contribution, key, register

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([[1.0], [2.0]], []), ([[1.0], [NAN]], [1]), ([[INF], [-INF]], [0, 1]), ([[-INF], [NAN], [0.0]], [0, 1])],
)
def test_the_report_names_members_with_rows_that_were_not_finite(rows, expected):
    arrays = [np.array(row) for row in rows]
    assert is_finite(sum_in_order(arrays)) == (not expected)
    assert list(non_finite_members(enumerate(arrays))) == expected


def test_an_overflowing_sum_names_no_member():
    arrays = [np.array([1e308])] * 2
    assert not is_finite(sum_in_order(arrays))
    assert list(non_finite_members(enumerate(arrays))) == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([[1.0, INF, 2.0], [1.0, INF, -INF]], "2 of 3 channels (inf)"),
        ([[NAN, 1.0], [1.0, 1.0]], "1 of 2 channels (NaN)"),
        ([[NAN, INF], [1.0, 1.0]], "2 of 2 channels (inf and NaN)"),
        ([[-INF, 0.0], [NAN, 0.0]], "1 of 2 channels (inf)"),
        ([[0.0, 0.0], [NAN, 0.0]], "1 of 2 channels (NaN)"),
    ],
)
def test_the_report_counts_values_that_are_not_finite(values, text):
    assert str(find_non_finite(np.array(values))) == text


class Group:
    def __init__(self, members: int = 2) -> None:
        self.dispatcher = Dispatcher(b"server-0", 0.0)
        for member in range(members):
            self.dispatcher.receive(0.0, b"peer %d" % member, encode(register(member, members)))

    def round(self, of, *values: float) -> Aggregate:
        replies = []
        for member, value in enumerate(values):
            message = contribution(member, Rows((1,), np.array([[[value, 1.0]]])), of)
            replies = self.dispatcher.receive(0.0, b"peer %d" % member, encode(message)).replies
        (answer,) = {frame for _, frame in replies}
        return decode(answer)

    def send(self, of, bearers, what):
        message = NonFiniteRound(register(0).session, of, Members.of(bearers), what)
        return [decode(frame) for _, frame in self.dispatcher.receive(0.0, b"peer 0", encode(message)).replies]

    def say_it_leaves(self, cause):
        self.dispatcher.receive(0.0, b"peer 0", encode(Leave(register(0).session, cause)))

    @property
    def report(self) -> dict[str, Any]:
        (master,) = self.dispatcher._registry.masters.values()
        return group_entries([master], 0.0, [])["groups"][0]

    @property
    def non_finite(self) -> list[str]:
        return self.report["non_finite"]


def test_an_aggregate_names_the_members_with_non_finite_values():
    play = Group()
    assert not play.round(key("a"), 1.0, 2.0).non_finite
    assert list(play.round(key("b"), 1.0, NAN).non_finite) == [1]
    assert list(play.round(key("c"), INF, -INF).non_finite) == [0, 1]


def test_gathered_bytes_are_not_checked():
    play = Group()
    assert not play.round(key("a", phase=GATHER), NAN, INF).non_finite
    assert play.non_finite == []


def test_the_first_non_finite_round_of_each_direction_is_logged_and_in_the_status(caplog):
    play = Group()
    play.round(key("a"), 1.0, 1.0)
    with caplog.at_level(logging.INFO, "statsd_bn.server"):
        for layer in ("b", "c"):
            play.round(key(layer), 1.0, INF)
            play.round(key(layer, phase=BACKWARD), NAN, NAN)
    expected = [
        "first non-finite: layer 'b', forward, step 0, rank 1 (place 1), 1 of 2 channels (inf)",
        "first non-finite: layer 'b', backward, step 0, rank 0 (place 0), rank 1 (place 1), 1 of 2 channels (NaN)",
    ]
    assert play.non_finite == expected
    first = {"layer": "b", "phase": "forward", "step": 0, "ranks": [1], "channels": 1, "of": 2, "what": "inf"}
    assert play.report["first_non_finite"] == first
    log = [(record.levelname, record.getMessage()) for record in caplog.records if "non-finite" in record.getMessage()]
    assert log == [
        ("WARNING", f"job 'job', group 'world': {expected[0]}"),
        ("INFO", f"job 'job', group 'world': {expected[1]}"),
    ]


def test_occasional_gradient_overflows_are_not_reported():
    """A GradScaler causes an overflow once every 2,000 steps, and in some steps at the beginning."""
    play = Group()
    for step in (*range(MAX_OVERFLOWS), 2000, 4000):
        play.round(key("b", step=step), 1.0, 1.0)
        play.round(key("b", step=step, phase=BACKWARD), 1.0, INF)
        play.round(key("a", step=step, phase=BACKWARD), INF, INF)
        assert play.non_finite == []


GRADIENTS = "first non-finite: layer 'b', backward, step 0, rank 1 (place 1), 1 of 2 channels (NaN)"


def test_gradients_are_reported_once_a_forward_pass_is_affected_too(caplog):
    play = Group()
    play.round(key("b", phase=BACKWARD), 1.0, NAN)
    assert play.non_finite == []
    with caplog.at_level(logging.WARNING, "statsd_bn.server"):
        play.round(key("a", step=1), NAN, NAN)
    forward = "first non-finite: layer 'a', forward, step 1, rank 0 (place 0), rank 1 (place 1), 1 of 2 channels (NaN)"
    assert play.non_finite == [GRADIENTS, forward]
    log = [record.getMessage() for record in caplog.records if "non-finite" in record.getMessage()]
    assert log == [f"job 'job', group 'world': {text}" for text in (GRADIENTS, forward)]


def test_gradients_that_stay_not_finite_are_reported():
    play = Group()
    for step in range(MAX_OVERFLOWS + 1):
        assert play.non_finite == []
        play.round(key("b", step=step, phase=BACKWARD), 1.0, NAN)
    assert play.non_finite == [GRADIENTS]


@pytest.mark.parametrize(("steps", "expected"), [(1, [GRADIENTS]), (5, [])])
def test_gradients_are_reported_only_if_the_group_breaks_soon_after(steps, expected):
    play = Group()
    play.round(key("b", phase=BACKWARD), 1.0, NAN)
    for step in range(1, 1 + steps):
        play.round(key("b", step=step), 1.0, 1.0)
    play.say_it_leaves("NonFinite")
    assert play.non_finite == expected


def test_one_member_reports_a_non_finite_round_in_shared_memory(caplog):
    play = Group()
    with caplog.at_level(logging.WARNING, "statsd_bn.server"):
        assert play.send(key("b"), [1], "1 of 2 channels (inf)") == []
    expected = "first non-finite: layer 'b', forward, step 0, rank 1 (place 1), 1 of 2 channels (inf)"
    assert play.non_finite == [expected]
    assert f"job 'job', group 'world': {expected}" in caplog.text
    play.send(key("c"), [0], "2 of 2 channels (NaN)")
    assert play.non_finite == [expected], "only the first counts"


def test_a_report_about_another_groups_round_is_dropped():
    play = Group()
    (answer,) = play.send(key("b")._replace(job="other"), [1], "1 of 2 channels (inf)")
    assert isinstance(answer, Failure)
    assert answer.code == "protocol"
    assert play.non_finite == []


def test_a_report_counts_the_ranks_beyond_the_first_eight():
    play = Group(12)
    play.round(key("a"), *[NAN] * 12)
    assert play.report["first_non_finite"]["ranks"] == list(range(8))
    assert play.report["first_non_finite"]["ranks_left_out"] == 4
