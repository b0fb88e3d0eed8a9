"""A former member has the rights of a stranger: bad frames end its connection."""

import time

from attacks.honest import SLOWDOWN_OF_A_FULL_CORE
from attacks.peers import Peer, Peers, job_of
from statsd_bn.messages import Leave, Register, Registered

TOKEN = b"formerly"

SECONDS = 8.0


def become_a_former_member(peer: Peer) -> None:
    assert isinstance(peer.ask(Register(TOKEN, job_of("bob"), "world", 0, 0, 2, 0, 60.0, "once")), Registered)
    peer.send(Leave(TOKEN, ""))


def test_a_former_member_that_floods_is_disconnected(server, honest_job_beside):
    with honest_job_beside(server, slowdown=SLOWDOWN_OF_A_FULL_CORE) as beside, Peers(server) as peers:
        peer = peers.open(RECONNECT_IVL=-1)
        become_a_former_member(peer)
        expiry = time.monotonic() + SECONDS
        with beside.attacked():
            while not server.report()["flooding_connections"] and time.monotonic() < expiry:
                peer.send(*[b"no frame"] * 1000)
                while peer.receive_frame(0):
                    pass
        assert server.report()["flooding_connections"]
