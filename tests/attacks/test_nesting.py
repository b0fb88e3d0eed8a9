"""Deeply nested data ends no process that reads it; msgpack extensions 200 deep once caused SIGSEGV."""

import struct
import subprocess
import sys

import msgpack
import pytest

from attacks.peers import job_of
from attacks.servers import ROOT, Attacked, environment
from attacks.variants import first_is_quick
from client import serialization
from client.session.channel_pool import ZmqChannelPool
from client.session.connection import Connection
from client.session.protocol.member import Member
from support.memory_members import outcome

VICTIM = """
import sys, types
import client
from statsd_bn.errors import StatsdBNError
endpoint, job, curve = sys.argv[1:]
with client.connect(endpoint, job=job, rank=0, world_size=2, round_timeout=10.0, policy="elastic", curve=curve):
    loop = types.SimpleNamespace(train_loader=None, val_loader=None, test_loader=None)
    try:
        print("result", client.DDPHandler(loop).mp_sync([1.0]))
    except StatsdBNError as error:
        print(type(error).__name__, error)
"""

# The victim imports torch, which takes long on a busy machine.
JOIN_SECONDS = 60.0

DEPTHS = [200, 3_000, 20_000]


def nested(depth: int, code: int) -> bytes:
    packed = msgpack.packb([])
    for _ in range(depth):
        packed = msgpack.packb([msgpack.ExtType(code, packed)])
    return packed


def lists(depth: int) -> bytes:
    return b"\x91" * depth + b"\x90"


def in_a_row(state: object, depth: int) -> bytes:
    """`depth` containers of one item each, nested, with the headers that `client.serialization` writes."""
    structure, _ = parts(serialization.pack(state))
    return structure.removesuffix(b"\xc0") * depth + b"\xc0"


def parts(packed: bytes) -> tuple[bytes, bytes]:
    end = 4 + struct.unpack_from("<I", packed)[0]
    return packed[4:end], packed[end:]


STRUCTURES = {f"extensions {depth} deep": nested(depth, serialization.TUPLE) for depth in DEPTHS}
STRUCTURES |= {"counters": nested(1_000, serialization.COUNTER), "lists": lists(100_000)}
STRUCTURES |= {"serialized lists": in_a_row([None], 100_000), "serialized tuples": in_a_row((None,), 100_000)}


def gather_with_victim(server: Attacked, job: str, structure: bytes) -> tuple[int, str]:
    """Send nested data to a member of a job of two; returns its exit code and output."""
    command = [sys.executable, "-c", VICTIM, server.endpoint, job, str(server.secret_of("alice"))]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as victim:
        try:
            who = Member(job, "world", 0, 1, 2, JOIN_SECONDS, "hostile", 1)
            with Connection(ZmqChannelPool(server.endpoint, server.keys_of("alice")), who) as hostile:
                data = struct.pack("<I", len(structure)) + structure + parts(serialization.pack([]))[1]
                outcome(lambda: hostile.all_gather("mp_sync()", data))
            output, _ = victim.communicate(timeout=60)
        finally:
            victim.kill()
    return victim.returncode, output


@pytest.mark.parametrize("structure", first_is_quick(STRUCTURES))
def test_gathered_data_of_a_member_ends_no_other_member(server, structure):
    code, output = gather_with_victim(server, job_of("alice"), structure)
    assert code == 0
    assert output.startswith("ProtocolError")
