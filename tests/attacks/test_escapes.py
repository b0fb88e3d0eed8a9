"""No control character in a stranger's text reaches another member or the log."""

import pytest

from attacks.peers import Peers, job_of
from attacks.variants import long
from statsd_bn import messages
from statsd_bn.wire import encode

ESCAPES = "\x1b[2J\r\nINFO all is well\x9b31m\u202e"

# Placeholder for the text while a message is built, since messages validate.
PLACEHOLDER = "P" * len(ESCAPES.encode())

CONTROLS = ("\x1b", "\r", "\x9b")


def forged(message: messages.Message) -> bytes:
    return encode(message).replace(PLACEHOLDER.encode(), ESCAPES.encode())


def text_of(message: object) -> str:
    return f"{message.message} {message.fields}" if isinstance(message, messages.Failure) else ""


def raw(text: str) -> list[str]:
    return [control for control in CONTROLS if control in text]


@pytest.mark.parametrize("where", ["place", *map(long, ("cause", "job", "group"))])
def test_text_of_a_stranger_reaches_others_escaped(server, where):
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
        hostile.send(forged(messages.Leave(b"hostile-", f"failed{PLACEHOLDER}" if where == "cause" else "failed")))
        received = [duplicate]
        while (message := honest.receive(0.5)) is not None:
            received.append(message)
    assert not raw("".join(map(text_of, received)))
    assert not raw(server.log_text())
