"""SameRun: whether the ranks that have met under a name that nobody chose are those of one run.

Two runs that share a server need names of their own. Without, rank 0 of one may meet rank 1 of the other, and both
train on the statistics of a mixture. Ranks of one process group of torch's have a store in common, and in it a token
that no other run has.
"""

import os

from client.connection.connection import Connection
from client.launch import process_group
from client.launch.sources import DEFAULT, Setting
from client.launch.store import ANSWER_SECONDS, of_process_group, with_timeout
from statsd_bn.errors import ConfigurationError
from statsd_bn.members import Members
from statsd_bn.ranks_in_words import ranks_in_words

# The name of the round, and of the token in the store. No layer has such a name: that of a module has no brackets.
TOKEN = "client.connect()"  # noqa: S105 - no secret

_TOKEN_BYTES = 8


def check(connection: Connection, job: Setting[str]) -> None:
    """Compares the runs of a strict job's ranks where nobody chose its name; takes a round of all of them.

    A rank without a process group of the same size says nothing, and is told nothing.

    Raises:
        ConfigurationError: they are of several runs.
    """
    who = connection.member
    if job.source != DEFAULT or who.is_elastic or who.world_size == 1:
        return
    group = process_group.find()
    mine = _token() if group and group.size == who.world_size else b""
    said = connection.gather_in(connection.group(None), TOKEN, mine)
    if others := [rank for rank, token in enumerate(said) if token and mine and token != mine]:
        raise ConfigurationError(
            f"job {job.value!r}: expected the ranks of one run, got {ranks_in_words(Members.of(others))} of "
            "another one; give each run that shares a server a name of its own: connect(job=...), STATSD_BN_JOB or "
            "torchrun's --rdzv-id"
        )


def _token() -> bytes:
    """The run's, which its first rank to come here has made; empty where the store does not tell."""
    try:
        store, mine = of_process_group(), os.urandom(_TOKEN_BYTES).hex()
        return bytes(with_timeout(ANSWER_SECONDS, lambda: store.compare_set(TOKEN, "", mine)))
    except (RuntimeError, TimeoutError, ValueError):
        # The others wait for what this one says.
        return b""
