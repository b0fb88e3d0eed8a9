"""run_master: the server process.

A synchronous poll loop: asyncio doubles the round trip, and there is nothing here to do meanwhile. Each turn of
the loop drains what has come, so that the last contribution of a round and its answers meet in one turn.
"""

import errno
import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from server.config import Config
from server.core.dispatcher import Dispatcher
from server.group.rounds import Reply, failure
from server.limits import access
from server.limits.access import ANYBODY, Access, Tenant
from server.limits.fair_share import FairShare
from server.network import exposure
from server.network.connections import Connections
from server.network.descriptors import let_no_reset_through
from server.network.disconnect_probe import Probing
from server.network.listener import LOOK_SECONDS, Listener
from server.network.parent_watch import RETURN_SECONDS, Parent
from server.network.refusals import Refusals
from server.network.resets import Resets
from server.network.unread import Unread
from server.secrets import key_source, seal_key
from statsd_bn import limits
from statsd_bn.errors import BindError, ConfigurationError, ProtocolError, StatsdBNError
from statsd_bn.keys import PublicKey

logger = logging.getLogger("statsd_bn.server")

# How often deadlines are looked at.
TICK_SECONDS = 0.25

# As plain integers: to join pyzmq's flags takes as long as to send.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

# How long it sleeps at most while frames wait for the turns of others to pass.
PAUSE_MILLISECONDS = 1

# Frames taken in one turn, so that a flood cannot put off deadlines and signals.
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
        pair = None
        if config.curve:
            pair, clients = key_source.load(config.curve)
            self._access = Access(clients)
        self._listener = Listener(config.quota, pair, self._is_let_in)
        self._socket, self._monitor = self._listener.socket, self._listener.monitor
        self._connections = Connections(config.quota, self._listener.most_of_key)
        self._refusals = Refusals(config.quota)
        self._doomed: list[int] = []
        self._has_disconnected = False
        self._probing = Probing()
        self._resets = Resets()
        self._unread = Unread()
        self._next_tick = 0.0
        self._stopping = False
        self._is_reloading = False
        self._parent = _parent(config)
        try:
            self.endpoints = tuple(self._listener.bind(endpoint) for endpoint in config.bind)
        except (BindError, ConfigurationError):
            self.close()
            raise
        seals = seal_key.seals_of(pair.secret if pair else None, is_for_user=self._listener.is_for_user)
        self._dispatcher = Dispatcher(os.urandom(limits.TOKEN_BYTES), time.monotonic(), config.quota, seals)
        self._shares: FairShare[tuple[bytes, bytes, Tenant]] = FairShare(self._dispatcher.account)
        # Resets are to be kept out before anybody is let in.
        self._read_monitor()
        self._listener.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all sockets; answers under way have a moment to leave."""
        self._listener.close()

    def stop(self) -> None:
        """Asks `run` to drain and return at its next look; safe from any thread and from a signal handler."""
        self._stopping = True

    def reload(self) -> None:
        """Asks `run` to read the clients' public keys again at its next look; as safe as `stop`."""
        self._is_reloading = True

    @property
    def has_keys(self) -> bool:
        """Whether it lets in only those whose keys it knows."""
        return self._access is not None

    def run(self) -> None:
        """Serves until `stop`, or the parent's end, then drains: takes what has come, and tells who still waits."""
        next_look = time.monotonic() + LOOK_SECONDS
        while not self._stopping:
            # To wait in `recv` costs some system calls less for each frame than to poll before.
            try:
                peer = self._socket.recv(_LAST if self._shares.waiting else 0)
            except zmq.Again:
                if self._shares.waiting and not self._take_waiting():
                    self._socket.poll(PAUSE_MILLISECONDS)
            else:
                self._take(peer)
                if self._shares.waiting and self._shares.is_due(time.monotonic()):
                    self._take_waiting()
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + LOOK_SECONDS
        self._drain()
        if self._parent:
            # Nobody will start it again, so nobody is to wait for that.
            self._send(self._dispatcher.farewell())
        self._send(self._dispatcher.stop())

    def _look(self) -> None:
        """Does what is due beside the frames."""
        if self._is_reloading:
            self._is_reloading = False
            self._reload()
        self._read_monitor()
        self._cut_doomed()
        disconnected, self._has_disconnected = self._has_disconnected, False
        self._drain()
        self._look_for_the_dead(disconnected=disconnected)
        self._cut_reset()
        if time.monotonic() >= self._next_tick:
            self._send(self._dispatcher.tick(time.monotonic()))
            self._close_connections()
            self._suspect_resets()
            self._doomed += self._unread.late()
            self._dispatcher.tally.dropped_messages = self._shares.dropped
            self._refusals.forgive(time.monotonic())
            self._next_tick = time.monotonic() + TICK_SECONDS
        if self._parent and self._is_needed_no_more(self._parent):
            self.stop()

    def _is_needed_no_more(self, parent: Parent) -> bool:
        has_members, has_had_members = self._dispatcher.has_members, self._dispatcher.has_had_members
        return parent.needs_no_server(time.monotonic(), has_members=has_members, has_had_members=has_had_members)

    def _is_let_in(self, key: str) -> bool:
        return self._tenant(key) is not None

    def _tenant(self, key: str) -> Tenant | None:
        if self._access is None:
            return None if key else ANYBODY
        return self._access.tenant(key)

    def _reload(self) -> None:
        """Reads the public keys again, and takes out whoever would not be let in any more.

        A file that is not sound is one key that is not let in; a revocation beside it takes effect.
        """
        if self._curve is None:
            return
        try:
            clients, problems = key_source.load_again(self._curve)
        except ConfigurationError as error:
            logger.error("the keys stay as they were: %s", error)  # noqa: TRY400 - the operator's mistake, not ours
            return
        for problem in problems:
            logger.error("a key is not let in: %s", problem)
        access = self._let_in(clients)
        logger.info("lets in %d keys from now on: %s", len(access.keys), ", ".join(sorted(access.names)))
        self._send(self._dispatcher.expel(time.monotonic(), access))
        self._doomed += self._connections.of_others(access.keys)

    def _let_in(self, clients: Iterable[PublicKey]) -> Access:
        """Lets in these from now on; whose key each member has is looked up again with its next frame."""
        self._access = Access(clients)
        self._connections.members.clear()
        return self._access

    def _drain(self) -> None:
        with suppress(zmq.Again):
            for _ in range(DRAIN_AT_MOST):
                self._take(self._socket.recv(zmq.NOBLOCK))

    def _take(self, peer: bytes) -> None:
        """Takes what a peer has sent, of which ZeroMQ has given its name only."""
        part = self._socket.recv(copy=False)
        if part.more:
            self._socket.recv_multipart()
        tenant = self._connections.members.get(peer) or self._newcomer(peer, part)
        if tenant is None:
            return
        # A frame too many is no frame of ours; an empty one is refused as any garbage is.
        frame = b"" if part.more else part.bytes
        now, payer = time.monotonic(), self._dispatcher.payer(frame, tenant)
        if payer == self._shares.sole:
            self._process(now, peer, frame, tenant)
        elif self._shares.may_go(now, payer, peer):
            self._process(now, peer, frame, tenant)
            self._shares.took(payer, time.monotonic() - now)
        else:
            self._shares.wait(now, payer, peer, len(frame), (peer, frame, tenant))

    def _newcomer(self, peer: bytes, part: zmq.Frame) -> Tenant | None:
        """Returns who speaks over a connection that is no member's yet; None if it is not to be heard."""
        if not self._is_to_be_heard(peer, part):
            return None
        tenant = ANYBODY if self._access is None else self._access.tenant(str(part.get("User-Id")))
        if tenant is None:
            self._end(peer, access.revoked())
        return tenant

    def _is_to_be_heard(self, peer: bytes, part: zmq.Frame) -> bool:
        """Returns whether what a peer says counts that is no member; takes note of it if it is new."""
        if peer in self._refusals.ignored:
            return False
        if peer not in self._unread.peers:
            # First what the monitor tells: a connection that used this descriptor before may have ended.
            self._read_monitor()
            self._unread.meet(peer, _descriptor(part))
        if not self._listener.has_given(peer, part):
            self._end_claim(peer)
            return False
        return True

    def _take_waiting(self) -> bool:
        """Takes the next frame of those that wait for others' turns to pass; returns whether it was time for one."""
        now = time.monotonic()
        turn = self._shares.next(now)
        if turn is None:
            return False
        payer, (peer, frame, tenant) = turn
        if peer not in self._refusals.ignored:
            self._process(now, peer, frame, tenant)
        self._shares.took(payer, time.monotonic() - now)
        return True

    def _process(self, now: float, peer: bytes, frame: bytes, tenant: Tenant) -> None:
        is_known = peer in self._connections.members
        # What members are refused is counted only: this clock would cost each of their rounds a hundredth.
        began = 0.0 if is_known else time.thread_time()
        received = self._dispatcher.receive(now, peer, frame, tenant)
        spent = 0.0 if is_known else time.thread_time() - began
        self._send(received.replies)
        # What is refused does not keep its connection open.
        if received.is_refused:
            if excess := self._refusals.add(peer, spent, is_bad=received.is_unsound):
                self._dispatcher.tally.flooding_connections += 1
                self._end(peer, excess)
        elif not is_known:
            self._get_to_know(peer, received.session, tenant)

    def _get_to_know(self, peer: bytes, session: bytes, tenant: Tenant) -> None:
        """Takes note of a connection that something sound has come over, perhaps from a member."""
        descriptor = self._unread.descriptor(peer)
        if not self._connections.heard(time.monotonic(), descriptor, tenant, peer, session):
            most = self._listener.most_of_key
            text = f"expected at most {most} connections with the key of {tenant.name!r}, got more; this one ends"
            self._end(peer, self._dispatcher.exceeded(text, most, "connections of a key"))

    def _end_claim(self, peer: bytes) -> None:
        """Tells a peer that it must not set its routing id: ZeroMQ may not survive two of a kind."""
        self._dispatcher.tally.claimed_routing_ids += 1
        self._end(peer, ProtocolError("expected a socket that sets no routing id, got one that does"))

    def _end(self, peer: bytes, error: StatsdBNError) -> None:
        """Tells a peer why its connection ends, which it does at the next look, and listens to it no more."""
        logger.warning("peer %r: %s", peer, error)
        self._refusals.ignore(time.monotonic(), peer)
        self._connections.members.pop(peer, None)
        # A frame may be read after its connection has ended, and the descriptor may be another's by then.
        if self._deliver(peer, failure(error)) != zmq.EHOSTUNREACH:
            self._doomed.append(self._unread.descriptor(peer))

    def _cut_doomed(self) -> None:
        """Ends the connections that have been told why by now."""
        for descriptor in self._doomed:
            self._connections.cut(descriptor)
        self._doomed.clear()

    def _close_connections(self) -> None:
        """Ends those over which no member speaks, or nobody."""
        now = time.monotonic()
        self._connections.leave(now, self._dispatcher.is_registered)
        for descriptor in self._connections.overdue(now):
            self._dispatcher.tally.idle_connections += 1
            self._connections.cut(descriptor)

    def _suspect_resets(self) -> None:
        """Sends a harmless frame over the connections of members that may have been reset."""
        connections = self._connections.of_members()
        for descriptor in self._resets.suspects(time.monotonic(), connections):
            self._try([(connections[descriptor], self._dispatcher.probe)])

    def _cut_reset(self) -> None:
        """Ends those that have been reset indeed."""
        for descriptor in self._resets.gone(time.monotonic()):
            logger.debug("the connection with descriptor %d was reset", descriptor)
            self._connections.cut(descriptor)

    def _read_monitor(self) -> None:
        """Takes note of what has happened to connections."""
        if not int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        with suppress(zmq.Again):
            while True:
                told = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._happened(int(told["event"]), int(told["value"]))

    def _happened(self, event: int, value: int) -> None:
        if event == zmq.EVENT_LISTENING:
            let_no_reset_through(value)
        elif event == zmq.EVENT_ACCEPTED:
            # It may have been accepted before the listening socket was taken care of.
            let_no_reset_through(value)
            self._connections.accepted(time.monotonic(), value)
            self._unread.ended(value)
            self._resets.ended(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._unread.ended(value)
            self._resets.ended(value)
            self._connections.ended(value)
            self._has_disconnected = True
        else:
            self._dispatcher.tally.refused_connections += 1

    def _look_for_the_dead(self, *, disconnected: bool) -> None:
        """Tries those who have not spoken since a connection has ended, a moment after it.

        To be called when everything has been received that came before, what came through that connection as well.
        """
        now = time.monotonic()
        if disconnected:
            self._probing.connection_ended(now)
        if self._probing.begin_if_due(now):
            self._try(self._dispatcher.probes(self._probing.disconnected))

    def _try(self, probes: Iterable[Reply]) -> None:
        """Looks who can be reached, those whom nothing reaches at their other address as well.

        Not each from within the one before: a chain of addresses may be as long as there are connections.
        """
        untried = deque(probes)
        while untried:
            peer, frame = untried.popleft()
            if problem := self._deliver(peer, frame):
                untried.extend(self._elsewhere(peer, problem))

    def _send(self, replies: Iterable[Reply]) -> None:
        for peer, frame in replies:
            if problem := self._deliver(peer, frame):
                # Whether the peer has gone or does not read, nobody else may wait for it.
                self._dispatcher.tally.dropped_answers += 1
                logger.warning("an answer to peer %r was dropped: %s", peer, zmq.strerror(problem))
                self._try(self._elsewhere(peer, problem))

    def _deliver(self, peer: bytes, frame: bytes) -> int:
        """Sends a frame, and returns the number of the error that kept it from being sent; else 0."""
        if not self._unread.may_send(peer, len(frame)):
            return errno.EAGAIN
        try:
            self._socket.send(peer, _MORE)
            self._socket.send(frame, _LAST)
        except zmq.ZMQError as error:
            return error.errno or errno.EIO
        return 0

    def _elsewhere(self, peer: bytes, problem: int) -> list[Reply]:
        """Returns probes to where else those may be reached who spoke from a peer that has gone."""
        return self._dispatcher.unreachable(time.monotonic(), peer) if problem == zmq.EHOSTUNREACH else []


def _parent(config: Config) -> Parent | None:
    if config.parent is None:
        return None
    patience = max(RETURN_SECONDS, config.quota.silence_seconds) if config.again else math.inf
    return Parent(config.parent, expected_until=time.monotonic() + patience)


def _descriptor(frame: zmq.Frame) -> int:
    """Returns the file descriptor of the connection that a frame has come over; -1 if ZeroMQ does not tell it."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1


@contextmanager
def _signals(service: Service) -> Iterator[None]:
    """SIGTERM and SIGINT stop the service, SIGHUP makes it read keys again; former handlers come back afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    actions = {signal.SIGTERM: service.stop, signal.SIGINT: service.stop}
    if service.has_keys:
        actions[signal.SIGHUP] = service.reload
    former = {number: signal.signal(number, _handler(action)) for number, action in actions.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _handler(action: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    return lambda _number, _frame: action()


def run_master(config: Config | None = None) -> None:
    """Runs the aggregation server until SIGTERM or SIGINT, or the end of `config.parent`, then drains and returns.

    Prints one line, `listening on ENDPOINT`, for each endpoint once it is bound.

    Args:
        config: what `python -m server` would read from its flags; default: ipc, for this user alone.

    Raises:
        BindError: an endpoint is taken or does not exist.
        ConfigurationError: the folder of keys is unusable.
    """
    with Service(config or Config()) as service, _signals(service):
        for endpoint in service.endpoints:
            print(f"listening on {endpoint}", flush=True)  # noqa: T201 - a script reads the port from here
            if not service.has_keys and (warning := exposure.warning(endpoint)):
                logger.warning("%s", warning)
        service.run()
        logger.info("stopped")
