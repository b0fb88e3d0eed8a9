"""The lanes between processes, for tests that hold over each of them."""

from client.connection import member

PROCESS_GROUP = "process group"
LANES = (*member.LANES, PROCESS_GROUP)
