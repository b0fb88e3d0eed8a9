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
from client.launch import launchers, server_process
from client.launch.launchers import ARGUMENT, DEFAULT
from client.launch.own_server import Rendezvous, open_connection
from client.launch.settings import Settings, resolve
from client.session.channel_pool import InProcessChannelPool
from client.session.connection import Connection, current_connection, set_current_connection
from client.session.protocol.member import BY_ELASTIC, DEFAULT_ABORT_AFTER, DEFAULT_ROUND_TIMEOUT, SHARED_MEMORY, STRICT
from client.session.protocol.registration import cause_of
from client.tracebacks import api_boundary
from statsd_bn.endpoints import find_server
from statsd_bn.environment import PREFIX, find_misspelt, log_level
from statsd_bn.errors import ConfigurationError, DuplicateMember, ServerUnreachable, WorldSizeMismatch
from statsd_bn.text import log_line

logger = logging.getLogger("statsd_bn.client")

# The STATSD_BN_ variables of the client.
_NAMES = "BIND CURVE ENDPOINT INSECURE JOB LOG_LEVEL NATIVE ON_NONFINITE SECRET SECRET_FILE STACKS TRACEBACK TRANSPORT"
VARIABLES = frozenset(PREFIX + name for name in _NAMES.split())

# Priority of a finalizer that runs after multiprocessing has flushed its queues: leaving may wait for other members.
AFTER_QUEUES = -100

# This user's server may just have been started in the background; it listens within a second.
FIND_SECONDS = 2.0
FIND_PAUSE_SECONDS = 0.05

ACCEPT_SECONDS = 1.0  # a running server accepts a connection at once


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
    """Connects this process's synchronised layers to a server, and waits until all processes of the job are connected.

    Under torchrun no argument is needed: rank 0 starts a server, which ends with rank 0, and announces it in torch's
    rendezvous store. The same holds for any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and for
    tasks of SLURM's srun. Without a launcher, torch's process group, if it is initialised, provides rank, world
    size and store; this covers the children of `torch.multiprocessing.spawn`. With neither, this
    process is alone: it uses this user's `python -m server` if one is running, and needs none otherwise.

    Args:
        endpoint: the address of `python -m server`, `tcp://host:port` or `ipc://path`; else STATSD_BN_ENDPOINT; else
            rank 0 starts a server if there is a launcher or a process group; without either, this user's own server is
            used.
        job: the training run's name; else STATSD_BN_JOB, else the launcher's name for it, else "default".
        rank: this process's number in the job; else RANK, else SLURM's number of the task, else the rank in torch's
            process group, else 0.
        world_size: the number of processes at the start of the job; else WORLD_SIZE, else the number of SLURM's tasks,
            else the size of torch's process group, else 1. A larger value than the launcher's means that the other
            processes are started elsewhere; a smaller one is allowed only with `rank`, or in an elastic job.
        round_timeout: the longest time of a round, in seconds.
        join_timeout: the longest time until all processes are connected, in seconds; default: `round_timeout`.
        policy: the effect of a lost member. "strict": all others raise `ReplicaLost`. "elastic": they continue without
            it, and new ones may join at a step boundary, see `Connection.first_step`.
        min_members: the least number of members with which an elastic job continues; fewer wait for new ones, for up to
            `round_timeout`; default 1.
        curve: the file with this client's secret key, as `python -m server keygen` makes it, for a server with --curve;
            else STATSD_BN_CURVE. A server that rank 0 starts for a job on several nodes makes its keys from
            STATSD_BN_SECRET_FILE or STATSD_BN_SECRET. TCP needs a key; for a server with --insecure, on a closed
            network, set STATSD_BN_INSECURE=1 instead.
        abort_after: how many seconds a process may remain in a collective of torch after its strict job has broken,
            because a rank was lost, raised an error or made a different call; then it exits with code 1. None: never.
        transport: how rows reach the other processes. "auto", in a strict job: over torch's default process group if
            that is NCCL's, has the job's ranks, and the first layer's input is on a GPU on all of them; else in shared
            memory if all processes share a host and support it; else over the server, and a line at level INFO gives
            the reason. "server": over the server, for all processes as soon as one asks for it. "shared_memory": as
            "auto", also on untested platforms, with a warning if it cannot be used. "process_group": over torch's
            default process group, whatever its backend; all processes ask for it, and each raises ConfigurationError in
            the first call of a layer if it cannot be used. Default: STATSD_BN_TRANSPORT, else "auto".
        on_nonfinite: the reaction to NaN or infinity in the statistics of a forward pass; pass all processes the same.
            "warn": log the responsible ranks once. "raise": raise NonFinite on all ranks, before running statistics
            change. "ignore": nothing. Non-finite gradients never raise: a GradScaler overflows them on purpose. Else
            STATSD_BN_ON_NONFINITE, else "warn".

    Returns:
        The connection. It is also a context manager, which disconnects at its end and sends an exception to the other
        ranks as the cause.

    Raises:
        ConfigurationError: an argument or variable is missing or wrong, or this process is already connected; or the
            launcher's rank differs from the process group's; or the endpoint is a socket that may be another
            user's.
        ServerUnreachable: no server answers at the endpoint within seconds, or it is closed to this user; or rank 0
            could not start a server, or announced none in time.
        AuthenticationRefused: server and client do not accept each other's keys, or TCP and no key were given.
        DuplicateMember: another process has this rank.
        WorldSizeMismatch: the processes disagree on `world_size`.
        GroupIncomplete: not all processes connected in time.
        RegistrationRefused: the processes disagree on the policy, or another reason, which the error names.
    """
    arguments = dict(locals())  # before other local variables
    open_already = current_connection()
    # A forked child may connect: it can neither use nor close its parent's connection.
    if open_already and open_already.is_own:
        raise ConfigurationError(f"already connected: {open_already!r}; call client.disconnect() first")
    set_log_level(os.environ)
    for name, candidate in find_misspelt(os.environ, VARIABLES):
        logger.warning("unknown environment variable %s is ignored; did you mean %s?", name, candidate)
    settings = resolve(os.environ, launchers.find_process_group(), **arguments)
    if launched := settings.launched:
        size, source = settings.resolved["world_size"], launched.source
        text = (
            "%s, but %s has %d processes: connect() waits up to %g s for the other ranks, which must be started "
            "elsewhere; omit world_size if there are no others"
        )
        # Warn now: rank 0 may wait for all ranks in torch's store, where nothing is logged before the timeout.
        logger.warning(text, size, source, launched.value, settings.member.seconds_to_join)
    logger.info("connecting with %s", settings)
    if settings.member.world_size > 1:
        # Import torch's compiler before the server expects heartbeats: an optimizer would import it later, and hold the
        # GIL for long. On a busy machine the server would consider the silent rank lost.
        with suppress(ImportError):  # the optimizer will report it
            import_module("torch._dynamo")
    connection = _open(settings)
    set_current_connection(connection)
    member = connection.member
    how = "in process" if connection.is_in_process else f"over ZeroMQ, server at {connection.endpoint}"
    logger.info("connected: job %r, rank %d of %d, %s", member.job, member.rank, member.world_size, how)
    if member.is_elastic and member.transport == SHARED_MEMORY and not connection.is_in_process:
        logger.warning("job %r exchanges rows over the server, and not in shared memory: %s", member.job, BY_ELASTIC)
    _annotate_exceptions()
    if multiprocessing.parent_process():
        # A forked child of multiprocessing does not run atexit.
        Finalize(None, _leave, exitpriority=AFTER_QUEUES)
    return connection


def set_log_level(environ: Mapping[str, str]) -> None:
    """Sets the log level to STATSD_BN_LOG_LEVEL, and logs to stderr unless the script has configured logging."""
    if not environ.get("STATSD_BN_LOG_LEVEL"):
        return
    logger.setLevel(log_level(environ, "STATSD_BN_LOG_LEVEL", "").upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


def _open(settings: Settings) -> Connection:
    if settings.is_alone:
        return _open_alone(settings)
    if settings.store or settings.uses_process_group:
        return Rendezvous(settings, os.environ).join()
    endpoint = settings.endpoint or _wait_for_user_server()
    try:
        insecure = settings.resolved["insecure"].value
        return open_connection(endpoint, settings.load_keys(), settings.member, insecure=insecure)
    except ServerUnreachable as error:
        if settings.endpoint and settings.source("endpoint") != ARGUMENT:
            error.add_note(f"The endpoint came from {settings.source('endpoint')}.")
        raise


def _open_alone(settings: Settings) -> Connection:
    """Returns the connection of a job's only process, over this user's server if one already runs."""
    if not settings.store and (endpoint := _find_running_server()):
        try:
            return open_connection(endpoint, settings.load_keys(), settings.member)
        except (ServerUnreachable, DuplicateMember, WorldSizeMismatch) as error:
            if settings.source("job") != DEFAULT:
                raise
            # Another run uses the default name, and this script has set no name.
            logger.warning("%s; training alone, without a server", log_line(error))
    if multiprocessing.parent_process() and launchers.find_process_group() is None:
        logger.warning(
            "this child of multiprocessing found no other ranks and trains alone; call client.connect() after "
            "torch.distributed.init_process_group(), or pass rank and world_size"
        )
    else:
        logger.info("no launcher or process group names other ranks: training alone, without a server")
    connection = Connection(InProcessChannelPool(), settings.member)
    connection.is_explicitly_alone = settings.source("world_size") == ARGUMENT
    return connection


def _find_running_server() -> str | None:
    """Returns the endpoint of this user's server; None without a server, or if a killed one has left its socket."""
    try:
        endpoint = find_server(os.environ)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(ACCEPT_SECONDS)  # a frozen server accepts no connections
            probe.connect(endpoint.removeprefix("ipc://"))
    except (ServerUnreachable, OSError):
        return None
    return endpoint


def _wait_for_user_server() -> str:
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


@cache
def _annotate_exceptions() -> None:
    """Installs an exception hook that adds the lost rank and its cause to the final exception."""
    previous = sys.excepthook

    def annotate(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if connection := current_connection():
            connection.explain(error)
        previous(kind, error, trace)

    sys.excepthook = annotate


def _leave() -> None:
    """Leaves the job when the interpreter exits; without an error, waits for the members of this process's server."""
    error = _final_exception()
    if connection := current_connection():
        connection.close(cause=cause_of(error))
    if error is None:
        server_process.wait_for_members()
    if collectives.abandoned.is_set():
        if error is not getattr(sys, "last_value", None):  # not printed yet
            traceback.print_exception(error)
        logging.shutdown()
        end_process("exiting at once: torch's threads still wait for a lost rank")


def _final_exception() -> BaseException | None:
    """Returns the exception that ends the process: already printed, or in a child of multiprocessing being raised."""
    error = getattr(sys, "last_value", None) or sys.exception()
    # torch's spawn turns an exception into an exit.
    return error.__context__ if isinstance(error, SystemExit) else error


atexit.register(_leave)
