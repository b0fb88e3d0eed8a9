"""Nobody is sent what is another's: a token travels to nobody but the one that asked.

At 6b62bd3, without keys: a stranger that connects with the routing id of a member that waits takes its place
(ROUTER_HANDOVER), is sent its Registered with the token, and contributes in its name. With keys there is no handover.
"""

import time

from attacks.peers import Peer, Peers, job_of
from attacks.test_routing_ids import own_form
from statsd_bn.messages import Register, Registered, StatusRequest

TOKENS = {0: b"token--0", 1: b"token--1"}

# The first ids that a server gives.
FIRST = 24


def registration(job: str, member: int, **given: object) -> Register:
    return Register(TOKENS[member], job, "world", 0, member, 2, 0, 30.0, f"member {member}", **given)


def begin(members: Peers, strangers: Peers, job: str) -> Peer:
    """A member that waits, and connections to all ids that are claimed then: one still to come is another attack."""
    first = members.open()
    first.ask(registration(job, 0))
    for _ in range(FIRST):
        strangers.open().ask(StatusRequest())
    return first


def steal(members: Peers, strangers: Peers, job: str) -> list[bytes]:
    """The frames with a member's token that strangers are sent who claim its connection."""
    claims = [strangers.open(own_form(number)) for number in range(FIRST)]
    for claim in claims:
        claim.say(StatusRequest())
    time.sleep(0.2)
    members.open().say(registration(job, 1))
    told = [frame for claim in claims for frame in claim.hear_all(0.02)]
    return [frame for frame in told if any(token in frame for token in TOKENS.values())]


def test_a_session_is_told_to_nobody_who_claims_its_connection(server, honest_job_beside):
    """At 6b62bd3 without keys: the claimant gets the frame that names the victim's session."""
    job = job_of("alice")
    with honest_job_beside(server) as beside, Peers(server, "alice") as members, Peers(server) as strangers:
        first = begin(members, strangers, job)
        with beside.attacked():
            stolen = steal(members, strangers, job)
        assert not stolen
        assert isinstance(first.hear_kind(Registered), Registered)
