"""Who was a member once has no more rights than a stranger.

At 6b62bd3: one Register and Leave mark a connection for ever: its bad frames are all taken, it is never cut, and the
limit for idle connections does not count.
"""

import time

import pytest

from attacks.honest import SLOWDOWN_OF_A_FULL_CORE
from attacks.peers import Peer, Peers, job_of
from attacks.variants import first_is_quick
from statsd_bn.messages import Leave, Register, Registered

TOKEN = b"formerly"

SECONDS = 8.0


def become_a_former_member(peer: Peer) -> None:
    assert isinstance(peer.ask(Register(TOKEN, job_of("bob"), "world", 0, 0, 2, 0, 60.0, "once")), Registered)
    peer.say(Leave(TOKEN, ""))


def test_a_former_member_that_floods_is_cut(server, honest_job_beside):
    """At 6b62bd3: 331,204 bad frames are taken."""
    with honest_job_beside(server, slowdown=SLOWDOWN_OF_A_FULL_CORE) as beside, Peers(server) as peers:
        peer = peers.open(RECONNECT_IVL=-1)
        become_a_former_member(peer)
        expiry = time.monotonic() + SECONDS
        with beside.attacked():
            while not server.report()["flooding_connections"] and time.monotonic() < expiry:
                peer.say(*[b"no frame"] * 1000)
                while peer.hear_frame(0):
                    pass
        assert server.report()["flooding_connections"]


@pytest.mark.parametrize("sends", first_is_quick({"refused": True, "silent": False}))
def test_a_former_member_that_is_idle_is_cut(start, honest_job_beside, sends):
    """At 6b62bd3: it may stay for ever."""
    server = start("--idle-seconds", "1")
    with honest_job_beside(server) as beside, Peers(server) as peers, beside.attacked():
        peer = peers.open(RECONNECT_IVL=-1)
        become_a_former_member(peer)
        expiry = time.monotonic() + SECONDS
        while not server.report()["idle_connections"] and time.monotonic() < expiry:
            if sends:
                peer.say(b"no frame")
            time.sleep(0.2)
        assert server.report()["idle_connections"]
