"""A simulated process: it runs a program, the state machines that the program waits for, and its heartbeats."""

import math
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from client.diagnostics.sampler import ThreadSample
from client.session.channel_pool import WATCH_SECONDS
from client.session.protocol.heartbeats import HeartbeatScheduler
from client.session.protocol.session import StateMachine
from simulation.simulated_network import BEACON_RECONNECT_SECONDS, Clock, Network, SimulatedChannel
from statsd_bn.errors import StatsdBNError
from statsd_bn.messages import StackRequest
from statsd_bn.wire import encode

if TYPE_CHECKING:
    from client.session.protocol.session import Session

# Rounding errors of the simulator in a time.
ROUNDING_SECONDS = 1e-6


class SimulatedProcess:
    """Does in virtual time what `run_state_machine`, `ChannelPool.channel` and `HeartbeatThread` do."""

    def __init__(self, clock: Clock, network: Network) -> None:
        self.alive = True
        self.frozen_until = 0.0
        self.frozen_seconds = 0.0
        self.slowness = 0.0
        self.sessions: dict[str, Session] = {}
        self._clock, self._network = clock, network
        self._idle: list[SimulatedChannel] = []
        self._beacon: SimulatedChannel | None = None
        self._scheduler = HeartbeatScheduler()
        self._has_left = False
        self._program = self._run()
        # The program waits for a state machine on a channel; without a machine it waits until a time.
        self._machine: StateMachine[Any] | None = None
        self._channel: SimulatedChannel | None = None
        self._due = self._beat_due = self._alarm = math.inf

    def _run(self) -> Generator[Any, Any, None]:
        raise NotImplementedError

    def sample(self) -> ThreadSample:
        raise NotImplementedError

    def receive_notice(self, text: str) -> None:
        """Receive a wait's information about other members."""

    def start(self) -> None:
        self._resume(lambda: next(self._program))

    def delivered(self, channel: SimulatedChannel) -> None:
        if self._clock.now < self.frozen_until:
            return
        if channel is self._channel:
            self._run_machine()
        elif channel is self._beacon:
            self._listen()

    def wake(self) -> None:
        """Wakes the process from a sleep in shared memory; a frozen process checks memory when it thaws."""
        if self.alive and self._machine:
            self._due = min(self._due, self._clock.now)
            if self._clock.now >= self.frozen_until:
                self._check()
                self._set_alarm()

    def connected_anew(self, channel: SimulatedChannel) -> None:
        if channel is self._beacon:
            self._scheduler.on_reconnected()
            self.beat()
        elif channel is self._channel:
            # A moment later the wait checks whether its connection is a new one.
            self._wait_until(min(self._due, self._clock.now + WATCH_SECONDS))

    def freeze(self, seconds: float) -> None:
        """Stop the process for some time; frames queue."""
        self.frozen_until = max(self.frozen_until, self._clock.now + seconds)
        self.frozen_seconds += seconds
        self._clock.at(self.frozen_until, self._thaw)

    def end(self, *, silently: bool) -> None:
        self.alive = False
        self._network.vanish(self, silently=silently)
        self._program.close()

    def open_beacon(self) -> None:
        self._beacon = SimulatedChannel(self._network, self, BEACON_RECONNECT_SECONDS)

    def beat(self) -> None:
        now = self._clock.now
        if self._beacon is None or not self.alive or self._has_left or now < self.frozen_until:
            return
        self._listen()
        sessions = self.sessions.values()
        for session in self._scheduler.sessions_due(now, sessions):
            if self._beacon.link:
                self._beacon.send(session.heartbeat())
                self._scheduler.mark_sent(session)
        for frame in self._scheduler.skew_frames(now, sessions):
            self._beacon.send(frame)
        self._beat_due = now + self._scheduler.seconds_until_due(now, sessions) + ROUNDING_SECONDS
        self._set_alarm()

    def leave(self, cause: str) -> None:
        self._has_left = True
        self.send([session.leave(cause) for session in self.sessions.values()])

    def send(self, frames: list[bytes]) -> None:
        if frames:
            channel = self._borrow_channel()
            for frame in frames:
                channel.send(frame)
            self._idle.append(channel)

    def _borrow_channel(self) -> SimulatedChannel:
        return self._idle.pop() if self._idle else SimulatedChannel(self._network, self)

    def _listen(self) -> None:
        while self._beacon and self._beacon.inbox:
            frame = self._beacon.inbox.popleft()
            if not self._has_left:
                for reply in self._scheduler.on_unsolicited(frame, self.sessions.values()):
                    self._beacon.send(reply)
                match self._scheduler.request(frame, self.sessions.values()):
                    case session, StackRequest(number=number):
                        self._network.count("asked where")
                        self._beacon.send(encode(self.sample().report(session.member_token, number)))

    def _resume(self, resume: Callable[[], Any]) -> None:
        while True:
            try:
                wanted = resume()
            except StopIteration:
                return
            if isinstance(wanted, float):
                self._wait_until(self._clock.now + wanted)
                return
            self._machine, self._channel = wanted, self._borrow_channel()
            try:
                ended = self._turn(wanted, *wanted.begin(self._clock.now))
            except StatsdBNError as error:
                resume = self._failed(error)
            else:
                if ended is None:
                    return
                resume = self._succeeded(ended)

    def _run_machine(self) -> None:
        """Runs the machine after a frame for it has come, or when its time is over."""
        try:
            ended = self._turn(self._machine, (), self._due, None)
        except StatsdBNError as error:
            self._resume(self._failed(error))
        else:
            if ended is not None:
                self._resume(self._succeeded(ended))

    def _turn(self, machine: StateMachine[Any], frames: Any, due: float, result: Any) -> Any:
        """Returns the machine's result, or None when it waits."""
        channel, now = self._channel, self._clock.now
        while True:
            for frame in frames:
                channel.send(frame)
            if result is not None:
                return result
            if channel.inbox:
                frames, due, result = machine.step(now, channel.inbox.popleft())
            elif now < due:
                self._wait_until(min(due, now + WATCH_SECONDS) if channel.connected_anew else due)
                return None
            else:
                channel.connected_anew = False
                frames, due, result = machine.step(now, None)

    def _failed(self, error: StatsdBNError) -> Callable[[], Any]:
        self._end_machine()
        self._channel.close()
        self._machine = self._channel = None
        self._due = math.inf
        return lambda: self._program.throw(error)

    def _succeeded(self, result: Any) -> Callable[[], Any]:
        self._end_machine()
        self._idle.append(self._channel)
        self._machine = self._channel = None
        self._due = math.inf
        return lambda: self._program.send(result)

    def _end_machine(self) -> None:
        if text := getattr(self._machine, "_latest_news", ""):
            self.receive_notice(text)

    def _wait_until(self, due: float) -> None:
        self._due = due
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Sets one event of the clock for the wait and the heartbeat; if it rings too early, it sets the next one."""
        due = min(self._due, self._beat_due)
        if due < self._alarm:
            self._alarm = due
            self._clock.at(due, self._ring, due)

    def _ring(self, alarm: float) -> None:
        if alarm != self._alarm:
            # An alarm for an earlier time was set after this one, and has replaced it.
            return
        self._alarm = math.inf
        if not self.alive or self._clock.now < self.frozen_until:
            return
        if self._beat_due <= self._clock.now:
            self._beat_due = math.inf
            self.beat()
        self._check()
        self._set_alarm()

    def _thaw(self) -> None:
        if self.alive and self._clock.now >= self.frozen_until:
            self.beat()
            self._check()
            self._set_alarm()

    def _check(self) -> None:
        if self._due > self._clock.now and not (self._channel and self._channel.inbox):
            return
        if self._machine:
            self._run_machine()
        elif self._due < math.inf:
            self._due = math.inf
            self._resume(lambda: self._program.send(None))
