"""A server survives any bytes in any order; `scripts/fuzz` sends far more."""

import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzzing import fuzz
from fuzzing.fuzz_target import SOUND, Play
from server.core.dispatcher import Dispatcher
from server.group import master
from statsd_bn.messages import BY_TYPE, Request
from statsd_bn.round_key import GATHER
from statsd_bn.wire import decode


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=600))
def test_no_play_raises_out_of_the_server(data):
    Play().run(data)


def test_the_valid_frames_cover_every_message_of_a_member():
    assert {type(decode(frame)) for frame in SOUND} == set(get_args(Request))
    assert len(BY_TYPE) == 20


def test_random_plays_reach_all_ends_of_rounds_and_gathers(monkeypatch):
    done = failed = bad = gathers = 0
    reduce = master.reduce_round

    def count(round_):
        nonlocal gathers
        gathers += round_.key.phase == GATHER
        return reduce(round_)

    monkeypatch.setattr(master, "reduce_round", count)
    chance = random.Random(0)
    for _ in range(600):
        play = Play()
        play.run(fuzz.random_play(chance))
        report = play.dispatcher.report(0.0)
        done += sum(group["rounds_done"] for group in report["groups"])
        failed += sum(group["rounds_failed"] for group in report["groups"])
        bad += report["bad_frames"]
    assert min(done, failed, bad, 4 * gathers) >= 20, (done, failed, bad, gathers)


def test_a_server_that_raises_is_found(monkeypatch):
    def record(*_):
        raise KeyError("out of the loop")

    monkeypatch.setattr(Dispatcher, "_record", record)
    with pytest.raises(KeyError):
        _play_all(fuzz.seeds())


def _play_all(plays):
    for data in plays:
        Play().run(data)


def test_a_flood_finds_growing_memory(monkeypatch):
    leak = []
    receive = Dispatcher.receive
    monkeypatch.setattr(Dispatcher, "receive", lambda *given: leak.append(None) or receive(*given))
    monkeypatch.setattr(fuzz, "_resident_kib", lambda: len(leak) * 2**10)  # earlier tests may have left free memory
    with pytest.raises(fuzz.Grown):
        fuzz.flood(frames=3000, seed=0)
