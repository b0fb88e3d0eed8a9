"""Routing ids and frames of a fuzzed connection: sound and mutated frames, and fences, whose answers never change."""

import random
import struct

from fuzzing.fuzz_target import JOBS, SOUND, TOKENS
from statsd_bn.messages import Heartbeat, StatusRequest, digest
from statsd_bn.wire import encode

# Placeholder for a connection's mark: 6 characters in its tokens and job names, which tell its answers from others.
NO_MARK = b"000000"

# First result of an unseeded `rand()`: a ROUTER's first id.
UNSEEDED = 0x6B8B4567

# Maximum number of frames of a connection, without its fences.
BURST = 750

# Possible shares of changed and random frames in a burst.
CHANGES = (0.005, 0.005, 0.005, 0.65)

# A fence: the answer to a heartbeat of an unknown session shows that the server has read the frames before.
FENCE = encode(Heartbeat(b"a fence!"))
FENCE_ANSWER = f"{digest(b'a fence!').hex()} is not registered".encode()

# Frames before a fence: half of the server's queue for a stranger.
BETWEEN_FENCES = 32


def templates() -> list[bytes]:
    found = []
    for frame in SOUND:
        if frame == encode(StatusRequest()):
            continue  # without keys the server reports all jobs
        marked = frame
        for number, token in enumerate(TOKENS):
            marked = marked.replace(token, bytes([64 + number]) + b"-" + NO_MARK)
        for job in JOBS:
            marked = marked.replace(job.encode(), b"e" * (len(job) - len(NO_MARK)) + NO_MARK)
        found.append(marked)
    return found


def changed(frame: bytes, chance: random.Random) -> bytes:
    """A frame with changed bytes, perhaps cut or doubled. A change never turns the mark into another one."""
    found = bytearray(frame)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        found[chance.randrange(len(found))] = chance.randrange(256)
    if found.count(NO_MARK) < frame.count(NO_MARK):
        return frame
    cut = chance.random()
    if cut < 0.1:
        return bytes(found[: chance.randrange(len(found))])
    return bytes(found) * 2 if cut < 0.13 else bytes(found)


def random_frames(chance: random.Random, number: int) -> list[bytes]:
    """Frames of a connection, mostly with few changes: the server soon closes a connection with many bad frames."""
    changes = chance.choice(CHANGES)
    sound = templates()
    frames = []
    for _ in range(number):
        what = chance.random()
        if what > changes:
            frames.append(chance.choice(sound))
        elif what < 0.85 * changes:
            frames.append(changed(chance.choice(sound), chance))
        else:
            frames.append(chance.randbytes(chance.choice((0, 1, 8, 40, 300))))
    return frames


def identities(chance: random.Random, lives: int) -> tuple[bytes, ...]:
    kinds = (
        (),
        (),
        (chance.randbytes(chance.randrange(1, 20)),),
        (b"\0" + struct.pack(">I", (UNSEEDED + lives + chance.randrange(-50, 200)) % 2**32),),
        (chance.choice((b"one", b"two", b"three")),),
        (b"i" * 255,),
        (chance.randbytes(5), b"\0" + chance.randbytes(4)),
        (b"\0",),
    )
    return chance.choice(kinds)
