"""One tenant takes no other one's time.

At 6b62bd3: a tick walks all futures of a job, and a status report is built whole for each request of 10 bytes, sent
whole, and kept until it is read.
"""

import time

from attacks.crowds import ask_all, crowd, registrations
from attacks.honest import SLOWDOWN_OF_A_FULL_CORE, START_SECONDS
from attacks.peers import Peer, Peers, job_of
from attacks.servers import Attacked
from attacks.variants import keys_if_long
from statsd_bn.messages import StatusRequest
from statsd_bn.wire import encode

pytestmark = keys_if_long

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
