"""The view asks for the figures of each group, page after page, and puts them into the group's entry."""

import numpy as np
import pytest

from server.view import feed
from server.view.feed import FigureReader
from server.view.snapshot import SnapshotBuilder
from statsd_bn import limits
from statsd_bn.errors import LimitExceeded, ServerUnreachable
from statsd_bn.messages import Failure, Figures
from statsd_bn.wire import encode
from support.view_reports import group, member, report

VALUES = np.array([[10.0, 0.5, 1.0, 0.1], [10.0, -0.5, 9.0, 0.25]])


class Server:
    def __init__(self, layers, job="digits", each=2):
        self.layers, self.job, self.each = layers, job, each
        self.questions = []

    def __call__(self, question):
        self.questions.append((question.job, question.group, question.first))
        known = self.layers if question.job == self.job else []
        names = known[question.first : question.first + self.each]
        values = np.array([VALUES] * len(names)).reshape(-1, 2, 4)
        named = question.job, question.group, question.first
        return encode(Figures(*named, len(known), "\n".join(names), values))


def test_a_group_has_its_layers_in_order_with_the_part_of_each_member():
    server, of = Server(["stem"]), group(member(0), member(1))
    FigureReader().add_to(server, [of])
    assert (of["figures"]["layers"], of["figures"]["eta2"]) == (["stem"], [0.35])
    assert of["figures"]["parts"].tolist() == [np.float32([0.1, 0.25]).tolist()]
    (entry,) = SnapshotBuilder("tcp://127.0.0.1:4555").update(0.0, report(of))["groups"]
    assert entry["figures"] is of["figures"]


def test_a_group_whose_members_change_between_two_answers_is_left_out():
    def answer(question):
        values = np.array([VALUES[: 1 + question.first]])
        return encode(Figures(question.job, question.group, question.first, 2, f"layer{question.first}", values))

    of = group()
    FigureReader().add_to(answer, [of])
    assert "figures" not in of


def test_all_pages_are_asked_for():
    layers = [f"layer{number}" for number in range(5)]
    server, of = Server(layers), group()
    FigureReader().add_to(server, [of])
    assert of["figures"]["layers"] == layers
    assert server.questions == [("digits", "world", first) for first in (0, 2, 4)]


def test_a_group_without_figures_has_no_entry_and_an_elastic_one_is_not_asked_for():
    server, groups = Server(["stem"]), [group(job="new"), group(min_members=1)]
    FigureReader().add_to(server, groups)
    assert server.questions == [("new", "world", 0)]
    assert not any("figures" in of for of in groups)


def test_a_temporary_refusal_omits_the_figures():
    of = group()
    FigureReader().add_to(lambda _: encode(Failure(LimitExceeded.code, "too much", {})), [of])
    assert "figures" not in of


def test_a_group_is_shown_whole_or_not_at_all():
    server, of = Server(["stem", "block", "head"]), group()
    refusal = encode(Failure(LimitExceeded.code, "no", {}))
    FigureReader().add_to(lambda question: refusal if question.first else server(question), [of])
    assert server.questions
    assert "figures" not in of


def test_a_refusal_keeps_the_figures_of_the_report_before():
    reader, of, later = FigureReader(), group(), group()
    reader.add_to(Server(["stem"]), [of])
    reader.add_to(lambda _: encode(Failure(LimitExceeded.code, "too much", {})), [later])
    assert later["figures"] == of["figures"]
    reader.add_to(Server([]), [after := group()])
    assert "figures" not in after


def test_a_large_group_takes_several_reports(monkeypatch):
    monkeypatch.setattr(feed, "MAX_BYTES", 2 * VALUES.nbytes)
    server, reader, reports = Server(["stem", "block", "head"], each=1), FigureReader(), [group() for _ in range(3)]
    for of in reports[:2]:
        reader.add_to(server, [of])
    assert [first for *_, first in server.questions] == [0, 1, 2]
    assert ["figures" in of for of in reports] == [False, True, False]
    assert reports[1]["figures"]["layers"] == ["stem", "block", "head"]
    server.layers = ["stem", "block"]
    reader.add_to(server, reports[2:])
    assert reports[2]["figures"]["layers"] == ["stem", "block"]


@pytest.mark.parametrize("after", [[], ["block", "stem", "head"]], ids=["restarted server", "another order"])
def test_figures_are_omitted_if_the_layers_change_between_two_reports(monkeypatch, after):
    monkeypatch.setattr(feed, "MAX_BYTES", VALUES.nbytes)
    server, reader = Server(["stem", "block", "head"], each=1), FigureReader()
    reader.add_to(server, [group()])
    server.layers = after
    reports = [group() for _ in range(2)]
    for of in reports:
        reader.add_to(server, [of])
    assert not any("figures" in of for of in reports)


def test_very_many_groups_take_turns(monkeypatch):
    times = iter(np.arange(100.0))
    monkeypatch.setattr(feed, "FIGURES_SECONDS", 4.0)
    monkeypatch.setattr(feed.time, "monotonic", lambda: next(times))
    server, reader = Server(["stem"]), FigureReader()
    groups = [group(group=f"group {number}") for number in range(4)]
    reader.add_to(server, groups)
    assert ["figures" in of for of in groups] == [True, True, False, False]
    reader.add_to(server, groups)
    assert [name for _, name, _ in server.questions] == [f"group {number}" for number in range(4)]
    assert all("figures" in of for of in groups)


def test_a_server_that_always_has_more_pages_is_not_asked_for_ever():
    server, of = Server(["stem"] * 2 * limits.MAX_FIGURES_LAYERS, each=100), group()
    FigureReader().add_to(server, [of])
    assert len(server.questions) == limits.MAX_FIGURES_LAYERS // 100 + 1


def test_an_invalid_answer_is_an_error():
    with pytest.raises(ServerUnreachable, match="malformed figures, is the server of another version"):
        FigureReader().add_to(lambda _: b"garbage", [group()])
