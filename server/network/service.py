"""run_master: runs the server process.

One synchronous loop: asyncio would double the round-trip time, and the server has no other work to overlap. A frame
passes `Service._receive`, `Dispatcher.receive` and `ConnectionManager.send`. ZeroMQ reads the connections in rotation,
so a busy connection delays the others by one frame at a time.
"""

import logging
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

import zmq

from server.config import Config
from server.core.dispatcher import Dispatcher
from server.network.connections import ConnectionManager
from server.network.listener import POLL_SECONDS, Listener
from server.security import keygen
from server.security.access import ANONYMOUS, OPERATOR, Principal
from statsd_bn import limits
from statsd_bn.endpoints import needs_keys
from statsd_bn.errors import AuthenticationRefused, BindError, ConfigurationError
from statsd_bn.keys import is_out_of_descriptors
from statsd_bn.reduction import ignore_float_errors
from statsd_bn.text import log_line

logger = logging.getLogger("statsd_bn.server")

TICK_SECONDS = 0.25  # interval of deadline checks
MAX_DRAINED = 1024  # frames received in one pass, so that a flood cannot delay deadlines and signals
_NO_WAIT = int(zmq.NOBLOCK)  # combining pyzmq's flags takes as long as receiving

# How long members may stay after the parent process has ended: they learn of it within milliseconds, raise, and leave.
ORPHAN_SECONDS = 5.0

# How long members may take to reconnect to the successor of a killed server. Living members reconnect in a moment;
# members that left in between never do. `silence_seconds` applies if it is longer.
REJOIN_SECONDS = 10.0


class Parent:
    """The process that started this server; `expected_until` is the deadline for the first member."""

    def __init__(self, pid: int, getppid: Callable[[], int] = os.getppid, *, expected_until: float = math.inf) -> None:
        self._pid = pid
        self._getppid = getppid
        self._expected_until = expected_until
        self._ended = math.inf

    def should_exit(self, now: float, *, has_members: bool, has_had_members: bool) -> bool:
        """Whether no process needs this server any longer."""
        if (has_had_members or now >= self._expected_until) and not has_members:
            return True
        if self._ended == math.inf and self._getppid() != self._pid:
            self._ended = now
        return now >= (self._ended + ORPHAN_SECONDS if has_members else self._ended)


class Service:
    """A bound server; a context manager that closes its sockets.

    Args:
        config: endpoints, keys and limits.

    Raises:
        BindError: an endpoint is in use or does not exist.
        ConfigurationError: the folder of keys is invalid.
    """

    def __init__(self, config: Config) -> None:
        self._curve = config.curve
        self._principals: dict[str, Principal] | None = None  # by public key
        pair = None
        if config.curve:
            pair, clients = keygen.load_server_keys(config.curve)
            # The operator may see all jobs and join none.
            self._operator = Principal(OPERATOR, keygen.operator_pair(pair).public, read_only=True)
            self._principals = {one.key: one for one in (*clients, self._operator)}
        self._listener = Listener(pair, self._is_allowed)
        self._socket = self._listener.socket
        self._next_tick = 0.0
        self._stopping = False
        self._reload_requested = False
        self._parent = None
        if config.parent is not None:
            timeout = max(REJOIN_SECONDS, config.quota.silence_seconds) if config.again else math.inf
            self._parent = Parent(config.parent, expected_until=time.monotonic() + timeout)
        try:
            self.endpoints = tuple(self._listener.bind(endpoint) for endpoint in config.bind)
        except (BindError, ConfigurationError):
            self.close()
            raise
        self._dispatcher = Dispatcher(os.urandom(limits.TOKEN_BYTES), time.monotonic(), config.quota)
        self._connections = ConnectionManager(self._listener, self._dispatcher)
        self._members = self._connections.members
        # Read the events of the new listening sockets, to attach the filter for TCP resets before a handshake ends.
        self._connections.read_monitor()
        self._listener.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all sockets; pending replies get a moment."""
        self._listener.close()

    def stop(self) -> None:
        """Make `run` drain and return; safe from any thread and from a signal handler."""
        self._stopping = True

    def reload(self) -> None:
        """Make `run` reload the clients' public keys; as safe as `stop`."""
        self._reload_requested = True

    @property
    def nr_ranks(self) -> int:
        """Number of registered ranks, which wait for the next server; 0 with a parent: no server follows then."""
        return 0 if self._parent else self._dispatcher.nr_ranks

    @ignore_float_errors
    def run(self) -> None:
        """Serve until `stop` or `Parent.should_exit`; then process the received frames and return."""
        # After a stop, waiting members wait for the next server at these endpoints, as after a kill. But a server with
        # a parent has a successor only after a failure, so after a stop it sends each member an error.
        next_look = time.monotonic() + POLL_SECONDS
        while not self._stopping:
            # A blocking `recv` needs fewer system calls per frame than a poll and a `recv`.
            try:
                peer = self._socket.recv()
            except zmq.Again:
                pass
            else:
                self._receive(peer)
            if time.monotonic() >= next_look:
                self._run_periodic()
                next_look = time.monotonic() + POLL_SECONDS
        self._drain()
        if self._parent:
            self._connections.send(self._dispatcher.shutdown_notices())
            self._connections.send(self._dispatcher.stop())

    def _receive(self, peer: bytes) -> None:
        """Receive the rest of a frame from a peer, and send the replies."""
        part = self._socket.recv(copy=False)
        if part.more:
            self._socket.recv_multipart()
        principal = self._members.get(peer) or self._principal_of(peer, part)
        if principal is None:
            return
        # A message of several parts is of another protocol: the empty frame in its place is refused as malformed.
        frame = b"" if part.more else part.bytes
        received = self._dispatcher.receive(time.monotonic(), peer, frame, principal)
        if received.replies:  # usually only after the last contribution to a round
            self._connections.send(received.replies)
        if received.is_refused or peer not in self._members:
            self._connections.record(peer, received, principal)

    def _principal_of(self, peer: bytes, part: zmq.Frame) -> Principal | None:
        """Key and rights of a peer that is not a member yet; None if its frame is ignored."""
        if not self._connections.accepts(peer, part):
            return None
        principal = ANONYMOUS if self._principals is None else self._principals.get(str(part.get("User-Id")))
        if principal is None:
            refusal = AuthenticationRefused("authentication refused: this key was revoked", reason="revoked")
            self._connections.close(peer, refusal)
        return principal

    def _run_periodic(self) -> None:
        """Do the periodic work: monitor events, probes, deadlines and reloads."""
        if self._reload_requested:
            self._reload_requested = False
            self._reload()
        self._connections.read_monitor()
        self._connections.close_due()
        disconnected = self._connections.has_disconnected()
        self._drain()
        self._connections.probe_members(disconnected=disconnected)
        now = time.monotonic()
        if now >= self._next_tick:
            self._connections.send(self._dispatcher.tick(now))
            self._connections.tick(time.monotonic())
            self._next_tick = time.monotonic() + TICK_SECONDS
        if (parent := self._parent) and parent.should_exit(
            now, has_members=self._dispatcher.has_members, has_had_members=self._dispatcher.has_had_members
        ):
            self.stop()

    def _drain(self) -> None:
        with suppress(zmq.Again):
            for _ in range(MAX_DRAINED):
                self._receive(self._socket.recv(_NO_WAIT))

    def _is_allowed(self, key: str) -> bool:
        return not key if self._principals is None else key in self._principals

    def _reload(self) -> None:
        """Reload the public keys, and remove members and connections with revoked keys."""
        # An invalid file disables its key only. Without a free descriptor the next pass tries again.
        if self._curve is None:
            logger.info("SIGHUP: no keys to reload")
            return
        try:
            clients, problems = keygen.load_valid_clients(self._curve)
        except ConfigurationError as error:
            self._reload_requested = is_out_of_descriptors(error)
            logger.error("reload failed, the keys stay unchanged: %s", log_line(error))  # noqa: TRY400 - no bug of ours
            return
        for problem in problems:
            logger.error("key refused: %s", log_line(problem))
        self._principals = {one.key: one for one in (*clients, self._operator)}
        self._members.clear()  # the rights of each member are looked up again at its next frame
        logger.info("now accepting %d keys", len(clients))
        self._connections.send(self._dispatcher.revoke(time.monotonic(), self._principals))
        self._connections.close_others(self._principals.keys())


@contextmanager
def _signal_handlers(service: Service) -> Iterator[None]:
    """SIGTERM and SIGINT stop the service, SIGHUP reloads the keys; restores the former handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    actions = {signal.SIGTERM: service.stop, signal.SIGINT: service.stop, signal.SIGHUP: service.reload}
    former = {number: signal.signal(number, lambda *_, do=action: do()) for number, action in actions.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def run_master(config: Config | None = None) -> None:
    """Run the aggregation server until SIGTERM or SIGINT, or, with a parent, until the parent or all members end.

    Prints one line, `listening on ENDPOINT`, for each bound endpoint.

    Args:
        config: the flags of `python -m server`; default: ipc, for this user alone.

    Raises:
        BindError: an endpoint is in use or does not exist.
        ConfigurationError: the folder of keys is invalid.
    """
    _, file_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS refuses an unlimited soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit, file_limit))
    config = config or Config()
    with Service(config) as service, _signal_handlers(service):
        for endpoint in service.endpoints:
            print(f"listening on {endpoint}", flush=True)  # noqa: T201 - a script reads the port from here
        if not config.curve and (plain := " and ".join(filter(needs_keys, service.endpoints))):
            logger.warning(
                "--insecure: %s has no keys, so anybody who can connect may join, end, read and falsify every job; "
                "give --curve DIR, unless strangers cannot reach the network",
                plain,
            )
        service.run()
        ranks = service.nr_ranks
        logger.info("stopped%s", f"; {ranks} rank{'s' * (ranks > 1)} had not left" if ranks else "")
