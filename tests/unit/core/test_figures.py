"""Figures of the members' data: paged, bounded, and for keys of the job only."""

import numpy as np
import pytest

from server.core import report
from server.core.dispatcher import Dispatcher
from server.security.access import ANONYMOUS, Principal
from statsd_bn import limits
from statsd_bn.errors import ProtocolError
from statsd_bn.messages import Failure, Figures, FiguresRequest, Message, SkewStats
from statsd_bn.wire import decode, encode
from support.strategies import register, session_of

ALICE = Principal("alice", "key of alice", ("a-*",))
BOB = Principal("bob", "key of bob", ("b-*",))
FIGURES = np.array([[10.0, 0.0, 1.0, 0.01], [10.0, 5.0, 9.0, 0.4]])


class Play:
    def __init__(self):
        self.now = 0.0
        self.dispatcher = Dispatcher(b"server-0", 0.0)
        for member in (0, 1):
            self.send(register(member, 2, job="a-job", session=session_of(member)), ALICE)

    def send(self, message: Message, tenant: Principal) -> list[Message]:
        replies = self.dispatcher.receive(self.now, b"peer", encode(message), tenant).replies
        return [decode(frame) for _, frame in replies]

    def send_stats(self, layers, figures=FIGURES):
        values = np.stack([figures * [1, 1, 1, 1 / (1 + number)] for number in range(len(layers))])
        assert self.send(SkewStats(session_of(0), 0, "\n".join(layers), values), ALICE) == []

    def ask(self, tenant=ALICE, job="a-job", first=0, group="world"):
        (answer,) = self.send(FiguresRequest(job, group, first), tenant)
        return answer


@pytest.fixture
def play():
    return Play()


def test_the_answer_has_the_layers_in_order_with_the_figures_of_each_member(play):
    play.send_stats(["stem", "head"])
    answer = play.ask()
    assert (answer.first, answer.total, answer.names) == (0, 2, ["stem", "head"])
    np.testing.assert_allclose(answer.values[0], FIGURES)
    np.testing.assert_allclose(answer.values[1, :, 3], FIGURES[:, 3] / 2)


def test_a_key_of_other_jobs_gets_no_figures(play):
    play.send_stats(["stem"])
    assert play.ask(ANONYMOUS).total == 1
    answer = play.ask(BOB)
    assert (answer.total, answer.names, answer.values.size) == (0, [], 0)


@pytest.mark.parametrize("query", [{}, {"job": "a-nother"}, {"group": "pair"}], ids=str)
def test_a_group_without_figures_and_an_unknown_group_give_an_empty_answer(play, query):
    answer = play.ask(**query)
    assert isinstance(answer, Figures)
    assert (answer.total, answer.names) == (0, [])


def test_figures_beyond_one_answer_come_in_the_next(play, monkeypatch):
    layers = ["the longest", *(f"layer{number}" for number in range(4))]
    play.send_stats(layers)
    monkeypatch.setattr(limits, "MAX_FIGURES_BYTES", len("layer0\nlayer1\n") + 2 * 64)
    pages = [play.ask(first=first) for first in (0, 1, 3, 5)]
    assert [page.names for page in pages] == [layers[:1], layers[1:3], layers[3:], []]
    assert {page.total for page in pages} == {5}


def test_only_the_tenant_that_asks_too_often_waits(play, monkeypatch):
    play.send_stats(["stem"])
    size = len(encode(play.ask()))
    monkeypatch.setattr(report, "BURST_BYTES", 3 * size)
    monkeypatch.setattr(report, "BYTES_PER_SECOND", 2 * size)
    answers = [play.ask() for _ in range(5)]
    assert [isinstance(answer, Figures) for answer in answers] == [True, True, True, False, False]
    assert isinstance(answers[-1], Failure)
    assert answers[-1].code == "limit"
    assert isinstance(play.ask(BOB), Figures)
    play.now = 2.0
    assert isinstance(play.ask(), Figures), "the tenant has waited"


@pytest.mark.parametrize(
    ("layers", "shape", "text"),
    [
        ("", (0, 2, 3), "expected shape"),
        ("", (1, 2, 4), "expected shape"),
        ("stem", (1, 0, 4), "members: expected an integer in \\[1"),
        ("stem\n", (2, 2, 4), "layer: expected"),
    ],
)
def test_layers_and_values_must_match(layers, shape, text):
    with pytest.raises(ProtocolError, match=text):
        Figures("job", "world", 0, 0, layers, np.zeros(shape))


def test_values_without_layers_are_refused():
    frame = encode(Figures("job", "world", 0, 0, "", np.zeros((0, 2, 4))))
    assert decode(frame).values.shape == (0, 2, 4)
    for more in (bytes(8), bytes(1)):
        with pytest.raises(ProtocolError, match="expected none without layers"):
            decode(frame + more)
