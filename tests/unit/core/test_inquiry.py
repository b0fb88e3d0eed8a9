"""Where a late member is: whom the server asks, what it tells, and when torch's collectives make a deadlock."""

import pytest

from server.core.dispatcher import Dispatcher
from server.group.sighting import SILENT_SECONDS, Sighting
from server.network.service import TICK_SECONDS
from statsd_bn.members import Members
from statsd_bn.messages import Failure, Heartbeat, Leave, Message, Pending, Question, StatusRequest, Whereabouts
from statsd_bn.tokens import digest
from statsd_bn.wire import decode, encode
from support.strategies import contribution, key, register, session_of

LINE = "torch/nn/parallel/distributed.py:1941 _sync_buffers, called from train.py:57 main"


class Process:
    """What a process answers: where it is, and how many operations it has begun on each process group."""

    def __init__(self, stack: str = "", held_in: str = "", **launched: int) -> None:
        self.stack, self.held_in, self.launched = stack, held_in, launched


class Job:
    """A job on a server that ticks as the real one; all members are alive, and those in `processes` answer.

    Attributes:
        asked: when each member was asked, and for which process group.
        told: what came to the members' beacons, questions aside.
    """

    def __init__(self, world_size: int, **given) -> None:
        self.now = 100.0
        self.dispatcher = Dispatcher(b"server-0", self.now)
        self.size = world_size
        self.ranks: dict[str, tuple[int, ...] | range] = {"0": range(world_size)}
        self.processes: dict[int, Process] = {}
        self.asked: dict[int, list[tuple[float, str]]] = {member: [] for member in range(world_size)}
        self.told: dict[int, list[Message]] = {member: [] for member in range(world_size)}
        for member in range(world_size):
            self.say(register(member, world_size, **given), b"%d" % member)
        self.beat()

    def say(self, message: Message, at: bytes) -> list[Message]:
        return [decode(frame) for _, frame in self.handle(message, at)]

    def handle(self, message: Message, at: bytes):
        return self.attend(self.dispatcher.receive(self.now, at, encode(message)).replies)

    def beat(self) -> None:
        for member in range(self.size):
            self.handle(Heartbeat(session_of(member)), b"beacon %d" % member)

    def bring(self, member: int, where=None, attempt: int = 0) -> list[Message]:
        message = contribution(member, 1.0, where or key("bn1", step=3))
        return self.say(type(message)(message.session, message.key, attempt, message.rows), b"%d" % member)

    def pass_time(self, seconds: float) -> dict[int, Message]:
        """What members in rounds are told meanwhile."""
        heard = {}
        for _ in range(round(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            self.beat()
            for peer, frame in self.attend(self.dispatcher.tick(self.now)):
                heard[int(peer)] = decode(frame)
        return heard

    def attend(self, replies):
        """Answers questions, keeps what else came to a beacon, and returns the rest."""
        others = []
        for peer, frame in replies:
            if not peer.startswith(b"beacon "):
                others.append((peer, frame))
                continue
            member, message = int(peer[7:]), decode(frame)
            if isinstance(message, Question):
                self.answer(member, message)
            else:
                self.told[member].append(message)
        return others

    def answer(self, member: int, question: Question) -> None:
        assert question.digest == digest(session_of(member))
        self.asked[member].append((self.now - 100.0, question.torch_group))
        if process := self.processes.get(member):
            group = question.torch_group or process.held_in
            launched = process.launched.get(f"of_{group}")
            what = (group, Members.of(self.ranks[group]), launched) if launched is not None else ("", Members.of(()), 0)
            answer = Whereabouts(session_of(member), question.number, process.stack, int(bool(process.held_in)), *what)
            self.handle(answer, b"beacon %d" % member)

    def pending(self, member: int) -> Pending:
        (answer,) = self.bring(member, attempt=1)
        assert isinstance(answer, Pending)
        return answer

    def report(self) -> dict:
        (answer,) = self.say(StatusRequest(), b"somebody")
        return answer.report["groups"][0]


# Whom it asks, and what becomes of the answer.


def test_nobody_is_asked_while_nobody_waits_for_a_second():
    job = Job(2)
    for step in range(20):
        job.bring(0, key(step=step))
        job.pass_time(0.75)
        job.bring(1, key(step=step))
    job.pass_time(5.0)
    assert job.asked == {0: [], 1: []}


def test_a_late_member_is_asked_after_a_second_and_then_at_doubling_intervals():
    job = Job(3)
    job.processes[1] = job.processes[2] = Process(LINE)
    job.bring(0)
    job.pass_time(40.0)
    assert job.asked[0] == [], "it waits itself"
    assert [round(when) for when, _ in job.asked[1]] == [1, 2, 4, 8, 16, 32]
    assert job.asked[2] == job.asked[1]


def test_what_it_answers_is_told_to_those_who_wait_and_in_the_status():
    job = Job(3)
    job.processes[1] = Process(LINE)
    job.bring(0)
    job.pass_time(1.5)
    assert job.pending(0).whereabouts == f"rank 1 (place 1) is in {LINE}, for 0 s"
    job.pass_time(12.0)
    assert "waiting since 13 s for rank 1 (place 1), rank 2 (place 2)" in job.pending(0).message
    assert job.pending(0).whereabouts.startswith(f"rank 1 (place 1) is in {LINE}, for 12 s; rank 2")
    assert job.report()["members"][1]["where"] == f"is in {LINE}, for 12 s"
    assert "where" not in job.report()["members"][0]


def test_what_it_answered_is_forgotten_when_it_has_come():
    job = Job(2)
    job.processes[1] = Process(LINE)
    job.bring(0)
    job.pass_time(3.0)
    job.bring(1)
    job.pass_time(TICK_SECONDS)
    assert "where" not in job.report()["members"][1]
    assert job.dispatcher._inquiry._asked == {}


def test_a_member_that_does_not_answer_is_said_not_to():
    job = Job(2)
    job.bring(0)
    job.pass_time(1.0 + SILENT_SECONDS + 10 * TICK_SECONDS)
    assert job.pending(0).whereabouts == "rank 1 (place 1) does not answer when asked where it is, for 4 s"


def test_a_timeout_says_where_the_late_member_is():
    job = Job(2, deadline=6.0)
    job.processes[1] = Process(LINE)
    job.bring(0)
    (failure,) = job.pass_time(7.0).values()
    assert failure.code == "timeout"
    assert f"rank 1 (place 1) is in {LINE}, for 5 s" in failure.message


def test_a_stack_is_text_from_somebody_and_can_forge_no_line():
    job = Job(2)
    job.processes[1] = Process("train.py:1 f\nrank 0 has failed")
    job.bring(0)
    job.pass_time(2.0)
    assert r"train.py:1 f\nrank 0 has failed" in job.pending(0).whereabouts


def test_answers_to_no_question_change_nothing():
    job = Job(2)
    answer = Whereabouts(session_of(1), 7, "forged", 0, "", Members.of(()), 0)
    job.handle(answer, b"beacon 1")
    job.bring(0)
    job.pass_time(1.5)
    job.handle(answer, b"beacon 1")
    assert job.pending(0).whereabouts == ""


def test_a_thousand_questions_keep_nothing_more():
    job = Job(2, deadline=86_400.0)
    job.bring(0)
    slave = job.dispatcher._registry.sessions[session_of(1)].slave
    job.pass_time(1.5)
    for number in range(1000):
        slave.sighting.due = job.now
        job.processes[1] = Process(f"train.py:{number} f", held_in="0", of_0=number)
        job.pass_time(TICK_SECONDS)
    assert len(job.asked[1]) > 1000
    assert len(slave.sighting.launched) == 1
    assert len(job.dispatcher._inquiry._asked) <= 2


# A deadlock with a collective of torch.


def mismatched(told: dict[int, Message]) -> set[int]:
    assert all(isinstance(answer, Failure) and answer.code == "mismatch" for answer in told.values()), told
    return set(told)


def test_a_rank_in_a_round_and_one_in_a_collective_that_needs_it_are_told_within_5_seconds():
    job = Job(2)
    job.processes = {0: Process(LINE, held_in="0", of_0=14), 1: Process("train.py:44 main", of_0=12)}
    job.bring(1)
    told = job.pass_time(4.75)
    assert mismatched(told) == {1}
    for text in (told[1].message, job.told[0][0].message):
        assert "rank 0 (place 0)  waits 1.5 s  in a collective of torch\n" in text
        assert f"rank 0 (place 0) is in {LINE}, for 2 s\n" in text
        assert "rank 1 (place 1)  waits 2.5 s  in forward of bn1, step 3\n" in text
    assert [row.get("stack") for row in told[1].fields["table"]] == [LINE, None]
    assert job.told[0][0].key is None


@pytest.mark.parametrize("launched", [14, 15])
def test_a_collective_that_the_waiting_rank_has_begun_too_needs_it_no_more(launched):
    job = Job(2)
    job.processes = {0: Process(LINE, held_in="0", of_0=14), 1: Process(of_0=launched)}
    job.bring(1)
    assert job.pass_time(60.0) == {}


def test_a_rank_that_gets_on_is_in_no_deadlock():
    job = Job(2)
    job.bring(1)
    for number in range(120):
        job.processes = {0: Process(LINE, held_in="0", of_0=14 + number), 1: Process(of_0=12)}
        assert job.pass_time(0.5) == {}


def test_a_waiting_rank_that_still_begins_collectives_is_in_no_deadlock():
    """A thread of its own may begin the one that the other needs."""
    job = Job(2)
    job.bring(1)
    for number in range(30):
        job.processes = {0: Process(LINE, held_in="0", of_0=100), 1: Process(of_0=12 + number)}
        assert job.pass_time(1.0) == {}


def test_a_collective_whose_group_lacks_the_waiting_rank_does_not_wait_for_it():
    job = Job(3)
    job.ranks = {"0": range(3), "1": (0, 2)}
    job.processes = {0: Process(LINE, held_in="1", of_1=4), 1: Process(of_0=3), 2: Process("train.py:9 load")}
    job.bring(1)
    assert job.pass_time(60.0) == {}


def test_one_rank_that_runs_frees_all():
    job = Job(4)
    held = Process(LINE, held_in="0", of_0=14)
    job.processes = {0: held, 1: held, 2: Process("train.py:9 load"), 3: Process(of_0=12)}
    job.bring(3)
    assert job.pass_time(60.0) == {}


def test_of_many_ranks_some_in_rounds_and_some_in_collectives_all_are_told():
    job = Job(5)
    for member in (0, 1):
        job.processes[member] = Process(LINE, held_in="0", of_0=14)
    for member in (2, 3, 4):
        job.processes[member] = Process(of_0=12)
    for member in (2, 3):
        job.bring(member)
    job.bring(4, key("bn2", step=3))
    assert mismatched(job.pass_time(4.75)) == {2, 3, 4}
    assert [len(job.told[member]) for member in range(5)] == [1, 1, 0, 0, 0]


def test_a_rank_whose_numbers_are_unknown_is_no_reason():
    job = Job(2)
    job.processes = {0: Process(LINE, held_in="0", of_0=14)}
    job.bring(1)
    assert job.pass_time(60.0) == {}


# The news of a broken job.


@pytest.mark.parametrize(
    ("cause", "text"), [("RuntimeError: boom", "failed with RuntimeError: boom"), ("", "left while")]
)
def test_all_members_of_a_broken_strict_job_hear_it_at_their_beacons_once(cause, text):
    job = Job(3)
    job.handle(Leave(session_of(1), cause), b"1")
    job.pass_time(5.0)
    for member in (0, 2):
        (news,) = job.told[member]
        assert news.code == "replica_lost"
        assert text in news.message
        assert news.key is None


def test_an_elastic_job_goes_on_and_hears_nothing():
    job = Job(3, min_members=1)
    job.handle(Leave(session_of(1), "RuntimeError: boom"), b"1")
    job.pass_time(5.0)
    assert job.told[0] == job.told[2] == []


def test_a_sighting_ignores_an_answer_to_an_earlier_question():
    sighting = Sighting(0.0)
    sighting.ask(0.0, 1)
    sighting.ask(1.0, 2)
    sighting.take(1.1, Whereabouts(b"session0", 1, "old", 0, "", Members.of(()), 0))
    assert sighting.told(1.2).startswith("does not answer")
    sighting.take(1.3, Whereabouts(b"session0", 2, "new", 0, "", Members.of(()), 0))
    assert sighting.told(3.3) == "is in new, for 2 s"
