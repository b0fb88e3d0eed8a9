"""Seals: a server knows its own aggregates again, and nobody else makes one."""

import dataclasses
import hashlib
import os
import threading

import numpy as np
import pytest
import zmq

from server.rounds.seals import NO_SEALS, Seals
from server.secrets import seal_key
from server.secrets.seal_key import KEY_BYTES, NAME, load_or_make, seals_of
from statsd_bn.errors import ConfigurationError, ProtocolError
from statsd_bn.members import Members
from statsd_bn.messages import NO_SEAL, Aggregate, Result
from statsd_bn.wire import decode, encode
from support.strategies import contribution, key, register

SEALS = Seals(b"secret")
AGGREGATE = Aggregate(key(), 3, 5, Members.of([0, 2]), np.array([[1.5, -0.0, float("nan")]]))


def given_back(aggregate: Aggregate) -> Aggregate:
    """What the server reads after a member was given an aggregate and has told of it."""
    return decode(encode(Result(b"session0", decode(SEALS.sealed(aggregate))))).aggregate


def test_an_aggregate_that_comes_back_as_it_was_is_genuine():
    assert SEALS.is_genuine(given_back(AGGREGATE))
    assert not Seals(b"another").is_genuine(given_back(AGGREGATE))
    assert not SEALS.is_genuine(AGGREGATE), "it has no seal"


def test_the_seal_stands_behind_the_values():
    frame = SEALS.sealed(AGGREGATE)
    seal = decode(frame).seal
    assert seal != NO_SEAL
    assert frame == encode(AGGREGATE)[: -len(seal)] + seal
    assert encode(Result(b"session0", decode(frame))).endswith(AGGREGATE.values.tobytes() + seal)


@pytest.mark.parametrize(
    "other",
    [
        *({"key": key(**{name: value})} for name, value in
          {"job": "b", "group": "b", "epoch": 1, "step": 1, "layer": "b", "call": 1, "phase": "backward"}.items()),
        {"replicas": 4},
        {"count": 6},
        {"members": Members.of([0, 1, 2])},
        {"values": np.array([[1.5, 0.0, float("nan")]])},
        {"values": AGGREGATE.values.reshape(3, 1)},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_is_changed_breaks_the_seal(other):
    assert not SEALS.is_genuine(dataclasses.replace(given_back(AGGREGATE), **other))


@pytest.mark.parametrize("seal", [b"", bytes(15), bytes(17), "s" * 16, None])
def test_a_seal_has_its_length(seal):
    with pytest.raises(ProtocolError, match="seal: expected 16 bytes"):
        dataclasses.replace(AGGREGATE, seal=seal)


def test_a_seal_is_what_the_document_says():
    frame = SEALS.sealed(AGGREGATE)
    digest = hashlib.sha256(b"secret" + bytes(58) + frame[:-16]).digest()
    assert frame[-16:] == digest[:16]


def test_without_a_key_seals_are_zeros_and_all_are_believed():
    assert NO_SEALS.sealed(AGGREGATE) == encode(AGGREGATE)
    assert decode(NO_SEALS.sealed(AGGREGATE)).seal == NO_SEAL
    assert NO_SEALS.is_genuine(AGGREGATE)
    assert NO_SEALS.outlives


@pytest.mark.parametrize(
    ("bind", "has_seals"), [("ipc://{}/server", False), ("tcp://127.0.0.1:*", True)], ids=["this user", "every user"]
)
def test_a_server_that_only_its_user_can_reach_makes_no_seals(serve, folder, bind, has_seals):
    service = serve(bind.format(folder))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(service.endpoints[0])
        dealer.send(encode(register(0, world_size=1)))
        dealer.send(encode(contribution(0)))
        _, aggregate = (decode(dealer.recv()) for _ in range(2))
    assert (aggregate.seal != NO_SEAL) == has_seals


def test_the_key_does_not_show():
    assert "secret" not in repr(SEALS)


# Where the key comes from.


def test_the_key_of_a_server_with_keys_comes_from_its_secret_one():
    one, same, other = seals_of("a" * 40), seals_of("a" * 40), seals_of("b" * 40)
    assert one == same != other
    assert one.outlives
    assert b"a" * 8 not in one.key


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "private"
    path.mkdir(mode=0o700)
    return path


def test_a_key_outlives_the_server_that_made_it(folder):
    made, was_there = load_or_make(folder)
    assert (len(made), was_there) == (KEY_BYTES, False)
    assert load_or_make(folder) == (made, True)
    assert (folder / NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == [NAME], "nothing is left behind"


def test_servers_that_start_together_have_one_key(folder):
    found = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        found.append(load_or_make(folder)[0])

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8
    assert [path.name for path in folder.iterdir()] == [NAME]


def a_link(path):
    other = path.with_name("other")
    other.write_bytes(bytes(KEY_BYTES))
    other.chmod(0o600)
    path.symlink_to(other)


def a_fifo(path):
    os.mkfifo(path, 0o600)


def too_short(path):
    path.touch(0o600)


def open_to_others(path):
    path.write_bytes(bytes(KEY_BYTES))
    path.chmod(0o644)


@pytest.mark.parametrize("make", [a_link, a_fifo, too_short, open_to_others])
def test_what_is_no_key_of_this_user_is_not_used(folder, make):
    make(folder / NAME)
    with pytest.raises(ConfigurationError, match="key of the seals"):
        load_or_make(folder)


def test_a_server_that_can_keep_no_key_has_a_new_one(monkeypatch, caplog):
    def none(_environ) -> None:
        raise ConfigurationError("there is no folder")

    monkeypatch.setattr(seal_key, "private_folder", none)
    with caplog.at_level("INFO"):
        one, other = seals_of(None), seals_of(None)
    assert one.key != other.key
    assert not one.outlives
    assert "there is no folder" in caplog.text


def test_a_server_without_keys_finds_its_key_again(folder, monkeypatch):
    monkeypatch.setattr(seal_key, "private_folder", lambda _environ: folder)
    first, second = seals_of(None), seals_of(None)
    assert first.key == second.key
    assert (first.outlives, second.outlives) == (False, True)
