"""Verdicts of jobs on a real dispatcher name the event and the rank."""

import numpy as np

from server.view.snapshot import SnapshotBuilder
from statsd_bn.messages import Leave, StatusRequest
from statsd_bn.reduction import Rows
from support.asked_job import Job, Process
from support.strategies import contribution, key, session_of


class Watched(Job):
    def __init__(self, members: int, **given) -> None:
        super().__init__(members, **given)
        self.builder = SnapshotBuilder("x")
        self.poll()

    def poll(self):
        self.now += 0.01  # reports are cached for a moment
        (answer,) = self.send(StatusRequest(), b"view")
        (group,) = self.builder.update(self.now, answer.report)["groups"]
        return group

    def verdict_text(self) -> str:
        return self.poll()["verdict"]["text"]

    def watch(self, seconds: int) -> list[str]:
        texts = []
        for _ in range(seconds):
            self.pass_time(1.0)
            texts.append(self.verdict_text())
        return texts


def test_a_job_whose_ranks_all_take_part_is_healthy():
    assert Watched(3).verdict_text() == "Healthy: all 3 ranks take part, no NaN so far"


def test_a_late_rank_is_named_with_its_line():
    job = Watched(3)
    job.processes[2] = Process("loader.py:41 decode")
    job.contribute(0)
    job.contribute(1)
    texts = job.watch(4)
    assert texts[1].startswith("Waiting for rank 2 (place 2) for 2 s in bn1")
    assert texts[3] == "Waiting for rank 2 (place 2) for 4 s in bn1; it is in loader.py:41 decode, for 3 s"
    by_rank = {member["member"]: member for member in job.poll()["members"]}
    assert by_rank[0]["doing"] == "waits 4 s in bn1"
    assert by_rank[2]["flag"] == "awaited"


def test_a_rank_that_raises_is_named_until_long_after_the_end():
    job = Watched(3)
    job.contribute(0)
    job.send(Leave(session_of(2), "ValueError: loss is nan\nat some step"), b"2")
    text = "Broken: rank 2 (place 2) raised ValueError at step 3: loss is nan; at some step"
    assert job.watch(1) == [text]
    assert job.poll()["cards"][0] == {"name": "Ranks", "value": "Rank 2 failed", "note": "of 3 ranks", "state": "bad"}
    for rank in (0, 1):
        job.send(Leave(session_of(rank), "ReplicaLost: rank 2 failed"), b"%d" % rank)
    job.size = 0
    assert set(job.watch(9)) == {text}
    group = job.poll()
    assert group["over"]["reason"].startswith("rank 2 (place 2) failed with ValueError")
    rows = [(member["member"], member["flag"], member["doing"]) for member in group["members"]]
    assert rows == [(0, "", "has left"), (1, "", "has left"), (2, "failed", "failed")], "the last state with all ranks"


def test_a_rank_without_heartbeats_is_lost():
    job = Watched(3)
    job.contribute(0)
    job.size = 2
    texts = job.watch(6)
    why = "declared lost after 3.5 s without a sign of life"
    assert texts[-1] == f"Broken: rank 2 (place 2) fell silent at step 3: {why}"


def test_an_orderly_end_is_not_taken_for_a_loss():
    job = Watched(3)
    for rank in range(3):
        job.send(Leave(session_of(rank), ""), b"%d" % rank)
        job.size = 0
        text = job.verdict_text()
        assert text.startswith(("Finishing: ", "Finished in good order"))
    assert text == "Finished in good order: 3 ranks, 0 rounds"
    assert len(job.poll()["members"]) == 3
    kinds = [event["kind"] for event in job.builder.fail(0.0, "x")["events"]]
    assert "lost" not in kinds


def test_a_rank_that_leaves_between_two_rounds_is_reported_once_the_others_continue():
    job = Watched(3)
    job.send(Leave(session_of(2), ""), b"2")
    job.size = 2
    assert job.verdict_text() == "Finishing: 2 of 3 ranks are still here"
    job.contribute(0)
    assert job.verdict_text() == "Broken: rank 2 (place 2) left at step 0, before the others finished"
    kinds = [event["kind"] for event in job.builder.fail(0.0, "x")["events"]]
    assert kinds.count("lost") == 1


def test_the_first_nan_of_very_many_ranks_is_reported_with_some_of_them():
    job = Watched(12)
    of = key("bn1", step=20)
    for rank in range(12):
        job.send(contribution(rank, Rows((1,), np.full((1, 2, 1), float("nan"))), of), b"%d" % rank)
    assert job.verdict_text().startswith("Ranks 0-7 and 4 more brought the first NaN: forward of bn1, step 20")


def test_the_first_nan_is_reported_with_its_rank():
    job = Watched(3)
    of = key("layer3.0.bn1", step=20)
    for rank in range(3):
        value = float("nan") if rank == 2 else 1.0
        job.send(contribution(rank, Rows((1,), np.array([[[value, 1.0], [1.0, 1.0]]])), of), b"%d" % rank)
    assert job.verdict_text() == "Rank 2 brought the first NaN: forward of layer3.0.bn1, step 20, in 1 of 2 channels"
