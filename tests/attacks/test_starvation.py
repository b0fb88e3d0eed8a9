"""One tenant takes no other one's time.

At 6b62bd3: a tick walks all futures of a job, 0.2 s with 16 groups of 256 members and 256 open rounds, so 16,384 small
messages halve the rounds of others; a status report is built whole, and requests of 10 bytes bring them to 20 in 4 s.
"""

import time

from attacks.crowds import ask_all, crowd, registrations
from attacks.honest import SLOWDOWN_OF_A_FULL_CORE
from attacks.peers import Peers, job_of
from attacks.variants import keys_if_long
from statsd_bn.messages import StatusRequest
from statsd_bn.wire import encode

pytestmark = keys_if_long

ATTACK_SECONDS = 2.0


# The crowd says nothing more once its rounds are open.
PATIENT = ("--silence-seconds", "3600")


def test_open_rounds_of_one_tenant_do_not_slow_those_of_another(start, honest_job_beside):
    """At 6b62bd3: each quarter of a second the server stands still for as long."""
    server = start(*PATIENT, account=2**29)  # its memory is another test's
    with Peers(server) as peers:
        crowd(peers, "bob", groups=16, size=400, rounds=256)
        time.sleep(0.5)
        with honest_job_beside(server) as beside, beside.attacked():
            time.sleep(ATTACK_SECONDS)


def test_requests_for_the_status_do_not_slow_rounds(start, honest_job_beside):
    """At 6b62bd3: a median round of 72 to 205 ms, of less than 1 ms without."""
    server = start(*PATIENT)
    job = job_of("bob")
    request = encode(StatusRequest())
    with Peers(server) as peers:
        for group in range(8):
            ask_all(peers.open(), registrations(job, group, 512, there=511, place="p" * 200))
        askers = [peers.open() for _ in range(8)]
        with honest_job_beside(server, slowdown=SLOWDOWN_OF_A_FULL_CORE) as beside, beside.attacked():
            expiry = time.monotonic() + ATTACK_SECONDS
            while time.monotonic() < expiry:
                for asker in askers:
                    asker.say(*[request] * 16)
                for asker in askers:
                    while asker.hear_frame(0):
                        pass
                time.sleep(0.01)
