"""Jobs of many groups and rounds that one tenant makes, to load a server."""

import contextlib
import time

import numpy as np
import zmq

from attacks.peers import Peer, Peers, job_of
from statsd_bn.messages import Contribution, Message, Register
from statsd_bn.reduction import Rows
from statsd_bn.round_key import RoundKey

# Messages in flight at a time, each with an answer; unread answers are dropped.
AT_A_TIME = 32

# Pause after `AT_A_TIME` messages, which leaves the processors to others.
PAUSE_SECONDS = 0.005

ROW = Rows((1,), np.ones((1, 1, 1)))


def ask_all(peer: Peer, messages: list[Message], each: float = 2.0) -> list[Message]:
    """Sends messages, `AT_A_TIME` at once; returns the answers that arrive in time."""
    answers = []
    for start in range(0, len(messages), AT_A_TIME):
        part = messages[start : start + AT_A_TIME]
        with contextlib.suppress(zmq.ZMQError):
            peer.send(*part)
        for _ in part:
            answer = peer.receive(each)
            if answer is None:
                return answers
            answers.append(answer)
        time.sleep(PAUSE_SECONDS)
    return answers


def session(group: int, member: int) -> bytes:
    return b"%03d%05d" % (group, member)


def registrations(job: str, group: int, size: int, *, there: int | None = None, place: str = "crowd") -> list[Message]:
    return [
        Register(session(group, member), job, f"g{group}", 0, member, size, 0, 60.0, place)
        for member in range(size if there is None else there)
    ]


def crowd(peers: Peers, tenant: str, groups: int, size: int, rounds: int) -> int:
    """Opens groups with rounds to which only one member contributes; returns the number of messages sent."""
    job, peer = job_of(tenant), peers.open()
    sent = 0
    for group in range(groups):
        if len(ask_all(peer, registrations(job, group, size))) < size:
            return sent
        # When the group opens, each member gets one more message.
        while peer.receive(0.05):
            pass
        keys = [RoundKey(job, f"g{group}", 0, 0, f"layer {number}", 0, "forward") for number in range(rounds)]
        for start in range(0, rounds, AT_A_TIME):
            peer.send(*[Contribution(session(group, 0), key, 0, ROW) for key in keys[start : start + AT_A_TIME]])
            time.sleep(PAUSE_SECONDS)
        sent += size + rounds
    return sent
