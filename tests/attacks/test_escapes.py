"""No text of a stranger reaches a terminal, a log or a traceback with control characters in it.

At 6b62bd3: a stranger's `place` reaches an honest member's traceback with raw ESC and CRLF, and a hostile server's text
reaches `status` and `check`.
"""

import subprocess
import sys
import threading

import pytest
import zmq

from attacks.crowds import ROW
from attacks.peers import Peers, job_of
from attacks.servers import ROOT, environment
from attacks.variants import long
from statsd_bn import messages
from statsd_bn.members import Members
from statsd_bn.round_key import RoundKey
from statsd_bn.wire import encode

ESCAPES = "\x1b[2J\r\nINFO all is well\x9b31m\u202e"

# Stands for it while a message is built, since one that exists is sound.
PLACEHOLDER = "P" * len(ESCAPES.encode())

CONTROLS = ("\x1b", "\r", "\x9b")


def forged(message: messages.Message) -> bytes:
    """The frame of a message with escapes in the place of the placeholder."""
    return encode(message).replace(PLACEHOLDER.encode(), ESCAPES.encode())


def said_of(message: object) -> str:
    return f"{message.message} {message.fields}" if isinstance(message, messages.Failure) else ""


def raw(text: str) -> list[str]:
    """The control characters that are in a text as they are."""
    return [control for control in CONTROLS if control in text]


@pytest.mark.parametrize("where", ["place", *map(long, ("cause", "job", "group"))])
def test_what_a_stranger_says_of_itself_is_told_to_nobody_as_it_is(server, where):
    """At 6b62bd3: the other member is told all of a place. A cause, a job and a group held then already."""
    job = job_of("alice")
    given = {"job": job, "group": "world", "place": "here"}
    if where in given:
        given[where] += PLACEHOLDER
    with Peers(server, "alice") as peers:
        honest, hostile = peers.open(), peers.open()
        named = {"job": given["job"], "group": given["group"]}
        numbers = {"epoch": 0, "world_size": 2, "min_members": 0, "deadline": 9.0}
        honest.ask(forged(messages.Register(b"honest--", **named, member=0, place="x", **numbers)))
        hostile.ask(forged(messages.Register(b"hostile-", **given, member=1, **numbers)))
        duplicate = peers.open().ask(forged(messages.Register(b"another-", **named, member=1, place="x", **numbers)))
        hostile.say(forged(messages.Leave(b"hostile-", f"failed{PLACEHOLDER}" if where == "cause" else "failed")))
        told = [duplicate]
        while (message := honest.hear(0.5)) is not None:
            told.append(message)
    assert not raw("".join(map(said_of, told)))
    assert not raw(server.said())


@pytest.mark.parametrize("stack", [f"f.py:1 f{PLACEHOLDER}", "f.py:1 f\n\trank 0 has failed"], ids=["forged", "lines"])
def test_where_a_late_member_says_it_is_is_told_on_one_line(server, stack):
    job = job_of("alice")
    with Peers(server, "alice") as peers:
        honest, hostile = peers.open(), peers.open()
        for number, peer in enumerate((honest, hostile)):
            peer.ask(messages.Register(b"member-%d" % number, job, "world", 0, number, 2, 0, 9.0, "here"))
        hostile.say(messages.Heartbeat(b"member-1"))
        key = RoundKey(job, "world", 0, 0, "bn", 0, "forward")
        honest.say(messages.Contribution(b"member-0", key, 0, ROW))
        question = hostile.hear_kind(messages.StackRequest)
        members = Members.of(range(2))
        hostile.say(forged(messages.StackReport(b"member-1", question.number, stack, 1, "0", members, 1)))
        hostile.hear(0.5)
        honest.say(messages.Contribution(b"member-0", key, 1, ROW))
        pending = honest.hear_kind(messages.Pending)
        report = str(server.report())
    is_sound = PLACEHOLDER not in stack
    assert ("rank 0 has failed" in pending.stacks) is is_sound
    assert not {"\n", "\t", *CONTROLS} & set(pending.stacks + report)
    assert not raw(server.said())


@pytest.mark.parametrize("command", ["status", "check"])
def test_a_hostile_servers_text_reaches_no_terminal(command):
    """At 6b62bd3: its escapes are printed as they came."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as hostile:
        hostile.setsockopt(zmq.LINGER, 0)
        port = hostile.bind_to_random_port("tcp://127.0.0.1")
        answer = forged(messages.Failure("limit", f"no{PLACEHOLDER}", {"reason": PLACEHOLDER}))

        def serve() -> None:
            if hostile.poll(20_000):
                peer, _ = hostile.recv_multipart()
                hostile.send_multipart([peer, answer])

        thread = threading.Thread(target=serve)
        thread.start()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "server", command, f"tcp://127.0.0.1:{port}"],
            cwd=ROOT,
            env=environment(STATSD_BN_INSECURE="1"),
            capture_output=True,
            timeout=30,
            check=False,
        )
        thread.join()
    assert done.returncode == 4
    text = (done.stdout + done.stderr).decode(errors="replace")
    assert text
    assert not raw(text)


def test_a_registration_with_controls_is_no_member(server):
    """At 6b62bd3: it is taken in. The answer repeats none of it."""
    with Peers(server) as peers:
        for text in ("\x1b[0m", "a\rb", "a\nb", "\x7f", "\x85", "a\0b"):
            peer = peers.open()
            sound = messages.Register(
                session=b"hostile-",
                job=job_of("bob"),
                group="world",
                epoch=0,
                member=0,
                world_size=2,
                min_members=0,
                deadline=9.0,
                place="placeholder!",
            )
            frame = encode(sound).replace(b"\xacplaceholder!", bytes([0xA0 + 12]) + text.encode().ljust(12, b"x")[:12])
            answer = peer.ask(frame)
            assert not isinstance(answer, messages.Registered), repr(text)
            assert not raw(said_of(answer))
