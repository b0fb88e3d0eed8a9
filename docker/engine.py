"""The container engine, through its command line: `docker`, and Compose of either generation."""

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FOLDER = Path(__file__).parent

# No command but a build takes long; one that does is an engine that hangs.
COMMAND_SECONDS = 120.0
BUILD_SECONDS = 1800.0

# How often an engine is asked what has become of a container.
LOOK_SECONDS = 0.2

# Made by `bootstrap-engine`.
LOCAL_BASE_IMAGE = "statsd-bn-base:bookworm"


class EngineError(Exception):
    """A command failed, or what was waited for did not come; the message has what was said."""


def docker(*arguments: str, seconds: float = COMMAND_SECONDS, environ: Mapping[str, str] | None = None) -> str:
    """Runs `docker ARGUMENTS` and returns what it printed.

    Raises:
        EngineError: it failed, or took longer than `seconds`.
    """
    return run(["docker", *arguments], seconds, environ)


def run(command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None) -> str:
    """Runs a command and returns what it printed, without its complaints.

    Raises:
        EngineError: it failed, or took longer than `seconds`.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**os.environ, **(environ or {})},
            check=False,
        )
    except FileNotFoundError as error:
        raise EngineError(f"expected the program {command[0]}, found none") from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{shlex.join(command)}: not done within {seconds:g} s") from error
    if done.returncode:
        raise EngineError(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def compose_command() -> list[str]:
    """Returns how Compose is called here: as COMPOSE says, else version 2, else docker-compose 1.29.

    Raises:
        EngineError: there is none.
    """
    candidates = [os.environ["COMPOSE"]] if os.environ.get("COMPOSE") else ["docker compose", "docker-compose"]
    reasons = []
    for candidate in candidates:
        command = shlex.split(candidate)
        try:
            run([*command, "version"], COMMAND_SECONDS)
        except EngineError as error:
            reasons.append(str(error))
        else:
            return command
    raise EngineError("expected Compose, as `docker compose` or `docker-compose`, found none:\n" + "\n".join(reasons))


def build_settings() -> dict[str, str]:
    """Returns what the images are built from: as the environment says, else from what is on this machine."""
    found = {}
    if docker("images", "--quiet", LOCAL_BASE_IMAGE).strip():
        found["BASE_IMAGE"] = LOCAL_BASE_IMAGE
    if any((FOLDER / "wheels").glob("*.whl")):
        found["BUILD_NETWORK"] = "none"
    return {**found, **{name: os.environ[name] for name in found if os.environ.get(name)}}


@dataclass(frozen=True, slots=True)
class Container:
    """A container, named by its id."""

    id: str

    @property
    def state(self) -> dict[str, Any]:
        """As the engine tells it: `Running`, `ExitCode`, `StartedAt`, `Health` and more."""
        found: dict[str, Any] = json.loads(docker("inspect", "--format", "{{json .State}}", self.id))
        return found

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        state = self.state
        return None if state["Running"] else state["ExitCode"]

    def log(self, *options: str) -> str:
        """Returns what it has said, complaints included."""
        return run(["sh", "-c", 'docker logs "$@" 2>&1', "sh", *options, self.id], COMMAND_SECONDS)

    def execute(self, *command: str) -> str:
        """Runs a command in it, and returns what that printed."""
        return docker("exec", self.id, *command)

    def kill(self) -> None:
        """Ends it at once, as the end of its host would."""
        docker("kill", self.id)

    def start(self) -> None:
        """Starts it again."""
        docker("start", self.id)

    def disconnect(self, network: str) -> None:
        """Takes its network away; it goes on running."""
        docker("network", "disconnect", "--force", network, self.id)


class Stack:
    """One life of `docker-compose.yml`; a context manager, that keeps the logs and leaves nothing behind.

    Args:
        compose: how Compose is called.
        files: the compose files.
        name: of the Compose project.
        settings: the variables of the compose files.
        logs: where to keep what the containers say.
    """

    def __init__(
        self, compose: Sequence[str], files: Iterable[Path], name: str, settings: Mapping[str, str], logs: Path
    ) -> None:
        options = [word for file in files for word in ("--file", str(file))]
        self._compose = [*compose, *options, "--project-name", name]
        self._name = name
        self._settings = settings
        self._logs = logs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._keep_logs()
        finally:
            self.compose("down", "--volumes", "--timeout", "1")

    def compose(self, *arguments: str, seconds: float = COMMAND_SECONDS) -> str:
        """Runs a command of Compose."""
        return run([*self._compose, *arguments], seconds, self._settings)

    @property
    def network(self) -> str:
        """The name of the network that all containers share."""
        return f"{self._name}_statistics"

    @property
    def results(self) -> str:
        """The name of the volume with what the replicas leave."""
        return f"{self._name}_results"

    @property
    def server(self) -> Container:
        """The server's container."""
        return self.containers("server")[0]

    def visit(self, image: str, *command: str, with_key: bool = False) -> str:
        """Runs Python in a container of its own on the network, and returns what it printed.

        Args:
            image: what it is made of.
            command: Python's arguments.
            with_key: whether it has the replicas' secret key, at /keys/replica.key_secret.
        """
        keys = ["--volume", f"{self._name}_client-keys:/keys:ro"] if with_key else []
        # Without a key it asks all the same, and the server has to refuse it.
        keys += ["--env", "STATSD_BN_INSECURE=1"]
        return docker("run", "--rm", "--network", self.network, *keys, "--entrypoint", "python", image, *command)

    def replicas(self, number: int, seconds: float) -> list[Container]:
        """Returns the replicas by rank, as soon as all have told theirs."""
        found: dict[int, Container] = {}

        def all_there() -> bool:
            for container in self.containers("replica"):
                if told := re.search(r"^rank (\d+) of", container.log(), re.MULTILINE):
                    found[int(told[1])] = container
            return len(found) == number

        wait_until(all_there, seconds, f"{number} replicas that say their rank")
        return [found[rank] for rank in range(number)]

    def containers(self, service: str) -> list[Container]:
        """Returns those of a service, whether they run or not."""
        # Both generations label alike; their container names differ.
        labels = [f"com.docker.compose.project={self._name}", f"com.docker.compose.service={service}"]
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        return [Container(name) for name in docker("ps", "--all", "--quiet", *filters).split()]

    def _keep_logs(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        for service in ("keygen", "server", "replica"):
            for container in self.containers(service):
                told = re.search(r"^rank (\d+) of", container.log(), re.MULTILINE)
                name = f"{service}-{told[1]}" if told else f"{service}-{container.id}"
                text = container.log("--timestamps") + json.dumps(container.state, indent=2)
                (self._logs / f"{name if service == 'replica' else service}.log").write_text(text + "\n")


def wait_until(reached: Any, seconds: float, what: str) -> None:
    """Waits until `reached()` is true.

    Raises:
        EngineError: it was not within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() >= deadline:
            raise EngineError(f"expected {what} within {seconds:g} s")
        time.sleep(LOOK_SECONDS)
