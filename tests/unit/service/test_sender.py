"""TcpState that reach nobody: who has gone is no news, who does not read is."""

import errno
import logging
from types import SimpleNamespace

import pytest
import zmq

from server.core.dispatcher import Dispatcher
from server.network import sender
from server.network.sender import Sender


class Refusing:
    """A socket that sends nothing."""

    def __init__(self, problem: int) -> None:
        self._problem = problem

    def send(self, *_: object) -> None:
        raise zmq.ZMQError(self._problem)


@pytest.mark.parametrize(("problem", "level"), [(zmq.EHOSTUNREACH, "INFO"), (errno.EAGAIN, "WARNING")])
def test_only_an_answer_that_somebody_does_not_read_is_warned_of(monkeypatch, problem, level):
    lines = []
    log = SimpleNamespace(log=lambda number, text, *given: lines.append((logging.getLevelName(number), text % given)))
    monkeypatch.setattr(sender, "logger", log)
    dispatcher = Dispatcher(b"server-0", 0.0)
    Sender(Refusing(problem), dispatcher).send([(b"peer", b"frame")])
    assert [(said, "was dropped" in text) for said, text in lines] == [(level, True)]
    assert dispatcher.counters.dropped_answers == 1
