"""Heartbeat: the thread that says for silent sessions that this process is alive.

It also answers the server's question where this process is, hears that the job is broken, and tells of rounds that the
server does not see, because it can do so wherever the training script is. It is Python on purpose. ZeroMQ has
heartbeats of its own, but its I/O thread answers them even where no line of Python runs any more. Which sessions speak,
and when, is in `client.session.protocol.pulse`.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from client.diagnostics.broken_job import BrokenJob
from client.session.heartbeat_socket import Beacon
from client.session.protocol.pulse import Pulse
from client.session.protocol.session import Session
from statsd_bn.wire import encode

logger = logging.getLogger("statsd_bn.client")


class Heartbeat:
    """A running thread; `stop` ends it, and it closes the beacon.

    Args:
        reconnected: called when the connection has come up again after it was lost.
        unused: called once if no layer has begun a round for long.
    """

    def __init__(
        self,
        beacon: Beacon,
        sessions: Callable[[], Iterable[Session]],
        reconnected: Callable[[], None],
        unused: Callable[[], None],
        job: BrokenJob | None = None,
    ) -> None:
        self._job = job
        self._beacon = beacon
        self._sessions = sessions
        self._reconnected = reconnected
        self._unused = unused
        self._has_connected = False
        self._pulse = Pulse()
        self._stopping = False
        # A daemon, so that a process that ends without `stop` ends all the same.
        self._thread = threading.Thread(target=self._run, name="statsd_bn heartbeat", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Makes sessions that are new known to the server as living here, at once."""
        self._beacon.wake()

    def stop(self) -> None:
        """Ends the thread, at once; harmless when repeated."""
        self._stopping = True
        self._beacon.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                is_anew = self._beacon.wait(self._pulse.pause(time.monotonic(), self._sessions()))
                if is_anew:
                    self._pulse.connected_anew()
                self._listen()
                self._beat()
                self._guarded(self._tell_if_away)
                self._guarded(self._tell_if_unused)
                self._guarded(self._tell_figures)
                self._guarded(self._tell_times)
                if is_anew:
                    # After the heartbeat: a server that sees other connections close must know of this one.
                    if self._has_connected:
                        self._reconnected()
                    self._has_connected = True
                if self._job:
                    self._guarded(self._job.check, time.monotonic())
        finally:
            self._beacon.close()

    def _listen(self) -> None:
        for frame in self._beacon.received():
            for reply in self._pulse.overhear(frame, self._sessions()):
                self._beacon.send(reply)
            if self._job:
                self._guarded(self._attend, self._job, frame)

    @staticmethod
    def _guarded(look: Callable[..., object], *arguments: object) -> None:
        """Looks at the training script, or at its numbers; whatever goes wrong there must not end the heartbeats."""
        try:
            look(*arguments)
        except Exception:
            logger.debug("a look at what this process does has failed", exc_info=True)

    def _attend(self, job: BrokenJob, frame: bytes) -> None:
        if asked := self._pulse.asked(frame, self._sessions()):
            session, question = asked
            report = job.sampler.sample(question.torch_group).report(session.token, question.number)
            self._beacon.send(encode(report))
        elif news := self._pulse.news(frame, self._sessions()):
            job.report(news)

    def _tell_figures(self) -> None:
        for frame in self._pulse.figures(time.monotonic(), self._sessions()):
            self._beacon.send(frame)

    def _tell_times(self) -> None:
        for frame in self._pulse.told_times(time.monotonic(), self._sessions()):
            self._beacon.send(frame)

    def _tell_if_away(self) -> None:
        is_connected = self._beacon.is_connected
        if told := self._pulse.away(time.monotonic(), self._sessions(), is_connected=is_connected):
            logger.warning("%s", told)

    def _tell_if_unused(self) -> None:
        if self._pulse.is_unused(time.monotonic(), self._sessions()):
            self._unused()

    def _beat(self) -> None:
        for session in self._pulse.due(time.monotonic(), self._sessions()):
            if self._beacon.send(session.heartbeat()):
                self._pulse.sent(session)
