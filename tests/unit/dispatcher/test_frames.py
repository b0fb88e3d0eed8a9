"""The dispatcher accepts any bytes: an invalid frame costs only its sender an error."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statsd_bn import PROTOCOL_VERSION
from statsd_bn.members import NO_MEMBERS
from statsd_bn.messages import Aggregate, Failure, Figures, Heartbeat, Leave, Pending, Registered, Status, StatusRequest
from statsd_bn.wire import decode, encode
from support.dispatcher_play import SERVER, Play, codes, peer, read
from support.strategies import KEY, any_message, contribution, key, register, rows, session_of


@pytest.fixture
def play() -> Play:
    return Play()


@pytest.mark.parametrize(
    "answer",
    [
        *(Registered(b"session0", SERVER, 0, 0, 0, NO_MEMBERS), Aggregate(KEY, 1, 1, NO_MEMBERS, np.zeros((1, 1)))),
        *(Failure("mismatch", "no", {}), Status({})),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_only_a_server_sends_is_refused(play, answer):
    answers = play.send(answer, b"odd")
    assert codes(answers) == {b"odd": "protocol"}
    assert f"expected a request, got {type(answer).__name__}" in answers[b"odd"].message
    assert play.dispatcher.bad_frames == 1


def test_garbage_is_counted_and_answered_without_effect_on_others(play):
    play.open()
    play.contribute(0)
    for garbage in (
        b"",
        b"GET / HTTP/1.1",
        encode(StatusRequest())[:-1],
        b"SBN" + bytes([PROTOCOL_VERSION]) + bytes(4),
    ):
        answers = read(play.dispatcher.receive(play.now, b"stranger", garbage).replies)
        assert codes(answers) == {b"stranger": "protocol"}
    assert (play.dispatcher.received, play.dispatcher.bad_frames) == (7, 4)
    assert set(play.contribute(1)) == {peer(0), peer(1)}


def test_another_protocol_version_is_named_in_the_answer(play):
    frame = bytearray(encode(register()))
    frame[3] = PROTOCOL_VERSION + 1
    (answer,) = read(play.dispatcher.receive(play.now, b"new", bytes(frame)).replies).values()
    assert (answer.code, answer.fields) == ("version", {"expected": PROTOCOL_VERSION, "got": PROTOCOL_VERSION + 1})
    assert play.dispatcher.bad_frames == 1


SOUND = [
    encode(message)
    for message in (
        *(register(0), register(1), register(0, epoch=1), contribution(0), contribution(1)),
        *(contribution(1, rows(1.0, 2.0, channels=2)), Leave(session_of(1), "boom"), StatusRequest()),
    )
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    frame = bytearray(draw(st.sampled_from(SOUND)))
    for place, value in draw(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=4)):
        frame[place % len(frame)] = value
    end = draw(st.integers(0, 2 * len(frame)))
    return bytes(frame if draw(st.booleans()) else (frame + frame)[:end])


frames = st.one_of(mutated(), st.binary(max_size=100), st.sampled_from(SOUND), any_message.map(encode))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), frames), max_size=12))
def test_no_frame_raises_and_every_answer_is_valid(received):
    play = Play()
    play.open(3, job="fuzz")
    play.contribute(0, 1.0, key(job="fuzz"))
    for at, frame in received:
        for peer_id, answer in play.dispatcher.receive(play.now, at, frame).replies:
            assert isinstance(peer_id, bytes)
            assert isinstance(decode(answer), (Registered, Aggregate, Failure, Status, Pending, Figures))
        play.now += 200.0
        for _, answer in play.dispatcher.tick(play.now):
            decode(answer)
    # After these frames the server still answers a status request, and serves a new job.
    assert isinstance(play.send(StatusRequest(), b"x")[b"x"], Status)
    play.open(job="fine")
    play.contribute(0, 1.0, key(job="fine"))
    assert play.contribute(1, 2.0, key(job="fine"))[b"fine 0"].values.item() == 3.0


def test_the_dispatcher_reports_the_fate_of_a_frame(play):
    def became(message):
        frame = message if isinstance(message, bytes) else encode(message)
        received = play.dispatcher.receive(play.now, b"peer", frame)
        return received.session, received.is_refused

    session = session_of(0)
    accepted = (session, False)
    assert became(register(0, 1)) == accepted
    assert became(contribution(0)) == accepted
    assert became(Heartbeat(session)) == accepted
    assert became(StatusRequest()) == (b"", False)
    assert became(b"garbage") == (b"", True)
    assert became(register(1, 1, session=session)) == (b"", True), "one session, two members"
    assert became(register(0, 2, session=session_of(5))) == (b"", True), "another size of the group"
    assert became(Heartbeat(session_of(7))) == (b"", True), "no such session"
    assert became(Leave(session, "")) == (b"", False), "it has just left"
    assert became(contribution(0)) == (b"", True)
