"""Reports of rounds over a process group, which no server sees: skew, values that are not finite, slow rounds.

If a strict job has the same ranks, the first rank reports to its server. Otherwise a thread of that rank compares the
ranks by the server's rules and logs warnings. A watched round escalates like a round in shared memory: if it is slow,
its rows go to the server too, which reports late and lost ranks and mismatches. The process group gives the result.
"""

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import distributed

from client.diagnostics import collectives
from client.diagnostics.broken_job import CAUSE_SECONDS
from client.session.connection import Connection, current_connection
from client.session.protocol.session import StepCounter
from client.transports.server import ESCALATE_SECONDS, LISTEN_SECONDS
from statsd_bn.errors import StatsdBNError
from statsd_bn.members import format_rank
from statsd_bn.messages import Aggregate, NonFiniteRound
from statsd_bn.reduction import Rows, find_non_finite
from statsd_bn.round_key import RoundKey
from statsd_bn.skew import SkewDetector
from statsd_bn.skew_samples import SECONDS, Sample, SkewSampler, figures_of_step
from statsd_bn.wire import encode

logger = logging.getLogger("statsd_bn.client")

LAST_SECONDS = 0.5  # the rows of a rank that exits cleanly may arrive this long after the server reports its exit
NO_ROWS = Rows((0,), np.zeros((1, 1, 1)))  # sent to the server if a round without rows escalates


class SkewLog:
    """Compares the ranks of a process group and logs warnings, where no server does."""

    def __init__(self, name: str, ranks: Sequence[int], places: Mapping[int, str]) -> None:
        self._name, self._ranks, self._places = name, ranks, places
        self._comparison = SkewDetector(len(ranks))

    def compare(self, now: float, samples: Sequence[Sample]) -> None:
        """Compare the ranks by samples of a step, and log new findings."""
        if stats := figures_of_step(samples):
            step, layers = stats
            names = [format_rank(rank, self._places) for rank in self._ranks]
            for finding in self._comparison.add(now, step, list(layers), np.stack(list(layers.values()))):
                logger.warning("process group %r: skew: %s", self._name, finding.describe(names))

    def run(self, ref: "weakref.ref[SkewSampler]") -> None:
        """Compare twice a second, until nothing else refers to the sampler."""
        while (sampler := ref()) is not None:
            try:
                self.compare(now := monotonic(), sampler.drain(now))
            except Exception:  # a bad sample must not end the thread
                logger.debug("sampling the ranks' statistics failed", exc_info=True)
            del sampler
            time.sleep(SECONDS / 2)


class Rounds:
    """The rounds of this process in one process group."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held during a round: collectives have no names, so two rounds must not mix
        self.connection: Connection | None = None  # to the server that watches the rounds
        self.steps = StepCounter()
        self.places: dict[int, str] = {}  # host and process ID by rank; empty before the first round over the host
        self.sampler: SkewSampler | None = None  # on the first rank
        self._job: Connection | None = None  # to the server of a strict job of the same ranks, on the first rank
        self._reported: set[str] = set()  # phases with a non-finite aggregate that the job's server has received
        self.is_counted = False  # whether the server completed the latest watched round too, and counts it
        self._watched: tuple[Connection, RoundKey, Rows] | None = None  # the round that escalates if it is slow
        self._previous: RoundKey | None = None
        # Rows per rank on its device, by layer, as the ranks have agreed, see `device_rows`; 0: over the host.
        self.on_device: dict[str, int] = {}
        # The newest input's device; host messages travel on it if the group has no host backend.
        self.device: torch.device | None = None

    def attach(self, group: Any, connection: Connection | None) -> None:
        """Report the rounds from now on, to a connection's server or in this process's log."""
        self.connection, self.sampler, self._job, self._reported = connection, None, None, set()
        if group.rank() == 0:
            job, ranks = current_connection(), distributed.get_process_group_ranks(group)
            if job and not (job.is_in_process or job.member.is_elastic) and job.members == ranks:
                self._job, state = job, job.session(None).transport
                self.sampler = state.samples = state.samples or SkewSampler()  # heartbeats send the samples
            else:
                self.sampler = SkewSampler()
                run, ref = SkewLog(group.group_name, ranks, self.places).run, weakref.ref(self.sampler)
                threading.Thread(target=run, args=(ref,), name="statsd_bn skew", daemon=True).start()
        if connection:
            self.steps, self._previous = connection.session(None).steps, None
            connection.close_callbacks.append(self._drain_device)

    def report_non_finite(self, aggregate: Aggregate) -> None:
        """Report the first non-finite aggregate of each phase to the job's server; all ranks log it."""
        key, job = aggregate.key, self._job
        if job is None or key.phase in self._reported or job.closed:
            return
        self._reported.add(key.phase)
        member, session = job.member, job.session(None)
        values = str(find_non_finite(aggregate.values))
        job_key = RoundKey(member.job, session.member.group, member.epoch, key.step, key.layer, key.call, key.phase)
        with job.channel_pool.channel() as channel:
            channel.send(encode(NonFiniteRound(session.member_token, job_key, aggregate.non_finite, values)))

    @contextmanager
    def watched(self, key: RoundKey, rows: Rows = NO_ROWS) -> Iterator[None]:
        """Escalate a round on the host to the server if it is slow; the caller holds `lock`."""
        self.is_counted = False
        if self.connection:
            self.connection.raise_if_broken()
            self._watched = self.connection, key, rows
        try:
            yield
            self._previous = key
        finally:
            self._watched = None

    def wait(self, work: Any, device: torch.device) -> None:
        """Wait for a collective; `BrokenJob` handles a slow one on a device."""
        if self._watched is None or device.type != "cpu":
            work.wait()
            return
        try:
            if not _is_done(work, ESCALATE_SECONDS):
                self._escalate(work, *self._watched)
        except RuntimeError as error:  # for example a rank was killed, which the server detects a moment later
            self._watched[0].raise_if_broken(error, CAUSE_SECONDS)
            raise
        except StatsdBNError:
            if not _is_done(work, LAST_SECONDS):
                collectives.abandoned.set()
                raise

    def _escalate(self, work: Any, connection: Connection, key: RoundKey, rows: Rows) -> None:
        session = connection.session(None)
        if self._previous:  # another rank may have escalated that round, and not yet reported its end
            session.round_done(self._previous)
        trip = connection.round_trip(session, key, rows)
        with connection.channel_pool.channel() as channel:
            frames, due, aggregate = trip.begin(monotonic())
            while True:
                for frame in frames:
                    channel.send(frame)
                if _is_done(work, LISTEN_SECONDS):
                    break
                connection.raise_if_broken()
                frames, answer = (), None if aggregate else channel.receive_nowait()
                if aggregate is None and (answer is not None or monotonic() >= due):
                    frames, due, aggregate = trip.step(monotonic(), answer)
            self.is_counted = aggregate is not None
            channel.send(session.round_done(key))

    def _drain_device(self) -> None:
        """Wait until the device has finished the rounds in its queue, `CAUSE_SECONDS` at most."""
        # Otherwise the server would report that this rank left, although its rows of those rounds are on their way.
        if self.device is None or self.connection is None:
            return
        module, until = torch.get_device_module(self.device), monotonic() + CAUSE_SECONDS
        event = module.current_stream(self.device).record_event()
        while not (event.query() or self.connection.broken_job.is_broken) and monotonic() < until:
            time.sleep(0.001)


def _is_done(work: Any, seconds: float) -> bool:
    """Wait for a collective, `seconds` at most; raise torch's error if it failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises the error again, unless the wait timed out just before the end
    return True
