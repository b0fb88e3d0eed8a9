"""run_master: the server process.

One synchronous loop: asyncio would double the round trip, and the server has nothing else to do meanwhile. A frame goes
through `Service._take`, `Dispatcher.receive` and `Sender.send`. ZeroMQ reads the connections in turn, so a busy one
holds up the others by a frame of its own at a time.
"""

import logging
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Self

import zmq

from server.config import Config
from server.core.dispatcher import Dispatcher
from server.network.connections import Watch
from server.network.listener import LOOK_SECONDS, Listener
from server.network.sender import Sender
from server.security import access, keygen
from server.security.access import ANYBODY, Access, Tenant
from statsd_bn import limits
from statsd_bn.endpoints import needs_keys
from statsd_bn.error_text import in_log
from statsd_bn.errors import BindError, ConfigurationError
from statsd_bn.keys import PublicKey, is_out_of_files
from statsd_bn.reduction import quietly

# How long members may stay after the process that started the server has ended: they are told in milliseconds that it
# is lost, and leave as soon as they have raised.
PARTING_SECONDS = 5.0

# How long the members of a killed server may take to come back to its successor. Living ones are back in a moment; one
# that left in between told neither server, and never comes. `silence_seconds` counts if it is longer.
RETURN_SECONDS = 10.0


class Parent:
    """The process that started this server.

    Args:
        number: the process's id.
        of_this_process: returns the id of this process's present parent; another process adopts it when its own ends.
        expected_until: until when the first member may come, on the clock that `needs_no_server` is given.
    """

    def __init__(
        self, number: int, of_this_process: Callable[[], int] = os.getppid, *, expected_until: float = math.inf
    ) -> None:
        self._number = number
        self._of_this_process = of_this_process
        self._expected_until = expected_until
        self._ended = math.inf

    def needs_no_server(self, now: float, *, has_members: bool, has_had_members: bool) -> bool:
        """Whether nobody is left to serve.

        Args:
            now: seconds, on any clock.
            has_members: whether any member is registered.
            has_had_members: whether any member is registered, or was.
        """
        if (has_had_members or now >= self._expected_until) and not has_members:
            return True
        if self._ended == math.inf and self._of_this_process() != self._number:
            self._ended = now
        return now >= (self._ended + PARTING_SECONDS if has_members else self._ended)


logger = logging.getLogger("statsd_bn.server")

# How often deadlines are checked.
TICK_SECONDS = 0.25

# A plain integer: combining pyzmq's flags takes as long as sending.
_NO_WAIT = int(zmq.NOBLOCK)

# Frames taken in one turn, so that a flood cannot delay deadlines and signals.
DRAIN_AT_MOST = 1024


class Service:
    """A bound server; a context manager, since it holds sockets.

    Args:
        config: where to listen.

    Raises:
        BindError: an endpoint is taken or does not exist.
        ConfigurationError: the folder of keys is unusable.
    """

    def __init__(self, config: Config) -> None:
        self._curve = config.curve
        self._access: Access | None = None
        self._operator = ""
        pair = None
        if config.curve:
            pair, clients = keygen.load(config.curve)
            self._operator = keygen.operator(pair).public
            self._access = Access(clients, self._operator)
        self._listener = Listener(config.quota, pair, self._is_let_in)
        self._socket = self._listener.socket
        self._next_tick = 0.0
        self._stopping = False
        self._is_reloading = False
        self._parent = _parent(config)
        try:
            self.endpoints = tuple(self._listener.bind(endpoint) for endpoint in config.bind)
        except (BindError, ConfigurationError):
            self.close()
            raise
        self._dispatcher = Dispatcher(os.urandom(limits.TOKEN_BYTES), time.monotonic(), config.quota)
        self._sender = Sender(self._socket, self._dispatcher)
        self._watch = Watch(config.quota, self._listener, self._dispatcher, self._sender)
        self._members = self._watch.members
        # Keep resets out before anybody is let in.
        self._watch.read_monitor()
        self._listener.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all sockets; answers under way have a moment to leave."""
        self._listener.close()

    def stop(self) -> None:
        """Ask `run` to drain and return at its next look; safe from any thread and from a signal handler."""
        self._stopping = True

    def reload(self) -> None:
        """Ask `run` to read the clients' public keys again at its next look; as safe as `stop`."""
        self._is_reloading = True

    @property
    def has_keys(self) -> bool:
        """Whether only clients with known keys are let in."""
        return self._access is not None

    @property
    def left_behind(self) -> str:
        """Who is still there, for the log; empty if nobody is."""
        ranks = 0 if self._parent else self._dispatcher.nr_ranks
        return f"; {ranks} rank{'s' * (ranks > 1)} had not left" if ranks else ""

    @quietly
    def run(self) -> None:
        """Serve until `stop`, or until the parent ends; then take what has come, and answer what is complete.

        Who waits then waits for the next server at these endpoints, as if this one had been killed. One with a parent
        has no successor, and tells all.
        """
        next_look = time.monotonic() + LOOK_SECONDS
        while not self._stopping:
            # Waiting in `recv` costs some system calls less for each frame than polling before it.
            try:
                peer = self._socket.recv()
            except zmq.Again:
                pass
            else:
                self._take(peer)
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + LOOK_SECONDS
        self._drain()
        if self._parent:
            # Nobody will start it again.
            self._sender.send(self._dispatcher.farewell())
            self._sender.send(self._dispatcher.stop())

    def _take(self, peer: bytes) -> None:
        """Take a frame, of which ZeroMQ has told only the peer, and send the answers."""
        part = self._socket.recv(copy=False)
        if part.more:
            self._socket.recv_multipart()
        tenant = self._members.get(peer) or self._newcomer(peer, part)
        if tenant is None:
            return
        # Whoever sends several frames speaks another protocol; an empty frame is refused like any garbage.
        frame = b"" if part.more else part.bytes
        received = self._dispatcher.receive(time.monotonic(), peer, frame, tenant)
        if received.replies:  # of a member's frames only a round's last contribution has any
            self._sender.send(received.replies)
        if received.is_refused or peer not in self._members:
            self._watch.note(peer, received, tenant)

    def _newcomer(self, peer: bytes, part: zmq.Frame) -> Tenant | None:
        """Owner of the key of a peer that is not a member yet; None if its frame does not count."""
        if not self._watch.is_heard(peer, part):
            return None
        tenant = ANYBODY if self._access is None else self._access.tenant(str(part.get("User-Id")))
        if tenant is None:
            self._watch.end(peer, access.revoked())
        return tenant

    def _look(self) -> None:
        """Do what is due beside the frames."""
        if self._is_reloading:
            self._is_reloading = False
            self._reload()
        self._watch.read_monitor()
        self._watch.end_doomed()
        disconnected = self._watch.has_disconnected()
        self._drain()
        self._watch.probe_members(disconnected=disconnected)
        self._watch.end_reset()
        now = time.monotonic()
        if now >= self._next_tick:
            self._sender.send(self._dispatcher.tick(now))
            self._watch.tick(time.monotonic())
            self._next_tick = time.monotonic() + TICK_SECONDS
        if self._parent and self._needs_no_server(self._parent):
            self.stop()

    def _drain(self) -> None:
        with suppress(zmq.Again):
            for _ in range(DRAIN_AT_MOST):
                self._take(self._socket.recv(_NO_WAIT))

    def _needs_no_server(self, parent: Parent) -> bool:
        has_members, has_had_members = self._dispatcher.has_members, self._dispatcher.has_had_members
        return parent.needs_no_server(time.monotonic(), has_members=has_members, has_had_members=has_had_members)

    def _is_let_in(self, key: str) -> bool:
        return not key if self._access is None else self._access.tenant(key) is not None

    def _reload(self) -> None:
        """Read the public keys again, and end the members and connections of those that are gone.

        A file that is unsound is one key that is not let in; a revocation beside it takes effect. While connections
        take all descriptors that this process may have, it tries again at each look.
        """
        if self._curve is None:
            logger.info("SIGHUP: no keys to read again")
            return
        try:
            clients, problems = keygen.load_again(self._curve)
        except ConfigurationError as error:
            self._is_reloading = is_out_of_files(error)
            logger.error("the keys stay as they were: %s", in_log(error))  # noqa: TRY400 - the operator's mistake, not ours
            return
        for problem in problems:
            logger.error("a key is not let in: %s", in_log(problem))
        access = self._let_in(clients)
        logger.info("lets in %d keys from now on: %s", len(access.names), ", ".join(sorted(access.names)))
        self._sender.send(self._dispatcher.expel(time.monotonic(), access))
        self._watch.end_others(access.keys)

    def _let_in(self, clients: Iterable[PublicKey]) -> Access:
        """Let in these clients from now on; the owner of each member's key is looked up again at its next frame."""
        self._access = Access(clients, self._operator)
        self._members.clear()
        return self._access


def _parent(config: Config) -> Parent | None:
    if config.parent is None:
        return None
    timeout = max(RETURN_SECONDS, config.quota.silence_seconds) if config.again else math.inf
    return Parent(config.parent, expected_until=time.monotonic() + timeout)


@contextmanager
def _signals(service: Service) -> Iterator[None]:
    """SIGTERM and SIGINT stop the service, SIGHUP has it read the keys again; the former handlers come back after."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    actions = {signal.SIGTERM: service.stop, signal.SIGINT: service.stop}
    if hasattr(signal, "SIGHUP"):  # Windows has none
        actions[signal.SIGHUP] = service.reload
    former = {number: signal.signal(number, _handler(action)) for number, action in actions.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _handler(action: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    return lambda _number, _frame: action()


def _take_all_descriptors() -> None:
    """Raise the soft limit of open files to the hard one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS takes no limit for none
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_master(config: Config | None = None) -> None:
    """Run the aggregation server until SIGTERM or SIGINT, or the end of `config.parent`; then drain and return.

    Prints one line, `listening on ENDPOINT`, for each bound endpoint.

    Args:
        config: what `python -m server` would read from its flags; default: ipc, for this user alone.

    Raises:
        BindError: an endpoint is taken or does not exist.
        ConfigurationError: the folder of keys is unusable.
    """
    _take_all_descriptors()
    with Service(config or Config()) as service, _signals(service):
        for endpoint in service.endpoints:
            print(f"listening on {endpoint}", flush=True)  # noqa: T201 - a script reads the port from here
        if not service.has_keys and (plain := " and ".join(filter(needs_keys, service.endpoints))):
            logger.warning(
                "--insecure: %s has no keys, so anybody who can connect may join, end, read and falsify every job; "
                "give --curve DIR, unless strangers cannot reach the network",
                plain,
            )
        service.run()
        logger.info("stopped%s", service.left_behind)
