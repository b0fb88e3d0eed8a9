"""Refused frames cost little: a header of 1 MiB of empty arrays once cost 70 to 390 ms."""

import struct
import time

import msgpack
import pytest

from attacks.honest import SLOWDOWN_OF_A_FULL_CORE
from attacks.peers import Peers
from attacks.variants import first_is_quick
from statsd_bn import limits
from statsd_bn.wire import MAGIC, PROTOCOL_VERSION

FRAMES = 27

# Limit of the server's processor time for all frames; each takes some hundred microseconds.
PROCESSOR_SECONDS = 1.0


def frame(first: bytes, rest: bytes) -> bytes:
    body = first + rest * ((limits.MAX_HEADER_BYTES - len(first)) // len(rest))
    return struct.pack("<3sBI", MAGIC, PROTOCOL_VERSION, len(body)) + body


def _nested() -> bytes:
    """Arrays of arrays in a header of 60 kB, each within the limit of an array."""
    body = msgpack.packb([1] + [[[[]] * 64] * 60] * 15)
    return struct.pack("<3sBI", MAGIC, PROTOCOL_VERSION, len(body)) + body


COSTLY = {
    "empty arrays": frame(b"\xdd" + struct.pack(">I", limits.MAX_HEADER_BYTES - 5), b"\x90"),
    "empty arrays in a field": frame(b"\x92\x07\xdd" + struct.pack(">I", limits.MAX_HEADER_BYTES - 7), b"\x90"),
    "empty maps": frame(b"\xdd" + struct.pack(">I", limits.MAX_HEADER_BYTES - 5), b"\x80"),
    "small texts": frame(b"\xdd" + struct.pack(">I", (limits.MAX_HEADER_BYTES - 5) // 3), b"\xa2ab"),
    "nested arrays": _nested(),
    "members": frame(b"\x92\x01\xc6" + struct.pack(">I", limits.MAX_HEADER_BYTES - 7), b"\x90"),
}


@pytest.mark.parametrize("costly", first_is_quick(COSTLY))
def test_large_headers_cost_little(server, honest_job_beside, costly):
    with honest_job_beside(server, slowdown=SLOWDOWN_OF_A_FULL_CORE) as beside, Peers(server) as peers:
        time.sleep(0.3)
        began, quiet = time.monotonic(), server.processor_seconds()
        time.sleep(1.0)
        share = (server.processor_seconds() - quiet) / (time.monotonic() - began)
        with beside.attacked():
            began, used = time.monotonic(), server.processor_seconds()
            peer = peers.open()
            for _ in range(FRAMES):
                answer = peer.ask(costly, 1.0)
                if answer is None or answer.code == "limit":  # the server has closed the connection
                    peer = peers.open()
            cost = server.processor_seconds() - used - share * (time.monotonic() - began)
        assert cost < PROCESSOR_SECONDS
