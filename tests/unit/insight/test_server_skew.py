"""Skew in rounds at the server: members with differing data are named, and kept samples are bounded."""

import numpy as np
import pytest

from server.core.dispatcher import Dispatcher
from server.group import health
from server.network.service import TICK_SECONDS
from statsd_bn.messages import Contribution
from statsd_bn.reduction import Rows
from statsd_bn.skew_samples import SCHEDULED_BYTES
from statsd_bn.wire import encode
from support.strategies import key, register, session_of

MEMBERS = 4


class Job:
    def __init__(self) -> None:
        self.now = 100.0
        self.dispatcher = Dispatcher(b"server-0", self.now)
        self.chance = np.random.default_rng(0)

    def open(self, job: str = "job", **given) -> None:
        for member in range(MEMBERS):
            self.send(register(member, MEMBERS, job=job, **given), member)

    def send(self, message, member: int) -> None:
        self.dispatcher.receive(self.now, b"%d" % member, encode(message))

    def train(
        self, steps: int, factor: float = 1.0, job: str = "job", first: int = 0, vectors: int = 2, copied: bool = False
    ):
        for step in range(first, first + steps):
            for layer in ("stem", "head"):
                drawn = self.chance.standard_normal((MEMBERS, 64, 8))
                if copied:
                    drawn[3] = drawn[1]
                drawn[2] *= factor
                for member, x in enumerate(drawn):
                    values = np.stack((x.sum(0), np.square(x).sum(0)))[np.newaxis, :vectors]
                    where = key(layer, job=job, step=step)
                    self.send(Contribution(session_of(member, job), where, 0, Rows((64,), values)), member)
            self.pass_time(0.5)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            self.dispatcher.tick(self.now)

    def findings(self, job: str = "job"):
        (group,) = (group for group in self.dispatcher.report(self.now)["groups"] if group["job"] == job)
        return [(found["kind"], found["rank"], found["layer"]) for found in group.get("findings", ())]

    @property
    def sample_bytes(self) -> int:
        (master,) = self.dispatcher._registry.masters.values()
        return master.health._samples.size


@pytest.mark.parametrize(("factor", "found"), [(1.0, []), (5.0, [("skew", 2, "stem")])])
def test_a_member_whose_data_are_scaled_is_named(factor, found):
    job = Job()
    job.open()
    job.train(40, factor)
    assert job.findings() == found


def test_two_members_with_the_same_data_are_named(caplog):
    job = Job()
    job.open()
    job.train(40, copied=True)
    assert job.findings() == [("skew", 3, "stem")]
    assert "rank 3 (place 3): same data as rank 1 (place 1) in all layers since step 0" in caplog.text


@pytest.mark.parametrize(("vectors", "min_members"), [(1, 0), (2, 1)], ids=["rows of one vector", "elastic"])
def test_rows_of_one_vector_and_elastic_groups_are_not_compared(vectors, min_members):
    job = Job()
    job.open(min_members=min_members)
    job.train(40, 5.0, vectors=vectors)
    assert job.sample_bytes == 0
    assert job.findings() == []


def test_groups_are_compared_in_turns():
    job = Job()
    for name in ("one", "other"):
        job.open(name)
    for step in range(40):
        for name in ("one", "other"):
            job.train(1, 5.0, job=name, first=step)
    assert job.findings("one") == job.findings("other") == [("skew", 2, "stem")]


def test_kept_samples_are_bounded_and_counted():
    job = Job()
    job.open()
    (master,) = job.dispatcher._registry.masters.values()
    wide = np.ones((1, 2, 60_000))
    for member in range(MEMBERS):
        job.send(Contribution(session_of(member), key("wide"), 0, Rows((64,), wide)), member)
    size, counted = job.sample_bytes, master.memory.allocated
    assert 0 < size - SCHEDULED_BYTES <= health.MAX_SAMPLE_BYTES
    job.pass_time(1.0)
    assert job.sample_bytes == SCHEDULED_BYTES
    # The samples were freed; the layer's history needs little memory in comparison.
    assert size // 2 < counted - master.memory.allocated <= size
