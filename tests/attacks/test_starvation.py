"""One tenant takes no other one's time.

At 6b62bd3: a tick walks all futures of a job, and a status report is built whole for each request of 10 bytes, sent
whole, and kept until it is read.
"""

import time
from dataclasses import replace

import pytest

from attacks.crowds import ROW, ask_all, crowd, registrations, session
from attacks.honest import SLOWDOWN_OF_A_FULL_CORE, START_SECONDS
from attacks.peers import Peer, Peers, job_of
from attacks.servers import Attacked
from attacks.variants import first_is_quick
from statsd_bn import limits
from statsd_bn.members import Members
from statsd_bn.messages import Contribution, Heartbeat, StackReport, StackRequest, StatusRequest
from statsd_bn.round_key import RoundKey
from statsd_bn.tokens import digest
from statsd_bn.wire import encode

# A quicker flood of each kind is played in tests/integration/test_fair_service.py.
pytestmark = pytest.mark.long

ATTACK_SECONDS = 1.0


# The crowd says nothing more once its rounds are open.
PATIENT = ("--silence-seconds", "3600")


def test_open_rounds_of_one_tenant_do_not_slow_those_of_another(start, honest_job_beside):
    """At 6b62bd3: a third of the rounds are done; with keys a status is not told within ten seconds."""
    server = start(*PATIENT, account=2**29)  # its memory is another test's
    with honest_job_beside(server) as beside:
        for _ in beside.attacks():
            with Peers(server) as peers:
                crowd(peers, "bob", groups=16, size=400, rounds=256)
                time.sleep(ATTACK_SECONDS)
            wait_for_the_end_of_others(server, beside.job)


def test_requests_for_the_status_do_not_slow_rounds(start, honest_job_beside):
    """At 6b62bd3: rounds take 2 to 4 times as long, and the server takes 190 to 230 MiB more."""
    server = start(*PATIENT)
    job = job_of("bob")
    request = encode(StatusRequest())
    with Peers(server) as peers:
        for group in range(8):
            ask_all(peers.open(), registrations(job, group, 512, there=511, place="p" * 200))
        with honest_job_beside(server, slowdown=SLOWDOWN_OF_A_FULL_CORE) as beside:
            for _ in beside.attacks():
                with Peers(server) as others:
                    ask_for_the_status([others.open() for _ in range(8)], request)
                server.report()  # what had come before has been answered then


RANKS = {
    "many ranks": Members.of(range(limits.MAX_MEMBERS)),
    "many runs": Members.of(range(0, limits.MAX_MEMBERS, 2)),
}


@pytest.mark.parametrize("ranks", first_is_quick(RANKS))
def test_what_late_members_say_of_collectives_does_not_slow_rounds(start, honest_job_beside, ranks):
    """At 5916747: the tick takes a second, four times a second; of many runs the server keeps hundreds of MiB."""
    server = start(*PATIENT)
    with honest_job_beside(server) as beside:
        quiet = time.monotonic()
        with Peers(server) as peers:
            say_that_all_wait(peers, groups=48, size=17, ranks=ranks)
            began = time.monotonic()
            time.sleep(2 * ATTACK_SECONDS)
            beside.phases.append((quiet, began, time.monotonic()))


def say_that_all_wait(peers: Peers, groups: int, size: int, ranks: Members) -> None:
    """Opens jobs in which one member waits for all others, which say that they wait in collectives of torch."""
    late: dict[bytes, tuple[Peer, int, int]] = {}
    for group in range(groups):
        job, peer = job_of("bob"), peers.open()
        ask_all(peer, [replace(one, job=job, group="world") for one in registrations(job, group, size)])
        peer.say(Contribution(session(group, 0), RoundKey(job, "world", 0, 0, "bn", 0, "forward"), 0, ROW))
        for member in range(1, size):
            late[digest(session(group, member))] = peer, group, member
            peer.say(Heartbeat(session(group, member)))
    # A second apart at least, so that they are taken to stay there.
    answers = dict.fromkeys(late, 0)
    expiry = time.monotonic() + START_SECONDS
    while min(answers.values()) < 3:
        assert time.monotonic() < expiry, "the server does not ask all"
        for peer in peers.all:
            while isinstance(question := peer.hear(0.001), StackRequest):
                _, group, member = late[question.digest]
                launched = int(member > 1)  # so the others seem to wait for the first one
                peer.say(StackReport(session(group, member), question.number, "f.py:1 f", 1, "0", ranks, launched))
                answers[question.digest] += 1


def ask_for_the_status(askers: list[Peer], request: bytes) -> None:
    expiry = time.monotonic() + ATTACK_SECONDS
    while time.monotonic() < expiry:
        for asker in askers:
            asker.say(*[request] * 16)
        for asker in askers:
            while asker.hear_frame(0):
                pass
        time.sleep(0.01)


def wait_for_the_end_of_others(server: Attacked, job: str) -> None:
    """Waits until the server has noticed that the crowd has gone, so that it is quiet again."""
    expiry = time.monotonic() + START_SECONDS
    while any(group["job"] != job for group in server.report("bob")["groups"]):
        assert time.monotonic() < expiry
        time.sleep(0.1)
