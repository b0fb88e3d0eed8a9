"""Stragglers, found by a master in minutes of simulated rounds."""

import logging
import random
from array import array

import pytest

from server.core.report import group_entries
from server.group.health import STARTUP_SECONDS, WINDOW_SECONDS
from server.group.master import SyncMaster
from statsd_bn import limits
from statsd_bn.messages import Heartbeat, LatenessReport, RoundTrips
from statsd_bn.timing import BOUNDS, Histogram, quantile
from support.strategies import contribution, key, register

# Seconds of a rank's computation between two rounds.
STEP = 0.4


class Job:
    def __init__(self, ranks: int, **given) -> None:
        self.now, self.step = 0.0, 0
        self.master = SyncMaster(b"server-0", register(0, ranks, **given))
        for rank in range(ranks):
            self.master.register_slave(0.0, register(rank, ranks, **given), b"peer %d" % rank)

    @property
    def contributors(self):
        return self.master.membership.contributors

    def run(self, seconds: float, computing) -> None:
        end = self.now + seconds
        while self.now < end:
            arrivals = sorted((self.now + computing(rank), rank) for rank in self.contributors)
            for self.now, rank in arrivals:
                message = contribution(rank, key=key(step=self.step))
                self.master.contribute(self.now, self.contributors[rank], message, b"peer %d" % rank)
            self.step += 1
            self.master.expire(self.now)

    def report(self):
        return group_entries([self.master], self.now, [])["groups"][0]


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "straggler" in record.getMessage()]


@pytest.fixture(autouse=True)
def _warnings(caplog):
    caplog.set_level(logging.WARNING, "statsd_bn.server")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_slow_rank_is_named_once(caplog, ranks):
    job = Job(ranks)
    job.run(STARTUP_SECONDS + 5 * WINDOW_SECONDS, lambda rank: STEP * (1.25 if rank == 1 else 1.0))
    (text,) = warnings_in(caplog)
    assert text.startswith(
        "job 'job', group 'world': straggler: rank 1 (place 1): the others waited 20% of the last minute for it"
    )
    assert text.endswith("; its delay when it came last: median 164 ms, p99 164 ms")
    (finding,) = job.report()["findings"]
    assert (finding["kind"], finding["rank"]) == ("straggler", 1)
    assert finding["text"] in text
    assert (finding["median"], finding["p99"]) == pytest.approx((0.164, 0.164), rel=1e-2)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_ranks_that_are_late_in_turn_are_not_named(caplog, ranks, spread):
    job, chance = Job(ranks), random.Random(ranks)
    job.run(STARTUP_SECONDS + 10 * WINDOW_SECONDS, lambda _: STEP * chance.lognormvariate(0.0, spread))
    assert warnings_in(caplog) == []
    assert "findings" not in job.report()


def test_a_slow_start_names_no_rank(caplog):
    job = Job(3)
    job.run(STARTUP_SECONDS - 1, lambda rank: STEP * (3.0 if rank == 2 else 1.0))
    job.run(3 * WINDOW_SECONDS, lambda _: STEP)
    assert warnings_in(caplog) == []


def test_a_rank_that_is_slow_again_later_is_named_again(caplog):
    job = Job(3)
    for factor in (1.5, 1.0, 1.5):
        job.run(STARTUP_SECONDS + 3 * WINDOW_SECONDS, lambda rank, factor=factor: STEP * (factor if rank == 2 else 1.0))
    assert len(warnings_in(caplog)) == 2


def test_the_report_has_the_wait_and_speed_of_each_rank():
    job = Job(2)
    job.run(STARTUP_SECONDS + 2 * WINDOW_SECONDS + 1, lambda rank: STEP * (1.25 if rank == 1 else 1.0))
    report = job.report()
    fast, slow = report["members"]
    assert (round(fast["waiting"], 2), round(slow["waiting"], 2)) == (0.2, 0.0)
    assert (round(fast["score"], 2), round(slow["score"], 2)) == (1.0, 0.8)
    assert (report["slowest"], round(report["held"], 2)) == (1, 0.2)
    assert slow["last"] == report["rounds_done"]
    # 100 ms, in the bucket that ends at 164 ms.
    assert slow["late"] == {"median": pytest.approx(0.164, abs=1e-3), "p99": pytest.approx(0.164, abs=1e-3)}
    assert not {"last", "late"} & fast.keys()


def test_in_the_first_minute_waits_are_shares_of_the_time_so_far(caplog):
    job, slow = Job(2), lambda rank: STEP * (1.25 if rank == 1 else 1.0)
    job.run(STARTUP_SECONDS + 9, slow)
    report = job.report()
    assert "slowest" not in report
    assert 0 < report["slowest_in"] < 2
    job.run(22, slow)
    report = job.report()
    assert "slowest_in" not in report
    assert [round(member["waiting"], 1) for member in report["members"]] == [0.2, 0.0]
    assert (report["slowest"], round(report["held"], 1)) == (1, 0.2)
    assert 29 < report["held_seconds"] < 32
    assert warnings_in(caplog) == [], "a straggler is reported only after a whole minute"
    job.run(WINDOW_SECONDS, slow)
    assert job.report()["held_seconds"] == pytest.approx(WINDOW_SECONDS, abs=1.0)


def test_a_rank_is_compared_with_its_own_past_too():
    job = Job(2)
    job.run(STARTUP_SECONDS + 2 * WINDOW_SECONDS + 1, lambda _: STEP)
    job.run(2 * WINDOW_SECONDS, lambda _: 2 * STEP)
    assert [round(member["score"], 1) for member in job.report()["members"]] == [0.5, 0.5]


def test_members_report_their_waits_for_rounds_in_shared_memory(caplog):
    job, waited = Job(2), 0
    job.run(1.0, lambda _: STEP)
    for second in range(200):
        waited += 250
        for rank, milliseconds in ((0, waited), (1, 0)):
            one = job.contributors[rank]
            job.master.record_heartbeat(
                job.now, one, Heartbeat(one.session, 1, 10 * second, "shared_memory", "", milliseconds)
            )
        job.now += 1.0
        job.master.expire(job.now)
    (text,) = warnings_in(caplog)
    assert text.endswith("straggler: rank 1 (place 1): the others waited 25% of the last minute for it")


def test_a_rank_that_has_left_is_forgotten():
    job = Job(3, min_members=1)
    job.run(STARTUP_SECONDS + 1.5 * WINDOW_SECONDS, lambda _: STEP)
    assert {"waiting", "score"} <= job.report()["members"][2].keys()
    job.master.remove_contributor(job.now, job.contributors[2], "")
    job.master.register_slave(job.now, register(2, 3, min_members=1, session=b"another-"), b"peer 2")
    for seconds in (1, WINDOW_SECONDS):
        job.run(seconds, lambda _: 1.5 * STEP)
        assert not {"waiting", "score"} & job.report()["members"][2].keys()
    job.run(WINDOW_SECONDS, lambda _: 1.5 * STEP)
    assert [round(member["score"], 2) for member in job.report()["members"]] == [0.67, 0.67, 1.0]


@pytest.mark.parametrize(
    ("what", "factors", "each"), [("round_seconds", (1.0, 2.0), STEP), ("late_seconds", (1.0, 1.5, 1.75), STEP / 4)]
)
def test_durations_of_rounds_and_delays_of_the_last_rank_are_counted(what, factors, each):
    job = Job(len(factors))
    job.run(10.0, lambda rank: STEP * factors[rank])
    histogram = job.report()[what]
    assert sum(histogram["counts"]) == job.report()["rounds_done"]
    assert histogram["sum"] == pytest.approx(each * job.report()["rounds_done"])


def trips(job, rank, *, of=0, times=0, microseconds=0, kind=RoundTrips):
    counts = [0] * limits.BUCKETS
    counts[of] = times
    one = job.contributors[rank]
    job.master.health.add_latency(one, kind(one.session, microseconds, tuple(counts)))


def test_only_new_round_trips_of_a_cumulative_report_are_added():
    job = Job(2)
    assert "round_trip_seconds" not in job.report()
    trips(job, 0, of=1, times=3, microseconds=90)
    trips(job, 1, of=2, times=1, microseconds=70)
    trips(job, 0, of=1, times=5, microseconds=150)  # rank 0 reports all its rounds each time
    histogram = job.report()["round_trip_seconds"]
    assert (histogram["counts"], histogram["sum"]) == ([0, 5, 1], pytest.approx(220e-6))
    first, second = job.report()["members"]
    assert first["round_trip"] == {"median": BOUNDS[1], "p99": BOUNDS[1]}
    assert second["round_trip"] == {"median": BOUNDS[2], "p99": BOUNDS[2]}


def test_round_trips_never_become_fewer():
    job = Job(2)
    trips(job, 0, of=1, times=3, microseconds=90)
    before = job.report()["round_trip_seconds"]
    trips(job, 0, of=1, times=2, microseconds=100)
    trips(job, 0, of=0, times=9, microseconds=100)
    trips(job, 0, of=1, times=4, microseconds=80)
    assert job.report()["round_trip_seconds"] == before
    job.master.remove_contributor(job.now, job.contributors[0], "")
    assert job.report()["round_trip_seconds"] == before


def test_last_arrivals_in_shared_memory_and_at_the_server_are_added():
    job = Job(2)
    job.run(10.0, lambda rank: STEP * (1.0 + rank / 4))
    before = job.report()
    assert before["late_seconds"]["sum"] == pytest.approx(STEP / 4 * before["rounds_done"])
    assert before["members"][1]["last"] == before["rounds_done"]
    for times in (2, 5):  # rank 1 reports all its last arrivals each time
        trips(job, 1, of=3, times=times, microseconds=100 * times, kind=LatenessReport)
    trips(job, 1, of=3, times=4, microseconds=600, kind=LatenessReport)
    after = job.report()
    assert after["late_seconds"]["sum"] == pytest.approx(before["late_seconds"]["sum"] + 500e-6)
    assert [member.get("last") for member in after["members"]] == [None, before["rounds_done"] + 5]
    assert "round_trip_seconds" not in after


def test_delays_at_the_server_do_not_overflow_maximal_counts():
    job = Job(2)
    late = job.master.health.lateness
    late.counts = array("Q", [2**64 - 1] * limits.BUCKETS)
    job.run(10.0, lambda rank: STEP * (1.0 + rank / 4))
    assert job.report()["members"][1]["last"] == job.report()["rounds_done"] > 0
    assert set(late.counts) == {2**64 - 1}


def test_round_trips_stop_at_the_maximal_count():
    job = Job(1)
    job.master.health.round_trips.counts[3] = 2**64 - 3
    trips(job, 0, of=3, times=1, microseconds=5)
    trips(job, 0, of=3, times=limits.MAX_COUNTER, microseconds=6)
    assert job.report()["round_trip_seconds"]["counts"] == [0, 0, 0, 2**64 - 1]
    assert job.contributors[0].round_trips.counts[3] == limits.MAX_COUNTER


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (20e-6, 0), (21e-6, 1), (BOUNDS[-1], len(BOUNDS) - 1), (1e4, len(BOUNDS))]
)
def test_a_bucket_ends_at_its_bound(seconds, bucket):
    histogram = Histogram()
    histogram.add(seconds)
    assert list(histogram.counts).index(1) == bucket
    assert histogram.report == {"bounds": list(BOUNDS[: bucket + 1]), "counts": [0] * bucket + [1], "sum": seconds}


def test_a_quantile_is_the_bound_of_its_bucket():
    histogram = Histogram()
    assert (quantile(histogram.counts, 0.5), histogram.total) == (0.0, 0)
    assert histogram.report == {"bounds": [], "counts": [], "sum": 0.0}
    for seconds in [30e-6] * 98 + [1.0] * 2:
        histogram.add(seconds)
    assert quantile(histogram.counts, 0.5) == BOUNDS[1]
    assert BOUNDS[-2] > quantile(histogram.counts, 0.99) > 1.0
    assert histogram.total == 100
