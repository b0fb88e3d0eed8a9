"""Heartbeat: the thread that says for silent sessions that this process is alive.

It is Python on purpose. ZeroMQ has heartbeats of its own, but its I/O thread answers them even where no line of Python
runs any more. A session that takes part in rounds is heard by that, and sends none.
"""

import threading
import time
from collections.abc import Callable, Iterable

from client.connection.heartbeat_socket import Beacon
from client.connection.session import Session
from statsd_bn import limits


class Heartbeat:
    """A running thread; `stop` ends it, and it closes the beacon.

    Args:
        beacon: the way to the master.
        sessions: returns this process's sessions.
        reconnected: called when the connection has come up again after it was lost.
    """

    def __init__(
        self, beacon: Beacon, sessions: Callable[[], Iterable[Session]], reconnected: Callable[[], None]
    ) -> None:
        self._beacon = beacon
        self._sessions = sessions
        self._reconnected = reconnected
        self._has_connected = False
        # Who has spoken over the beacon's connection, and so made it known to the master.
        self._introduced: set[bytes] = set()
        self._stopping = False
        # A daemon, so that a process that ends without `stop` ends all the same.
        self._thread = threading.Thread(target=self._run, name="statsd_bn heartbeat", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Makes sessions that are new known to the master as living here, at once."""
        self._beacon.wake()

    def stop(self) -> None:
        """Ends the thread, at once; harmless when repeated."""
        self._stopping = True
        self._beacon.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._beacon.wait(self._pause()):
                    self._introduced.clear()
                    if self._has_connected:
                        self._reconnected()
                    self._has_connected = True
                self._listen()
                self._beat()
        finally:
            self._beacon.close()

    def _listen(self) -> None:
        """A member that is between two rounds returns to a restarted master from here, so that nobody waits for it."""
        for frame in self._beacon.received():
            for session in self._known():
                for reply in session.overhear(frame):
                    self._beacon.send(reply)

    def _pause(self) -> float:
        """Seconds until the next heartbeat is due, if nothing is said until then."""
        latest = time.monotonic()
        spoken = min((session.spoke for session in self._known()), default=latest)
        return limits.HEARTBEAT_SECONDS - (latest - spoken)

    def _beat(self) -> None:
        now = time.monotonic()
        for session in self._known():
            is_due = now - session.spoke >= limits.HEARTBEAT_SECONDS
            if is_due or session.token not in self._introduced:
                # One that cannot be sent is not tried again before its next time.
                session.spoke = now
                if self._beacon.send(session.heartbeat()):
                    self._introduced.add(session.token)

    def _known(self) -> list[Session]:
        return [session for session in self._sessions() if session.is_known]
