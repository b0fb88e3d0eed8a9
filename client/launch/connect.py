"""connect(): this process's place among the replicas, and the goodbye at its end."""

import atexit
import logging
import multiprocessing
import os
import sys
import time
from multiprocessing.util import Finalize
from pathlib import Path

from client.connection.connection import Connection
from client.connection.current import current_connection, hold
from client.connection.member import DEFAULT_ROUND_TIMEOUT, STRICT, Member
from client.connection.registration import cause_of
from client.connection.transport import ZmqTransport
from client.launch import own_server, server_process
from client.launch.settings import resolve
from statsd_bn.errors import ConfigurationError, ServerUnreachable
from statsd_bn.keys import ClientKeys
from statsd_bn.private_folder import find_server
from statsd_bn.reach import check_is_open_to_us

logger = logging.getLogger("statsd_bn.client")

# A child of multiprocessing has sent what its queues hold before it says goodbye, and perhaps waits for other members.
AFTER_QUEUES = -100

# This user's server may have been started just before, as in the background; it listens within a second.
FIND_SECONDS = 2.0
FIND_PAUSE_SECONDS = 0.05


def connect(
    endpoint: str | None = None,
    *,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    round_timeout: float = DEFAULT_ROUND_TIMEOUT,
    join_timeout: float | None = None,
    policy: str = STRICT,
    min_members: int | None = None,
    curve: str | Path | None = None,
) -> Connection:
    """Connects this process's synchronised layers to a master, and waits until all members are there.

    Under torchrun it needs no argument: member 0 starts a master, which ends with it, and the others learn of it
    through torch's rendezvous store. So it is under any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, and in tasks of SLURM's srun. Without a launcher it finds the `python -m server` of this user.

    Args:
        endpoint: where `python -m server` listens, `tcp://host:port` or `ipc://path`; else STATSD_BN_ENDPOINT; else a
            master is started for this job under a launcher, and without one this user's own server is meant.
        job: the training run's name; else STATSD_BN_JOB, else as the launcher calls it, else "default".
        rank: this process's number in the job; else RANK, else as SLURM numbers the tasks, else 0.
        world_size: how many processes the job begins with; else WORLD_SIZE, else the number of SLURM's tasks, else 1.
        round_timeout: how long a round may take, in seconds.
        join_timeout: how long the processes may take to connect, in seconds; else as long as a round.
        policy: what happens when a member is lost. "strict": all others raise `ReplicaLost`. "elastic": they go on
            without it, and newcomers may join at a step boundary, see `Connection.first_step`.
        min_members: how few members an elastic job may go on with; with fewer all wait for newcomers, as long as a
            round may take; default 1.
        curve: the file with this client's secret key, as `python -m server keygen` makes it, for a server with --curve;
            else STATSD_BN_CURVE. A master that is started for a job on several nodes makes its keys from
            STATSD_BN_SECRET_FILE or STATSD_BN_SECRET.

    Returns:
        The connection, also a context manager: leaving it disconnects, and tells the others why if an
        exception was the reason.

    Raises:
        ConfigurationError: an argument or variable is missing or wrong, or this process is connected already.
        ServerUnreachable: nobody answers at the endpoint, within seconds, or it is closed to this user; or member 0
            could not start a master, or told the others of none in time.
        AuthenticationRefused: server and client do not accept each other's keys.
        DuplicateMember: another process has this rank.
        WorldSizeMismatch: the members disagree on `world_size`.
        GroupIncomplete: not all members came in time.
        RegistrationRefused: the members do not agree on the policy, or another reason that it names.
    """
    open_connection = current_connection()
    # A forked child may have its own beside its parent's, which it can neither use nor close.
    if open_connection and open_connection.is_own:
        raise ConfigurationError(f"already connected: {open_connection!r}; call client.disconnect() first")
    settings = resolve(
        os.environ,
        endpoint=endpoint,
        job=job,
        rank=rank,
        world_size=world_size,
        round_timeout=round_timeout,
        join_timeout=join_timeout,
        policy=policy,
        min_members=min_members,
        curve=curve,
    )
    logger.info("connecting with %s", settings)
    if settings.store:
        connection = own_server.join(settings, settings.store.value, os.environ, _join)
    else:
        connection = _join(settings.endpoint.value or _own_server(), settings.keys(), settings.member())
    hold(connection)
    if multiprocessing.parent_process():
        # Where such a child was forked it ends without a word to atexit.
        Finalize(None, _goodbye, exitpriority=AFTER_QUEUES)
    return connection


def _join(endpoint: str, keys: ClientKeys | None, who: Member) -> Connection:
    check_is_open_to_us(endpoint)
    return Connection(ZmqTransport(endpoint, keys), who)


def _own_server() -> str:
    expiry = time.monotonic() + FIND_SECONDS
    while True:
        try:
            return find_server(os.environ)
        except ServerUnreachable as error:
            if time.monotonic() >= expiry:
                raise ServerUnreachable(
                    f"{error}, or train under a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as "
                    "torchrun does",
                    **{**error.fields, "seconds": FIND_SECONDS},
                ) from None
        time.sleep(FIND_PAUSE_SECONDS)


def _goodbye() -> None:
    """At the interpreter's end: tells the others, with the exception that ended it if there was one.

    A master of this process's own would end with it, so members who have more to do are waited for.
    """
    error = _end_of_process()
    if connection := current_connection():
        connection.close(cause=cause_of(error))
    if error is None:
        server_process.wait_for_members()


def _end_of_process() -> BaseException | None:
    """Returns the exception that ends the process: shown by now, or in a child of multiprocessing on its way."""
    error = getattr(sys, "last_value", None) or sys.exception()
    # torch's spawn turns an exception into an exit.
    return error.__context__ if isinstance(error, SystemExit) else error


atexit.register(_goodbye)
