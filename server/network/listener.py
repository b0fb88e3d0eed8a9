"""Listener: the server's ROUTER socket, how it is set up, and what it leaves on disk."""

from collections.abc import Callable

import zmq

from server.network import ipc_path
from server.network.zap import DOMAIN, Gatekeeper, seed_routing_ids
from server.security.keygen import check_curve
from server.security.quota import Quota
from statsd_bn import keys, limits
from statsd_bn.endpoints import check_endpoint
from statsd_bn.errors import BindError

# How long the server sleeps at most: a request to stop, or the end of a connection, is noticed this late.
LOOK_SECONDS = 0.05

# How long answers may take to leave when the server stops.
LINGER_MILLISECONDS = 1000

# Messages of one connection that wait for the server to read them: a member has one or two in flight. Any more wait
# with the sender, and none is lost. With a lower mark ZeroMQ's thread is woken for every other message: a tenth of a
# round.
RECEIVE_HIGH_WATER_MARK = 16

# How long a handshake may take: on a good network milliseconds, on a bad one a second.
HANDSHAKE_MILLISECONDS = 10_000

# How soon ZeroMQ finds out that a peer's host has vanished: after a minute of silence it asks every ten seconds.
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

# What the monitor reports.
EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED


class Listener:
    """The socket that all clients connect to.

    Args:
        quota: its limits.
        pair: the server's keys; None if clients need no keys.
        is_let_in: whether to let in a client with this public key, "" for none; called in another thread.

    Attributes:
        socket: the ROUTER.
        monitor: reports what happens to its connections.

    Raises:
        ConfigurationError: keys are wanted, and this ZeroMQ was built without them.
    """

    def __init__(self, quota: Quota, pair: keys.Pair | None, is_let_in: Callable[[str], bool]) -> None:
        if pair:
            check_curve()
        seed_routing_ids()
        self._context = zmq.Context()
        self._files: list[ipc_path.SocketFile] = []
        self.socket = self._context.socket(zmq.ROUTER)
        # Before anything is bound, so that nobody comes in unasked.
        self._gatekeeper = Gatekeeper(self._context, is_let_in)
        self.monitor = self.socket.get_monitor_socket(EVENTS)
        self._configure(quota)
        if pair:
            self._require_keys(pair)

    def bind(self, endpoint: str) -> str:
        """Listen; returns the endpoint, with the port that was picked.

        Raises:
            BindError: the endpoint is taken or does not exist.
            ConfigurationError: there is no such port, or another user can write to the socket's folder.
        """
        check_endpoint(endpoint)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            with ipc_path.listening(endpoint) as descriptor:
                self.socket.setsockopt(zmq.USE_FD, descriptor)
                self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise BindError(
                f"cannot listen on {endpoint}: {zmq.strerror(error.errno or 0)}", endpoint=endpoint
            ) from error
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if file := ipc_path.SocketFile.at(bound):  # ZeroMQ leaves it behind
            self._files.append(file)
        return bound

    def open(self) -> None:
        """Let connections in; call it when everything is bound."""
        self._gatekeeper.open()

    def close(self) -> None:
        """Close everything; answers under way have a moment to leave."""
        while self._files:
            self._files.pop().remove()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=LINGER_MILLISECONDS)
        # The gatekeeper may hold back an answer until all is bound, and the context waits for it.
        self._gatekeeper.open()
        self._context.term()
        self._gatekeeper.join()

    def _configure(self, quota: Quota) -> None:
        # Without MANDATORY a ROUTER drops answers to unknown peers silently; with HANDOVER a peer takes another's
        # routing id over, and its answers.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        # ZeroMQ then asks the gatekeeper without keys too, and refuses peers of ZMTP 1 and 2, of whom it cannot ask.
        self.socket.zap_domain = DOMAIN
        # Without it ZeroMQ lets everybody in when the gatekeeper is not there.
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.RCVTIMEO, int(LOOK_SECONDS * 1000))
        self.socket.setsockopt(zmq.SNDHWM, quota.max_unread)
        self.socket.setsockopt(zmq.RCVHWM, min(quota.max_unread, RECEIVE_HIGH_WATER_MARK))
        self.socket.setsockopt(zmq.BACKLOG, ipc_path.BACKLOG)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        for option, value in KEEPALIVE.items():
            self.socket.setsockopt(option, value)

    def _require_keys(self, pair: keys.Pair) -> None:
        self.socket.curve_server = True
        self.socket.curve_publickey = pair.public.encode()
        self.socket.curve_secretkey = pair.secret.encode()
