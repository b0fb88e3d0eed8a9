"""Attacks that once ended the server in its image, or a member; now each attack must fail.

Each attack is a scenario as in `scenarios.py`; `tests/attacks/` has many more.

Raises:
    EngineError: the attack did not end in time.
"""

from collections.abc import Callable

from engine import FOLDER, docker, wait_until
from scenarios import COME_SECONDS, REPLICA_IMAGE, SERVER_IMAGE, Outcome, Plan

ATTACKERS = FOLDER / "attackers"

ALL_ANSWERED = "96 of 96 answered"
REFUSED_BY_READER = "exit code 0: ProtocolError"


def claimed_routing_ids(plan: Plan) -> Outcome:
    """A tenant claims the routing ids that libzmq would assign next; the server keeps running."""
    with plan.stack("claimed-ids") as stack:
        stack.compose("up", "--detach", "--no-build", "server")
        server = stack.server
        wait_until(lambda: server.state["Health"]["Status"] == "healthy", COME_SECONDS, "a server that is healthy")
        started = server.state["StartedAt"]
        key = "/keys/replica.key_secret"
        text = stack.visit(SERVER_IMAGE, "-c", attacker("claimed_ids"), "tcp://server:5555", key, with_key=True).strip()
        same = server.state["StartedAt"] == started
    life = "the same server" if same else "another server"
    return Outcome(f"{ALL_ANSWERED}, the same server", f"{text}, {life}", same and text.startswith(ALL_ANSWERED))


def nested_bytes(_: Plan) -> Outcome:
    """A member sends deeply nested bytes in a gather; the receiver raises ProtocolError instead of crashing."""
    alone = ["run", "--rm", "--network", "none", "--entrypoint", "python", REPLICA_IMAGE]
    text = docker(*alone, "-c", attacker("nested_bytes"), seconds=COME_SECONDS).strip()
    last = text.splitlines()[-1] if text else "nothing"
    return Outcome(REFUSED_BY_READER, last, last == REFUSED_BY_READER)


ATTACKS: tuple[Callable[[Plan], Outcome], ...] = (claimed_routing_ids, nested_bytes)


def attacker(name: str) -> str:
    """Returns the source of an attacker's program."""
    return (ATTACKERS / f"{name}.py").read_text()
