"""Scenarios: each disturbs a training in containers in one way, and has an expected result.

A scenario takes the plan and returns its outcome.

Raises:
    EngineError: the scenario did not end in time.
"""

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from engine import Container, EngineError, Stack, docker, wait_until

SERVER_IMAGE = "statsd-bn-server"
REPLICA_IMAGE = "statsd-bn-replica"

# Limits of the size of the server's image, and of the time until the server listens.
MOST_MEGABYTES = 250
START_SECONDS = 2.0

# Exit code of `python -m server status` if the server refuses the key.
REFUSED = 5

# Prints the names of the files in /keys that hold secret keys.
LIST_SECRETS = "import pathlib; print(*(path.name for path in pathlib.Path('/keys').rglob('*.key_secret')))"

# Importing torch in all replicas at once takes a busy machine a minute.
COME_SECONDS = 240.0
TRAIN_SECONDS = 600.0

# Step of rank 0 at which the training is disturbed, before the step of the comparison.
DISTURB_AFTER = 20

# Seconds between the server's kill and restart: longer than the silence after which a member is lost.
AWAY_SECONDS = 5.0

# Beyond its deadline a member waits a moment for the server to end a round, closes its sockets, and prints the error.
LEAVE_SECONDS = 15.0

# Rank that is killed or cut off. Not rank 0, which prints the steps.
VICTIM = 2

# The server notices a killed replica within a second and a cut-off one after 3.5 s. A rank that waits in gloo fails
# there: at once if its peer was killed, at the deadline if its peer was cut off.
KNOWN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Expected and actual result of a scenario in words, and whether they agree."""

    expected: str
    got: str
    ok: bool


@dataclass(slots=True)
class Plan:
    """How to run the scenarios.

    Attributes:
        replicas: number of replicas.
        deadline: timeout of a round in seconds.
        stack: returns the Compose project of the scenario with this name.
        bits: hash of the undisturbed training's result; empty before that training.
    """

    replicas: int
    deadline: float
    stack: Callable[[str], Stack]
    bits: str = field(default="")


def server_image(_: Plan) -> Outcome:
    """The server's image is small, has no torch, and does not run as root."""
    size = int(docker("image", "inspect", "--format", "{{.Size}}", SERVER_IMAGE)) / 1e6
    look = "import importlib.util as i, os; print(os.getuid(), i.find_spec('torch') is not None)"
    uid, has_torch = docker("run", "--rm", "--entrypoint", "python", SERVER_IMAGE, "-c", look).split()
    return Outcome(
        f"< {MOST_MEGABYTES} MB, no torch, not root",
        f"{size:.0f} MB, {'torch' if has_torch == 'True' else 'no torch'}, uid {uid}",
        size < MOST_MEGABYTES and has_torch == "False" and uid != "0",
    )


def server_start(plan: Plan) -> Outcome:
    """The server listens soon after its container has started, with a read-only root file system."""
    with plan.stack("server-start") as stack:
        stack.compose("up", "--detach", "--no-build", "server")
        server = stack.server
        wait_until(lambda: "listening on" in server.log(), COME_SECONDS, "a server that listens")
        seconds = (_moment(server.log("--timestamps")) - _moment(server.state["StartedAt"])).total_seconds()
        wait_until(lambda: server.state["Health"]["Status"] == "healthy", COME_SECONDS, "a server that is healthy")
    return Outcome(
        f"listens within {START_SECONDS:g} s, healthy",
        f"listens after {seconds:.2f} s, healthy",
        seconds <= START_SECONDS,
    )


def strangers_refused(plan: Plan) -> Outcome:
    """The server refuses clients without a key, and server and client cannot read each other's secret."""
    ask = ("-m", "server", "status", "tcp://server:5555")
    with plan.stack("strangers") as stack:
        stack.compose("up", "--detach", "--no-build", "server")
        server = stack.server
        wait_until(lambda: server.state["Health"]["Status"] == "healthy", COME_SECONDS, "a server that is healthy")
        try:
            stranger = stack.visit(SERVER_IMAGE, *ask)
        except EngineError as error:
            stranger = "refused" if f"exit code {REFUSED}\n" in str(error) else str(error)
        member = stack.visit(SERVER_IMAGE, *ask, "--curve", "/keys/replica.key_secret", with_key=True)
        of_server = server.execute("python", "-c", LIST_SECRETS).split()
        of_client = stack.visit(SERVER_IMAGE, "-c", LIST_SECRETS, with_key=True).split()
    separate = (of_server, of_client) == (["server.key_secret"], ["replica.key_secret"])
    return Outcome(
        "without a key: refused; with one: answered; each side has only its own secret",
        f"{stranger.splitlines()[0]}; {member.splitlines()[0]}; {', '.join([*of_server, *of_client])}",
        stranger == "refused" and member.startswith("server ") and separate,
    )


def undisturbed(plan: Plan) -> Outcome:
    """The result equals training on the whole batch."""
    with plan.stack("undisturbed") as stack:
        _begin(stack, plan)
        verdict = _verdict(stack, plan)
        plan.bits = verdict["bits"]
    return Outcome(
        f"the whole batch's result after {verdict['compared_after']} steps",
        f"differs by {verdict['difference']:.1e}; {verdict['rounds']} rounds, accuracy {verdict['accuracy']:.1%}",
        verdict["equals_whole_batch"] and bool(verdict["rounds"]),
    )


def server_killed(plan: Plan) -> Outcome:
    """A kill and restart of the server costs time, but changes no bit of the result."""
    with plan.stack("server-killed") as stack:
        replicas = _begin(stack, plan)
        _wait_for_step(replicas[0], DISTURB_AFTER)
        server = stack.server
        server.kill()
        time.sleep(AWAY_SECONDS / 2)
        stood_at = _step(replicas[0])
        time.sleep(AWAY_SECONDS / 2)
        waited = _step(replicas[0]) == stood_at and all(replica.exit_code is None for replica in replicas)
        server.start()
        verdict = _verdict(stack, plan)
    same = verdict["bits"] == plan.bits
    return Outcome(
        f"all wait {AWAY_SECONDS:g} s for the server; the same bits as undisturbed",
        f"{'waited' if waited else 'did not wait'} at step {stood_at}; {'the same' if same else 'other'} bits, "
        f"differs from whole batch by {verdict['difference']:.1e}",
        waited and same and verdict["equals_whole_batch"],
    )


def replica_killed(plan: Plan) -> Outcome:
    """All other replicas fail with an error that names the lost rank."""
    with plan.stack("replica-killed") as stack:
        replicas = _begin(stack, plan)
        _wait_for_step(replicas[0], DISTURB_AFTER)
        replicas[VICTIM].kill()
        others = _without_victim(replicas)
        seconds = _wait_for_end(others, KNOWN_SECONDS)
        named = sum(map(_names_the_victim, others))
    return Outcome(
        f"the other {len(others)} name rank {VICTIM} and fail within {KNOWN_SECONDS:g} s",
        f"{named} name it; all had failed after {seconds:.1f} s",
        named == len(others) and seconds <= KNOWN_SECONDS,
    )


def network_cut(plan: Plan) -> Outcome:
    """All other replicas fail with an error that names the cut-off rank, which fails at its own deadline."""
    limit = plan.deadline + KNOWN_SECONDS
    with plan.stack("network-cut") as stack:
        replicas = _begin(stack, plan)
        _wait_for_step(replicas[0], DISTURB_AFTER)
        replicas[VICTIM].disconnect(stack.network)
        others = _without_victim(replicas)
        seconds = _wait_for_end(others, limit)
        named = sum(map(_names_the_victim, others))
        # The victim may wait for its peers in gloo for one deadline, and then for the server for another.
        alone = seconds + _wait_for_end([replicas[VICTIM]], plan.deadline * 2 + LEAVE_SECONDS)
    return Outcome(
        f"the other {len(others)} name rank {VICTIM} and fail within {limit:g} s; rank {VICTIM} fails too",
        f"{named} name it; all had failed after {seconds:.1f} s, rank {VICTIM} after {alone:.1f} s",
        named == len(others) and seconds <= limit,
    )


SCENARIOS: tuple[Callable[[Plan], Outcome], ...] = (
    server_image,
    server_start,
    strangers_refused,
    undisturbed,
    server_killed,
    replica_killed,
    network_cut,
)


def _begin(stack: Stack, plan: Plan) -> list[Container]:
    stack.compose("up", "--detach", "--no-build", seconds=COME_SECONDS)
    return stack.replicas(plan.replicas, COME_SECONDS)


def _step(replica: Container) -> int:
    return max(map(int, re.findall(r"^step (\d+) of", replica.log(), re.MULTILINE)), default=0)


def _wait_for_step(replica: Container, step: int) -> None:
    def there() -> bool:
        if replica.exit_code is not None:
            raise EngineError(f"expected step {step} of rank 0, but it has ended:\n{_last_lines(replica)}")
        return _step(replica) >= step

    wait_until(there, COME_SECONDS, f"step {step} of rank 0")


def _wait_for_end(replicas: Iterable[Container], seconds: float) -> float:
    """Waits until all replicas have failed; returns the seconds. Raises EngineError if one ends with exit code 0."""
    started = time.monotonic()
    for number, replica in enumerate(replicas):
        left = started + seconds - time.monotonic()
        wait_until(lambda replica=replica: replica.exit_code is not None, left, f"the end of {number + 1} replicas")
        if replica.exit_code == 0:
            raise EngineError(f"expected a replica to fail, but it ended with exit code 0:\n{_last_lines(replica)}")
    return time.monotonic() - started


def _verdict(stack: Stack, plan: Plan) -> dict[str, Any]:
    """Waits until all replicas have ended with exit code 0, and returns the output of `verdict.py`."""
    replicas = stack.replicas(plan.replicas, COME_SECONDS)
    for rank, replica in enumerate(replicas):
        wait_until(lambda replica=replica: replica.exit_code is not None, TRAIN_SECONDS, f"the end of rank {rank}")
        if replica.exit_code:
            raise EngineError(f"rank {rank} ended with exit code {replica.exit_code}:\n{_last_lines(replica)}")
    isolated = ["run", "--rm", "--network", "none", "--volume", f"{stack.results}:/results:ro"]
    verdict = ["--entrypoint", "python", REPLICA_IMAGE, "/app/docker/verdict.py", "/results/trained.pt"]
    found: dict[str, Any] = json.loads(docker(*isolated, *verdict, seconds=TRAIN_SECONDS))
    return found


def _names_the_victim(replica: Container) -> bool:
    return bool(re.search(rf"ReplicaLost: .*rank {VICTIM} \(", replica.log()))


def _without_victim(replicas: list[Container]) -> list[Container]:
    return [replica for rank, replica in enumerate(replicas) if rank != VICTIM]


def _last_lines(replica: Container) -> str:
    return "\n".join(replica.log().splitlines()[-5:])


def _moment(text: str) -> datetime:
    """Returns the time at the start of a text of the engine, in UTC with nanoseconds."""
    return datetime.fromisoformat(text.partition("Z")[0] + "+00:00")
