"""No routing id of a connection ends the server.

libzmq never seeds `rand()`, so a ROUTER assigns predictable ids. Once a client could claim the next ids; the next
ordinary connection then hit an assertion in libzmq, which ended the server by SIGABRT.
"""

import struct

import pytest

from attacks.peers import Peers, Wire, framed, greeting, handshake, ready
from attacks.servers import Attacked
from attacks.variants import first_is_quick
from statsd_bn.messages import StatusRequest

# First result of an unseeded `rand()`: a ROUTER's first id.
UNSEEDED = 0x6B8B4567

# Claimed ids, more than the honest job has.
CLAIMED = 64


def own_form(number: int) -> bytes:
    return b"\0" + struct.pack(">I", (UNSEEDED + number) % 2**32)


def claim_the_next_ids(server: Attacked, peers: Peers, *, speaks: bool) -> None:
    """Claims the ids that the server assigns next, and then connects until it assigns them."""
    for number in range(CLAIMED):
        peer = peers.open(own_form(number))
        if speaks:
            peer.send(StatusRequest())
    for _ in range(2 * CLAIMED):
        peers.open().send(StatusRequest())
    for peer in peers.all[CLAIMED:]:
        peer.receive(0.05)
        if server.ending:
            break


@pytest.mark.parametrize("speaks", first_is_quick({"speaking": True, "silent": False}))
def test_claims_to_the_next_routing_ids_do_not_end_the_server(server, honest_job_beside, speaks):
    with honest_job_beside(server) as beside, Peers(server) as peers, beside.attacked():
        claim_the_next_ids(server, peers, speaks=speaks)


# Bytes that no ZeroMQ sends, at the start of a connection and after the handshake.
HANDSHAKES = {
    "nothing": b"",
    "half a greeting": greeting()[:11],
    "an older greeting": b"\x01\x00",
    "an older greeting's signature": b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\0\0",
    "a foreign mechanism": greeting(b"GSSAPI") + ready([]),
    "a mechanism of zeros": greeting(b"") + ready([]),
    "an identity twice": handshake(b"a", b"b"),
    "an identity of 300 bytes": handshake(b"i" * 300),
    "no socket type": greeting() + ready([]),
    "a socket type twice": greeting() + ready([(b"Socket-Type", b"DEALER"), (b"Socket-Type", b"REQ")]),
    "a foreign socket type": handshake(kind=b"PUB"),
    "a property longer than its frame": greeting() + b"\x04\x0c\x05READY\x0bSock",
    "a value that is longer than its frame": greeting() + framed(b"\x05READY\x0bSocket-Type\x7f\xff\xff\xffDEALER", 4),
    "a message instead of READY": greeting() + framed(b"SBN"),
    "READY twice": handshake() + ready([(b"Socket-Type", b"DEALER")]),
    "an empty command": handshake() + framed(b"", 4),
    "a PING without an end": handshake() + framed(b"\x04PING", 4),
    "a PING that is too long": handshake() + framed(b"\x04PING\0\x01" + bytes(200), 4),
    "a PONG unasked": handshake() + framed(b"\x04PONG", 4),
    "a SUBSCRIBE": handshake() + framed(b"\x09SUBSCRIBEall", 4),
    "an ERROR": greeting() + framed(b"\x05ERROR\x03no!", 4),
    "an ERROR with a wrong length": greeting() + framed(b"\x05ERROR\xffno!", 4),
    "a command in several parts": handshake() + framed(b"\x05READY", 5),
    "reserved flags": handshake() + b"\xf8\x01x",
    "a length of 2^63": handshake() + b"\x02\x80" + bytes(7),
    "the highest length": handshake() + b"\x02" + b"\xff" * 8,
    "a frame that never ends": handshake() + b"\x02\0\0\0\0\x01\0\0\0" + bytes(1000),
    "parts without a last one": handshake() + framed(b"part", 1) * 100,
}


def test_no_handshake_ends_the_server(server, honest_job_beside):
    with honest_job_beside(server) as beside, beside.attacked():
        for data in HANDSHAKES.values():
            for how_much in {len(data), len(data) - 1, len(data) // 2} - {-1}:
                with Wire(server) as wire:
                    whole = data[:how_much]
                    if whole.startswith(handshake()):
                        wire.begin(handshake())
                        whole = whole.removeprefix(handshake())
                    wire.send(whole)
                    wire.receive(0.01)
        assert server.report()["received"]
