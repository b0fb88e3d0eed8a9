"""A session's token goes to the server and never comes back, whoever is where the answer goes."""

import re
from dataclasses import replace

import pytest

from server.core.dispatcher import Dispatcher
from statsd_bn.messages import Failure, Heartbeat, Leave, Registered, StatusRequest, digest
from statsd_bn.wire import decode, encode
from support.strategies import contribution, register, session_of

SERVER = b"server-0"
TOKENS = [session_of(member) for member in range(3)]


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(SERVER, 0.0)


def test_no_frame_and_no_line_of_the_log_holds_a_token(dispatcher, caplog):
    caplog.set_level("DEBUG")
    told = []

    def say(now, message, peer=b"peer"):
        told.extend(dispatcher.receive(now, peer, encode(message)).replies)

    for member in range(2):
        say(0.0, register(member))
    say(0.1, register(1, session=TOKENS[0]))  # one session as two members
    say(0.1, register(2, world_size=3))
    say(0.1, register(1, session=TOKENS[2]))  # two sessions as one member
    say(0.2, contribution(0))
    say(0.2, replace(contribution(0), attempt=1))
    say(0.2, contribution(0, 7.0))
    say(0.2, contribution(2))
    say(0.2, Heartbeat(TOKENS[2]))
    say(0.3, StatusRequest())
    told += dispatcher.probes(1.0)
    say(0.4, Leave(TOKENS[1], "ValueError: wrong"))
    say(0.5, contribution(1))
    say(0.5, register(1))
    told += dispatcher.tick(60.0) + dispatcher.shutdown_notices() + dispatcher.stop()
    frames = [frame for _, frame in told]
    codes = {answer.code for answer in map(decode, frames) if isinstance(answer, Failure)}
    assert {"protocol", "world_size", "duplicate_member", "conflict", "unknown_session", "refused"} <= codes
    written = b"\0".join([*frames, caplog.text.encode()])
    assert [token for token in TOKENS if token in written or token.hex().encode() in written] == []


def test_whoever_is_sent_a_members_answers_cannot_speak_in_its_name(dispatcher):
    """The member registered from a place that is a stranger's by now."""
    dispatcher.receive(0.0, b"stolen", encode(register(0)))
    answers = dict(dispatcher.receive(0.0, b"one", encode(register(1))).replies)
    overheard = decode(answers[b"stolen"])
    assert isinstance(overheard, Registered)
    for eight in re.findall(b"(?=(.{8}))", answers[b"stolen"], re.DOTALL):
        for forged in (contribution(0, session=eight), Heartbeat(eight)):
            ((_, refusal),) = dispatcher.receive(0.1, b"stolen", encode(forged)).replies
            assert decode(refusal).code == "unknown_session"
        dispatcher.receive(0.1, b"stolen", encode(Leave(eight, "")))
    assert len(dispatcher.report(0.2)["groups"][0]["members"]) == 2


def test_a_digest_is_the_one_that_the_protocol_names():
    assert digest(bytes(range(1, 9))).hex() == "8dd34fc67738a407"
    assert digest(bytes(8)) != bytes(8)
