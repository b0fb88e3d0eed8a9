"""What the harness does to a training, and what must come of it.

Each scenario takes the plan and says what came of it.

Raises:
    EngineError: it did not come to an end.
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

# What the server's image and its start may cost.
MOST_MEGABYTES = 250
START_SECONDS = 2.0

# How `python -m server status` ends where the server knows no such key.
REFUSED = 5

# Prints the names of the files in /keys that hold secret keys.
LIST_SECRETS = "import pathlib; print(*(path.name for path in pathlib.Path('/keys').rglob('*.key_secret')))"

# Importing torch in all replicas at once takes a busy machine a minute.
COME_SECONDS = 240.0
TRAIN_SECONDS = 600.0

# Something is done to the training once rank 0 has come this far, which is before the step of comparison.
DISTURB_AFTER = 20

# How long the server stays away: longer than a silence that costs a member its place.
AWAY_SECONDS = 5.0

# Beyond its deadline a member waits a moment for the server to end a round, then for its sockets to close, and then
# Python has to show the error.
LEAVE_SECONDS = 15.0

# The one that something is done to. Not 0, which says how it goes.
VICTIM = 2

# A replica that was killed is known within a second, one that is cut off after 3.5 s, and whoever waits in gloo at that
# moment learns it there: at once from a killed one, at the deadline from one that is cut off.
KNOWN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a scenario, in words, and whether that is what was expected."""

    expected: str
    got: str
    ok: bool


@dataclass(slots=True)
class Plan:
    """How to run the scenarios.

    Attributes:
        replicas: how many there are.
        deadline: how long one waits for another, in seconds.
        stack: makes the containers of the scenario that is named.
        bits: of the undisturbed training's result, once there is one.
    """

    replicas: int
    deadline: float
    stack: Callable[[str], Stack]
    bits: str = field(default="")


def server_image(_: Plan) -> Outcome:
    """The server's image is small, and holds no torch and no root."""
    size = int(docker("image", "inspect", "--format", "{{.Size}}", SERVER_IMAGE)) / 1e6
    look = "import importlib.util as i, os; print(os.getuid(), i.find_spec('torch') is not None)"
    uid, has_torch = docker("run", "--rm", "--entrypoint", "python", SERVER_IMAGE, "-c", look).split()
    return Outcome(
        f"< {MOST_MEGABYTES} MB, no torch, not root",
        f"{size:.0f} MB, {'torch' if has_torch == 'True' else 'no torch'}, uid {uid}",
        size < MOST_MEGABYTES and has_torch == "False" and uid != "0",
    )


def server_start(plan: Plan) -> Outcome:
    """The server listens soon after its container was started, with a root file system that it cannot write to."""
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
    """Whoever reaches the server without a key is refused, and no side can read the other's secret."""
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
        "without a key: refused; with one: answered; each side has its own secret alone",
        f"{stranger.splitlines()[0]}; {member.splitlines()[0]}; {', '.join([*of_server, *of_client])}",
        stranger == "refused" and member.startswith("server ") and separate,
    )


def undisturbed(plan: Plan) -> Outcome:
    """The result is the whole batch's."""
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
    """A server that is killed and comes back costs time, and not a bit."""
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
        f"all wait {AWAY_SECONDS:g} s for it; the same bits as undisturbed",
        f"{'waited' if waited else 'did not wait'} at step {stood_at}; {'the same' if same else 'other'} bits, "
        f"differs from whole batch by {verdict['difference']:.1e}",
        waited and same and verdict["equals_whole_batch"],
    )


def replica_killed(plan: Plan) -> Outcome:
    """All others fail, and say whom they have lost."""
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
    """All others fail, and say whom they have lost; the one that is cut off fails too, at its deadline."""
    limit = plan.deadline + KNOWN_SECONDS
    with plan.stack("network-cut") as stack:
        replicas = _begin(stack, plan)
        _wait_for_step(replicas[0], DISTURB_AFTER)
        replicas[VICTIM].disconnect(stack.network)
        others = _without_victim(replicas)
        seconds = _wait_for_end(others, limit)
        named = sum(map(_names_the_victim, others))
        # It may wait for its peers in gloo, and then for the server that is to name them.
        alone = seconds + _wait_for_end([replicas[VICTIM]], plan.deadline * 2 + LEAVE_SECONDS)
    return Outcome(
        f"the other {len(others)} name rank {VICTIM} and fail within {limit:g} s; it fails too",
        f"{named} name it; all had failed after {seconds:.1f} s, it after {alone:.1f} s",
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
    """Returns after how many seconds all had ended, each with an exit code other than 0."""
    started = time.monotonic()
    for number, replica in enumerate(replicas):
        left = started + seconds - time.monotonic()
        wait_until(lambda replica=replica: replica.exit_code is not None, left, f"the end of {number + 1} replicas")
        if replica.exit_code == 0:
            raise EngineError(f"expected a replica to fail, but it ended with exit code 0:\n{_last_lines(replica)}")
    return time.monotonic() - started


def _verdict(stack: Stack, plan: Plan) -> dict[str, Any]:
    """Waits until all replicas have ended well, and returns what `verdict.py` says of their result."""
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
    """Reads the engine's time, UTC with nanoseconds, at the beginning of a text."""
    return datetime.fromisoformat(text.partition("Z")[0] + "+00:00")
