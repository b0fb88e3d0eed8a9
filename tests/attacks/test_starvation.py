"""Reports of one tenant's late members do not slow other tenants."""

import time
from dataclasses import replace

import pytest

from attacks.crowds import ROW, ask_all, registrations, session
from attacks.honest import START_SECONDS
from attacks.peers import Peer, Peers, job_of
from attacks.variants import first_is_quick
from statsd_bn import limits
from statsd_bn.members import Members
from statsd_bn.messages import Contribution, Heartbeat, StackReport, StackRequest, digest
from statsd_bn.round_key import RoundKey

pytestmark = pytest.mark.long

ATTACK_SECONDS = 1.0


# A long silence is allowed, since the members send at most one heartbeat.
PATIENT = ("--silence-seconds", "3600")


RANKS = {"many ranks": Members.of(range(limits.MAX_MEMBERS)), "many runs": Members.of(range(0, limits.MAX_MEMBERS, 2))}


@pytest.mark.parametrize("ranks", first_is_quick(RANKS))
def test_reports_of_collectives_by_late_members_do_not_slow_rounds(start, honest_job_beside, ranks):
    server = start(*PATIENT)
    with honest_job_beside(server) as beside:
        quiet = time.monotonic()
        with Peers(server) as peers:
            say_that_all_wait(peers, groups=48, size=17, ranks=ranks)
            began = time.monotonic()
            time.sleep(2 * ATTACK_SECONDS)
            beside.phases.append((quiet, began, time.monotonic()))


def say_that_all_wait(peers: Peers, groups: int, size: int, ranks: Members) -> None:
    """Opens jobs in which one member waits for all others, which report that they wait in collectives of torch."""
    late: dict[bytes, tuple[Peer, int, int]] = {}
    for group in range(groups):
        job, peer = job_of("bob"), peers.open()
        ask_all(peer, [replace(one, job=job, group="world") for one in registrations(job, group, size)])
        peer.send(Contribution(session(group, 0), RoundKey(job, "world", 0, 0, "bn", 0, "forward"), 0, ROW))
        for member in range(1, size):
            late[digest(session(group, member))] = peer, group, member
            peer.send(Heartbeat(session(group, member)))
    # Each late member answers three requests, a second apart, so the server considers it blocked in its collective.
    answers = dict.fromkeys(late, 0)
    expiry = time.monotonic() + START_SECONDS
    while min(answers.values()) < 3:
        assert time.monotonic() < expiry, "the server does not send stack requests to all"
        for peer in peers.all:
            while isinstance(question := peer.receive(0.001), StackRequest):
                _, group, member = late[question.digest]
                launched = int(member > 1)  # so the others seem to wait for member 1
                peer.send(StackReport(session(group, member), question.number, "f.py:1 f", 1, "0", ranks, launched))
                answers[question.digest] += 1
