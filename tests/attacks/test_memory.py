"""What a server keeps stays within its account, whatever it is that it keeps.

At 6b62bd3: neither futures nor unread answers are counted, and the bound is each job's, so two jobs keep twice of it.
"""

import time
from dataclasses import replace

import numpy as np
import pytest

from attacks.crowds import ask_all, crowd, registrations
from attacks.peers import Peers, job_of
from attacks.servers import accounting
from statsd_bn.messages import Contribution, StatusRequest
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows

ACCOUNT = 16 * 2**20


@pytest.fixture
def server(start):
    # Those who attack say nothing more once their messages are kept.
    return start(*accounting(ACCOUNT), "--silence-seconds", "3600", account=ACCOUNT)


def test_futures_are_counted(server, honest_job_beside):
    """At 6b62bd3: it grows by 100 to 190 MiB."""
    with honest_job_beside(server) as beside, Peers(server) as peers, beside.attacked():
        crowd(peers, "bob", groups=16, size=400, rounds=256)


def test_answers_that_nobody_reads_are_counted(server, honest_job_beside):
    """At 6b62bd3: 15 kB of requests let rounds of others take 10 to 500 times as long."""
    with honest_job_beside(server) as beside, Peers(server) as peers:
        job = job_of("bob")
        for group in range(8):
            ask_all(peers.open(), registrations(job, group, 512, there=400, place="p" * 200))
        with beside.attacked():
            # They take in no more than the least that a socket can.
            deaf = [peers.open(RCVHWM=1, RCVBUF=4096) for _ in range(24)]
            for _ in range(4):
                for peer in deaf:
                    peer.say(*[StatusRequest()] * 16)
                time.sleep(0.5)


def test_all_jobs_together_stay_within_the_account(server, honest_job_beside):
    """At 6b62bd3: each job may keep as much, and it grows by 115 MiB."""
    rows = Rows((1,), np.ones((1, 2, 32_768)))  # half a megabyte
    with honest_job_beside(server) as beside, Peers(server) as peers, beside.attacked():
        for number in range(8):
            job, peer = job_of("bob"), peers.open()
            tokens = [bytes([number, member]) * 4 for member in (0, 1)]
            world = registrations(job, number, 2)
            ask_all(peer, [replace(one, session=tokens[one.member]) for one in world])
            for layer in range(28):
                key = RoundKey(job, f"g{number}", 0, 0, f"layer {layer}", 0, "forward")
                peer.say(Contribution(tokens[0], key, 0, rows))
                time.sleep(0.005)
