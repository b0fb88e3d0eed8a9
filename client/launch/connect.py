"""connect(): connects this process to its job, and leaves the job when the process ends."""

import atexit
import logging
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType

from client.diagnostics import collectives
from client.diagnostics.broken_job import end_process
from client.launch import launchers, own_server, server_process
from client.launch.launchers import ARGUMENT, DEFAULT, Setting
from client.launch.settings import Settings, resolve
from client.launch.store import ANSWER_SECONDS, of_process_group, with_timeout
from client.session.channel_pool import ZmqChannelPool, own_channel_pool
from client.session.connection import Connection
from client.session.current import current_connection, hold
from client.session.protocol.member import (
    BY_ELASTIC,
    DEFAULT_ABORT_AFTER,
    DEFAULT_ROUND_TIMEOUT,
    SHARED_MEMORY,
    STRICT,
    Member,
)
from client.session.protocol.registration import cause_of
from client.tracebacks import api_boundary
from statsd_bn.endpoints import check_key, check_server, find_server
from statsd_bn.environment import PREFIX, log_level, misspelt
from statsd_bn.error_text import in_log
from statsd_bn.errors import ConfigurationError, DuplicateMember, ServerUnreachable, WorldSizeMismatch
from statsd_bn.keys import ClientKeys
from statsd_bn.members import Members, ranks_in_words

logger = logging.getLogger("statsd_bn.client")

# Our own variables that the client reads.
_NAMES = "BIND CURVE ENDPOINT INSECURE JOB LOG_LEVEL ON_NONFINITE SECRET SECRET_FILE SECRET_IN_STORE STACKS TRACEBACK"
VARIABLES = frozenset(PREFIX + name for name in (*_NAMES.split(), "TRANSPORT"))

# A child of multiprocessing first sends what its queues hold; then it leaves, and may have to wait for other members.
AFTER_QUEUES = -100

# This user's server may have been started just before, in the background; it listens within a second.
FIND_SECONDS = 2.0
FIND_PAUSE_SECONDS = 0.05

# The name of the round in which ranks compare their runs, and of the run's token in the store. No layer has such a
# name: that of a module has no brackets.
SAME_RUN = "client.connect()"
RUN_BYTES = 8

# A server that runs takes a connection at once.
ACCEPT_SECONDS = 1.0


@api_boundary
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
    abort_after: float | None = DEFAULT_ABORT_AFTER,
    transport: str | None = None,
    on_nonfinite: str | None = None,
) -> Connection:
    """Connects this process's synchronised layers to a server, and waits until all processes of the job are there.

    Under torchrun it needs no argument: rank 0 starts a server, which ends with it, and announces it in torch's
    rendezvous store. The same holds for any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and for
    tasks of SLURM's srun. Without a launcher torch's process group says who this process is, if it is initialised, and
    its store is used; so it works in the children of `torch.multiprocessing.spawn`. A process that is told of no others
    is alone: it joins the `python -m server` of this user if one is running, and needs none otherwise.

    Args:
        endpoint: where `python -m server` listens, `tcp://host:port` or `ipc://path`; else STATSD_BN_ENDPOINT; else
            rank 0 starts a server if there is a launcher or a process group, and without one this user's own server is
            used.
        job: the training run's name; else STATSD_BN_JOB, else the launcher's name for it, else "default".
        rank: this process's number in the job; else RANK, else SLURM's number of the task, else the rank in torch's
            process group, else 0.
        world_size: how many processes the job begins with; else WORLD_SIZE, else the number of SLURM's tasks, else the
            size of torch's process group, else 1. More than these say if others are started elsewhere; fewer only with
            `rank`, or in an elastic job.
        round_timeout: how long a round may take, in seconds.
        join_timeout: how long the processes may take to connect, in seconds; else as long as a round.
        policy: what happens when a member is lost. "strict": all others raise `ReplicaLost`. "elastic": they go on
            without it, and new ones may join at a step boundary, see `Connection.first_step`.
        min_members: how few members an elastic job may go on with; with fewer all wait for new ones, for up to
            `round_timeout`; default 1.
        curve: the file with this client's secret key, as `python -m server keygen` makes it, for a server with --curve;
            else STATSD_BN_CURVE. A server that rank 0 starts for a job on several nodes makes its keys from
            STATSD_BN_SECRET_FILE or STATSD_BN_SECRET. TCP needs it; for a server with --insecure, on a network that is
            closed to strangers, set STATSD_BN_INSECURE=1 instead.
        abort_after: what a strict job does with a process that a collective of torch holds after the job has broken,
            because a rank was lost, raised or is elsewhere: end it with exit code 1 after so many seconds in that
            collective; None: never.
        transport: how rows reach the other processes. "auto", in a strict job: over torch's default process group if
            that is NCCL's, has the job's ranks, and the first layer's input is on a GPU on all of them; else in memory
            if all processes share a host and can; else over the server, and a line at level INFO says why. "server":
            over the server; one process that asks for it is enough. "shared_memory": in memory as "auto", also where
            nobody has tried it yet, and a warning if it cannot be used. "process_group": over torch's default process
            group, whatever its backend; all processes ask for it, and each of them raises ConfigurationError in the
            first round if it cannot be used. Else STATSD_BN_TRANSPORT, else "auto".
        on_nonfinite: what to do when NaN or infinity comes into the statistics of a forward pass, the same for all
            processes. "warn": log once whose they were. "raise": raise NonFinite on all ranks, before a running
            statistic has moved. "ignore": nothing. Gradients alone never raise: a GradScaler overflows them on purpose.
            Else STATSD_BN_ON_NONFINITE, else "warn".

    Returns:
        The connection. It is a context manager too: its end disconnects, and tells the others if an exception was the
        reason.

    Raises:
        ConfigurationError: an argument or variable is missing or wrong, or this process is already connected; or the
            launcher's rank is not that of the process group; or the endpoint is a socket that may be another
            user's.
        ServerUnreachable: no server answers at the endpoint within seconds, or it is closed to this user; or rank 0
            could not start a server, or announced none in time.
        AuthenticationRefused: server and client do not accept each other's keys, or TCP and no key were given.
        DuplicateMember: another process has this rank.
        WorldSizeMismatch: the processes disagree on `world_size`.
        GroupIncomplete: not all processes connected in time.
        RegistrationRefused: the processes disagree on the policy, or for another reason, which the error names.
    """
    arguments = dict(locals())  # before there is any other name
    open_connection = current_connection()
    # A forked child may open its own, beside its parent's, which it can neither use nor close.
    if open_connection and open_connection.is_own:
        raise ConfigurationError(f"already connected: {open_connection!r}; call client.disconnect() first")
    set_log_level(os.environ)
    for name, meant in misspelt(os.environ, VARIABLES):
        logger.warning("%s is set, which nothing reads; is %s meant?", name, meant)
    settings = resolve(os.environ, launchers.find_process_group(), **arguments)
    if settings.launched:
        logger.warning(
            "%s, but %s says %d: connect() waits up to %g s for the others, which must be started elsewhere; "
            "without others leave world_size out",
            settings.world_size,
            settings.launched.source,
            settings.launched.value,
            settings.join_timeout.value,
        )
    logger.info("connecting with %s", settings)
    if settings.world_size.value > 1:
        _load_compiler()
    connection = _connection(settings)
    hold(connection)
    who = connection.member
    logger.info("connected: job %r, rank %d of %d, %s", who.job, who.rank, who.world_size, _transport(connection))
    if who.is_elastic and who.transport == SHARED_MEMORY and not connection.is_in_process:
        logger.warning("job %r exchanges rows over the server, and not in shared memory: %s", who.job, BY_ELASTIC)
    _explain_exceptions()
    if multiprocessing.parent_process():
        # A forked child of multiprocessing does not run atexit.
        Finalize(None, _goodbye, exitpriority=AFTER_QUEUES)
    return connection


def set_log_level(environ: Mapping[str, str]) -> None:
    """Logs at STATSD_BN_LOG_LEVEL; without it nothing changes. What a script has set up takes the lines.

    Raises:
        ConfigurationError: it names no level.
    """
    if not environ.get("STATSD_BN_LOG_LEVEL"):
        return
    logger.setLevel(log_level(environ, "STATSD_BN_LOG_LEVEL", "").upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


def _load_compiler() -> None:
    """Loads what torch's optimizers load, before others listen for heartbeats.

    It holds Python's lock for long, and on a busy machine a rank that is silent for so long is taken for dead.
    """
    with suppress(ImportError):  # whoever needs it is told then
        import_module("torch._dynamo")


def _connection(settings: Settings) -> Connection:
    if settings.is_alone:
        return _alone(settings)
    if settings.store or settings.is_process_group:
        store = settings.store.value if settings.store else None
        return own_server.join(settings, store, os.environ, _join)
    endpoint = settings.endpoint.value or _own_server()
    try:
        connection = _join(endpoint, settings.keys(), settings.member(), insecure=settings.insecure.value)
    except ServerUnreachable as error:
        if settings.endpoint.value and settings.endpoint.source != ARGUMENT:
            error.add_note(f"The endpoint is that of {settings.endpoint.source}.")
        raise
    try:
        check_same_run(connection, settings.job)
    except BaseException as error:
        connection.close(cause_of(error))
        raise
    return connection


def _alone(settings: Settings) -> Connection:
    """Returns the connection of the only process of a job, through this user's server where one is running.

    It does not wait for one that has just been started: a job of one has the same results without.
    """
    if not settings.store and (endpoint := _running_server()):
        try:
            return _join(endpoint, settings.keys(), settings.member())
        except (ServerUnreachable, DuplicateMember, WorldSizeMismatch) as error:
            if settings.job.source != DEFAULT:
                raise
            # Somebody else's run has this name; this script has chosen none.
            logger.warning("%s; this process trains without that server", in_log(error))
    if multiprocessing.parent_process() and launchers.find_process_group() is None:
        logger.warning(
            "this process is a child of multiprocessing, and nothing says that its job has others, so it trains alone; "
            "call client.connect() after torch.distributed.init_process_group(), or pass rank and world_size"
        )
    else:
        logger.info("this process is alone, as far as anything says, and needs no server")
    connection = Connection(own_channel_pool(), settings.member())
    connection.is_told_alone = settings.world_size.source == ARGUMENT
    return connection


def _running_server() -> str | None:
    """Returns where this user's server listens; None without one, or if a killed one has left its socket behind."""
    try:
        endpoint = find_server(os.environ)
        with socket.socket(socket.AF_UNIX) as trial:
            trial.settimeout(ACCEPT_SECONDS)  # a frozen one takes no more connections
            trial.connect(endpoint.removeprefix("ipc://"))
    except (ServerUnreachable, OSError):
        return None
    return endpoint


def _transport(connection: Connection) -> str:
    """Says how a connection reaches the others."""
    return "in process" if connection.is_in_process else f"over ZeroMQ, server at {connection.endpoint}"


def _join(endpoint: str, keys: ClientKeys | None, who: Member, *, insecure: bool = False) -> Connection:
    check_server(endpoint)
    check_key(endpoint, has_key=keys is not None, insecure=insecure)
    return Connection(ZmqChannelPool(endpoint, keys), who)


def _own_server() -> str:
    expiry = time.monotonic() + FIND_SECONDS
    while True:
        try:
            return find_server(os.environ)
        except ServerUnreachable as error:
            if time.monotonic() >= expiry:
                raise ServerUnreachable(
                    f"{error.message}, or train under a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and "
                    "MASTER_PORT, as torchrun does",
                    **{**error.fields, "seconds": FIND_SECONDS},
                ) from None
        time.sleep(FIND_PAUSE_SECONDS)


def check_same_run(connection: Connection, job: Setting[str]) -> None:
    """Compares the runs of a strict job's ranks where nobody chose its name; takes a round of all of them.

    Two runs that share a server need names of their own. Without, rank 0 of one may meet rank 1 of the other, and both
    train on the statistics of a mixture. Ranks of one process group of torch's have a store in common, and in it a
    token that no other run has. A rank without a process group of the same size says nothing, and is told nothing.

    Raises:
        ConfigurationError: they are of several runs.
    """
    who = connection.member
    if job.source != DEFAULT or who.is_elastic or who.world_size == 1:
        return
    group = launchers.find_process_group()
    mine = _run_token() if group and group.size == who.world_size else b""
    said = connection.gather_in(connection.group(None), SAME_RUN, mine)
    if others := [rank for rank, token in enumerate(said) if token and mine and token != mine]:
        raise ConfigurationError(
            f"job {job.value!r}: expected the ranks of one run, got {ranks_in_words(Members.of(others))} of "
            "another one; give each run that shares a server a name of its own: connect(job=...), STATSD_BN_JOB or "
            "torchrun's --rdzv-id"
        )


def _run_token() -> bytes:
    """The run's, which its first rank to come here has made; empty where the store does not tell."""
    try:
        store, mine = of_process_group(), os.urandom(RUN_BYTES).hex()
        return bytes(with_timeout(ANSWER_SECONDS, lambda: store.compare_set(SAME_RUN, "", mine)))
    except (RuntimeError, TimeoutError, ValueError):
        # The others wait for what this one says.
        return b""


@cache
def _explain_exceptions() -> None:
    """Has the exception that ends this process say which rank has left and why; once is enough."""
    before = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if connection := current_connection():
            connection.explain(error)
        before(kind, error, trace)

    sys.excepthook = explain


def _goodbye() -> None:
    """Leaves the job when the interpreter ends, and tells the others of the exception if one ended it.

    A server that this process started would end too, so it waits for the members that are still at work.
    """
    error = _end_of_process()
    if connection := current_connection():
        connection.close(cause=cause_of(error))
    if error is None:
        server_process.wait_for_members()
    if collectives.abandoned.is_set():
        if error is not getattr(sys, "last_value", None):  # nobody has printed it yet
            traceback.print_exception(error)
        logging.shutdown()
        end_process("this process ends at once: torch's threads still wait for a rank that is lost")


def _end_of_process() -> BaseException | None:
    """Returns the exception that ends the process: already printed, or in a child of multiprocessing being raised."""
    error = getattr(sys, "last_value", None) or sys.exception()
    # torch's spawn turns an exception into an exit.
    return error.__context__ if isinstance(error, SystemExit) else error


atexit.register(_goodbye)
