"""One liar decides nothing when a server is restarted.

At 6b62bd3: a single Result fixes a waiting round at whatever it says, although all contributions are at hand; and in
an elastic group it makes honest members overtaken, who are then lost.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attacks import servers
from attacks.peers import Peer, Peers, job_of
from attacks.variants import first_is_quick
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Contribution, Failure, Leave, Register, Registered, Result
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from support.ports import free_port

LIAR, SIZE = 2, 3

LIE = 1e30


def token(member: int) -> bytes:
    return b"session%d" % member


def registration(job: str, member: int, min_members: int, registered: Registered | None = None) -> Register:
    found = Register(token(member), job, "world", 0, member, SIZE, min_members, 20.0, f"member {member}")
    if registered:
        found = replace(
            found, server=registered.server, step=1, results=1 + (member == LIAR), known=Members.of(range(SIZE))
        )
    return found


def rows(member: int) -> Rows:
    return Rows((1,), np.full((1, 1, 2), 10.0**member))


def key(job: str, call: int) -> RoundKey:
    return RoundKey(job, "world", 0, 1, "bn", call, "forward")


def told(peers: list[Peer], kind: type, of_key: RoundKey | None, seconds: float = 3.0) -> list[object]:
    """What each is told of a round: an aggregate, or the failure that ends its wait."""
    return [_told(peer, kind, of_key, seconds) for peer in peers]


def _told(peer: Peer, kind: type, of_key: RoundKey | None, seconds: float) -> object:
    expiry = time.monotonic() + seconds
    while (left := expiry - time.monotonic()) > 0:
        found = peer.hear(left)
        if isinstance(found, kind) and (of_key is None or found.key == of_key):
            return found
        if isinstance(found, Failure) and found.code != "unknown_session":
            return found
    return None


def began(peers: Peers, job: str, min_members: int) -> tuple[list[Registered], list[Aggregate]]:
    """A group of three that has been through one round."""
    members = [peers.open() for _ in range(SIZE)]
    for number, member in enumerate(members):
        member.say(registration(job, number, min_members))
    opened = [_opened(member) for member in members]
    for number, member in enumerate(members):
        member.say(Contribution(token(number), key(job, 0), 0, rows(number)))
    return opened, told(members, Aggregate, key(job, 0))


def _opened(member: Peer) -> Registered:
    while True:
        found = member.hear(10.0)
        assert isinstance(found, Registered), found
        if not found.missing:
            return found


@pytest.mark.parametrize("covers", first_is_quick({"all": range(SIZE), "itself": [LIAR]}))
@pytest.mark.parametrize("min_members", [0, 1], ids=["strict", "elastic"])
@pytest.mark.parametrize("contributes", first_is_quick({"contributing": True, "only lying": False}))
def test_a_liar_does_not_decide_a_round(tmp_path, with_keys, min_members, contributes, covers):
    """At 6b62bd3: both honest members are given 1e30."""
    bind, job = f"tcp://127.0.0.1:{free_port()}", job_of("alice")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with servers.attacked(folders[0], with_keys=with_keys, bind=bind) as server, Peers(server, "alice") as peers:
        opened, results = began(peers, job, min_members)
    if with_keys:
        (folders[0] / "keys").rename(folders[1] / "keys")
    waits = key(job, 1)
    with again(folders[1], bind, with_keys=with_keys) as server, Peers(server, "alice") as peers:
        members = [peers.open() for _ in range(SIZE)]
        honest = members[:LIAR]
        for number, member in enumerate(members):
            # Each knows of the first round, and sends it before it goes on.
            member.say(registration(job, number, min_members, opened[number]))
            member.say(Result(token(number), results[number]))
        members[LIAR].say(Result(token(LIAR), lie(results[LIAR], waits, covers)))
        for number, member in enumerate(honest):
            member.say(Contribution(token(number), waits, 0, rows(number)))
        time.sleep(0.5)
        if contributes:
            members[LIAR].say(Contribution(token(LIAR), waits, 0, rows(LIAR)))
        else:
            members[LIAR].say(Leave(token(LIAR), ""))
        found = told(honest, Aggregate, waits)
    for one in found:
        assert one is not None
        if isinstance(one, Aggregate):
            expected = sum(10.0**member for member in one.members)
            assert set(range(LIAR)) <= set(one.members)
            assert one.values.tolist() == [[expected, expected]], one
        else:
            assert min_members == 0, one
            assert "without it" not in one.message


def lie(result: Aggregate, of_key: RoundKey, covers: Iterable[int]) -> Aggregate:
    """What the liar says that the round gave, with whatever else its latest result had."""
    return replace(result, key=of_key, values=np.full((1, 2), LIE), members=Members.of(covers))


def again(folder: Path, bind: str, *, with_keys: bool):
    """The server that comes after one that was killed, with its keys."""
    return servers.attacked(folder, with_keys=with_keys, bind=bind)
