"""Reports on rounds that the server did not see: checked, bounded, and searched for skew."""

import logging

import numpy as np
import pytest

from statsd_bn.errors import ProtocolError
from statsd_bn.messages import SkewStats
from statsd_bn.wire import encode
from support.pure_members import PureWorld

# The third member causes most of the variance between the members.
FIGURES = np.array([[10.0, 0.0, 1.0, 0.01], [10.0, 0.1, 1.1, 0.01], [10.0, 5.0, 9.0, 0.4]])


@pytest.fixture
def world():
    return PureWorld(3)


def send_stats(world, step=0, layers="stem\nhead", figures=FIGURES, session=None):
    values = np.stack([figures] * (layers.count("\n") + 1))
    world.send(
        world.members[0], encode(SkewStats(session or world.members[0].session.member_token, step, layers, values))
    )


def report(world):
    (group,) = world.dispatcher.report(world.now)["groups"]
    return group


def test_the_log_and_the_report_name_the_rank_and_the_earliest_layer(world, caplog):
    with caplog.at_level(logging.WARNING):
        for step in range(0, 300, 10):
            send_stats(world, step)
            world.pass_time(1.0)
    (line,) = [record.getMessage() for record in caplog.records if "skew" in record.getMessage()]
    assert line.startswith("job 'job', group 'world': skew: rank 2 (")
    assert line.endswith(
        "): since step 0 its activations vary 8.6 times as much as the others' in stem, and differ in 1 later layer"
    )
    (finding,) = report(world)["findings"]
    assert (finding["kind"], finding["rank"], finding["layer"]) == ("skew", 2, "stem")
    assert (finding["since"], finding["layers"]) == (0, 2)
    assert [finding[name] for name in ("variance", "part", "usual")] == pytest.approx([8.57, 0.4, 0.01], rel=1e-2)
    assert "cleared" not in finding
    assert report(world)["compared_layers"] == 2


@pytest.mark.parametrize("members", [1, 2, 4])
def test_figures_of_another_number_of_members_are_refused(world, members):
    send_stats(world, figures=np.ones((members, 4)))
    (answer,) = world.members[0].answers
    assert isinstance(answer, ProtocolError)
    assert "expected the figures of the 3 members" in str(answer)


def test_skew_reports_of_an_unknown_session_are_dropped_silently(world):
    send_stats(world, session=b"stranger")
    assert world.members[0].answers == []
    assert world.dispatcher.counters.strangers == 1


def test_figures_of_an_elastic_group_are_refused():
    world = PureWorld(3, min_members=1)
    send_stats(world)
    (answer,) = world.members[0].answers
    assert isinstance(answer, ProtocolError)


def test_a_group_with_a_left_member_gives_no_finding(world):
    for step in range(9):
        send_stats(world, step)
        world.pass_time(1.0)
    world.send(world.members[2], world.members[2].session.leave(""))
    for step in range(30):
        send_stats(world, step)
        world.pass_time(1.0)
    assert "findings" not in report(world)


def test_kept_bytes_are_counted_and_freed(world):
    before = world.dispatcher._usage.allocated
    for n in range(300):
        send_stats(world, n, "\n".join(f"layer {n} {m}" for m in range(64)))
        world.now += 1.0
    world.pass_time(0.1)
    held = world.dispatcher._usage.allocated
    assert before + 2**20 < held < before + 2**24
    assert report(world)["kept_bytes"] == held
    for member in world.members:
        world.send(member, member.session.leave(""))
    assert world.dispatcher._usage.allocated == 0


def test_numbers_at_the_edge_of_float64_are_accepted(world):
    for step in range(20):
        sign = (-1) ** step
        first = [[2.0**53 - rank, sign * 1.7e308, 1.7e308, 1.0] for rank in range(3)]
        second = [[2.0**53 - rank, -sign * 1.7e308, 0.0, 0.0] for rank in range(3)]
        for values in (first, second):
            send_stats(world, step, figures=np.array(values))
            world.pass_time(1.0)
    assert world.members[0].answers == []
    assert "findings" not in report(world)
