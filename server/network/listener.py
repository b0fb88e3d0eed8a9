"""Listener: configures, binds and closes the server's ROUTER socket, and removes its socket files."""

from collections.abc import Callable

import zmq

from server.network import ipc_path
from server.network.zap import DOMAIN, Authenticator, seed_routing_ids
from server.security.keygen import check_curve
from server.security.quota import Quota
from statsd_bn import keys, limits
from statsd_bn.endpoints import check_endpoint
from statsd_bn.errors import BindError

# Maximum wait for a frame, and so the delay before the server notices a stop request or a closed connection.
POLL_SECONDS = 0.05

# How long pending replies may take when the server stops.
LINGER_MILLISECONDS = 1000

# Unread messages per connection: a member has one or two in flight. Further ones wait at the sender, and none is lost.
# A lower mark wakes ZeroMQ's thread for every second message, which costs 10 % of a round.
RECEIVE_HIGH_WATER_MARK = 16

# Handshake timeout: a handshake takes milliseconds, or a second on a bad network.
HANDSHAKE_MILLISECONDS = 10_000

# Detects a vanished host: after 60 s of silence the system sends a keepalive every 10 s.
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

# Events of the monitor.
EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED


class Listener:
    """The ROUTER socket of all clients.

    Args:
        quota: the server's limits.
        pair: the server's keys; None without CURVE.
        is_allowed: whether to accept a public key, "" for none; called in another thread.

    Attributes:
        socket: the ROUTER.
        monitor: reports events of its connections.

    Raises:
        ConfigurationError: keys are given, and this libzmq was built without CURVE.
    """

    def __init__(self, quota: Quota, pair: keys.KeyPair | None, is_allowed: Callable[[str], bool]) -> None:
        if pair:
            check_curve()
        seed_routing_ids()
        self._context = zmq.Context()
        self._files: list[ipc_path.SocketFile] = []
        self.socket = self._context.socket(zmq.ROUTER)
        # Before `bind`, so that each connection is authenticated.
        self._authenticator = Authenticator(self._context, is_allowed)
        self.monitor = self.socket.get_monitor_socket(EVENTS)
        self._configure(quota)
        if pair:
            self._require_keys(pair)

    def bind(self, endpoint: str) -> str:
        """Listen; returns the endpoint, with the port that the system chose.

        Raises:
            BindError: the endpoint is in use or does not exist.
            ConfigurationError: the port is invalid, or another user can write to the socket's folder.
        """
        check_endpoint(endpoint)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            with ipc_path.listen(endpoint) as descriptor:
                self.socket.setsockopt(zmq.USE_FD, descriptor)
                self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise BindError(
                f"cannot listen on {endpoint}: {zmq.strerror(error.errno or 0)}", endpoint=endpoint
            ) from error
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if file := ipc_path.SocketFile.at(bound):  # ZeroMQ does not remove it
            self._files.append(file)
        return bound

    def open(self) -> None:
        """Start to accept connections; call it after the last `bind`."""
        self._authenticator.open()

    def close(self) -> None:
        """Close all sockets; pending replies get LINGER_MILLISECONDS."""
        while self._files:
            self._files.pop().remove()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=LINGER_MILLISECONDS)
        # The authenticator may still hold back an answer, and `term` waits for it.
        self._authenticator.open()
        self._context.term()
        self._authenticator.join()

    def _configure(self, quota: Quota) -> None:
        # Without MANDATORY a ROUTER silently drops replies to unknown peers; with HANDOVER a peer could take over
        # another's routing id and replies.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        # With a domain ZeroMQ also authenticates connections without keys, and refuses peers of ZMTP 1 and 2.
        self.socket.zap_domain = DOMAIN
        # Otherwise ZeroMQ accepts all connections while the authenticator is not running.
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.RCVTIMEO, int(POLL_SECONDS * 1000))
        self.socket.setsockopt(zmq.SNDHWM, quota.max_unread)
        self.socket.setsockopt(zmq.RCVHWM, min(quota.max_unread, RECEIVE_HIGH_WATER_MARK))
        self.socket.setsockopt(zmq.BACKLOG, ipc_path.BACKLOG)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        for option, value in KEEPALIVE.items():
            self.socket.setsockopt(option, value)

    def _require_keys(self, pair: keys.KeyPair) -> None:
        self.socket.curve_server = True
        self.socket.curve_publickey = pair.public.encode()
        self.socket.curve_secretkey = pair.secret.encode()
