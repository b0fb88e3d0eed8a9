"""Rows whose sum depends on the order of addition, and a record of the frames that a server receives."""

import numpy as np

from statsd_bn import Rows
from support.memory_members import MemoryMaster

# In float64 the sum of these values depends on the order of addition.
ROWS = np.array([0.1, 0.2, 0.3, 1e16, -1e16, 0.7]).reshape(6, 1, 1)


def rows_of(member: int, size: int) -> Rows:
    return Rows(tuple(range(1, size + 1)), ROWS[member * size : (member + 1) * size])


def frames_of(master: MemoryMaster) -> list[bytes]:
    frames, receive = [], master.channel_pool._receive

    def watched(peer: bytes, frame: bytes):
        frames.append(frame)
        return receive(peer, frame)

    master.channel_pool._receive = watched
    return frames
