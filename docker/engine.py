"""The container engine, through its command line: `docker`, and Compose 1 or 2."""

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

# Timeouts: a command other than a build takes seconds unless the engine hangs.
COMMAND_SECONDS = 120.0
BUILD_SECONDS = 1800.0

# Interval at which `wait_until` checks its condition.
LOOK_SECONDS = 0.2

# Made by `bootstrap-engine`.
LOCAL_BASE_IMAGE = "statsd-bn-base:bookworm"


class EngineError(Exception):
    """A command failed, or a condition was not met in time; the message has the command's output."""


def docker(*arguments: str, seconds: float = COMMAND_SECONDS, environ: Mapping[str, str] | None = None) -> str:
    """Runs `docker ARGUMENTS` and returns its standard output.

    Raises:
        EngineError: it failed, or took longer than `seconds`.
    """
    return run(["docker", *arguments], seconds, environ)


def run(command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None) -> str:
    """Runs a command and returns its standard output.

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
    """Returns the command of Compose on this machine: $COMPOSE, else version 2, else docker-compose 1.29.

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
    """Returns build arguments for a base image and wheels that this machine has; the environment's values win."""
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
        """The state that the engine reports: `Running`, `ExitCode`, `StartedAt`, `Health` and more."""
        found: dict[str, Any] = json.loads(docker("inspect", "--format", "{{json .State}}", self.id))
        return found

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the container runs."""
        state = self.state
        return None if state["Running"] else state["ExitCode"]

    def log(self, *options: str) -> str:
        """Returns the container's output, standard error included."""
        return run(["sh", "-c", 'docker logs "$@" 2>&1', "sh", *options, self.id], COMMAND_SECONDS)

    def execute(self, *command: str) -> str:
        """Runs a command in the container, and returns the command's standard output."""
        return docker("exec", self.id, *command)

    def kill(self) -> None:
        """Kills the container, as a failure of its host would."""
        docker("kill", self.id)

    def start(self) -> None:
        """Starts the container again."""
        docker("start", self.id)

    def disconnect(self, network: str) -> None:
        """Disconnects the running container from a network."""
        docker("network", "disconnect", "--force", network, self.id)


class Stack:
    """A Compose project; a context manager that stores the logs and then removes containers, networks and volumes.

    Args:
        compose: the command of Compose.
        files: the compose files.
        name: name of the Compose project.
        settings: the variables of the compose files.
        logs: folder for the containers' logs.
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
        """The name of the volume for the replicas' results."""
        return f"{self._name}_results"

    @property
    def server(self) -> Container:
        """The server's container."""
        return self.containers("server")[0]

    def visit(self, image: str, *command: str, with_key: bool = False) -> str:
        """Runs Python in a new container on the network, and returns its standard output.

        Args:
            image: the container's image.
            command: Python's arguments.
            with_key: whether to mount the replicas' secret key, at /keys/replica.key_secret.
        """
        keys = ["--volume", f"{self._name}_client-keys:/keys:ro"] if with_key else []
        # Lets a client without a key send its request, which the server must refuse.
        keys += ["--env", "STATSD_BN_INSECURE=1"]
        return docker("run", "--rm", "--network", self.network, *keys, "--entrypoint", "python", image, *command)

    def replicas(self, number: int, seconds: float) -> list[Container]:
        """Returns the replicas in the order of their ranks, once all have printed theirs."""
        found: dict[int, Container] = {}

        def all_there() -> bool:
            for container in self.containers("replica"):
                if line := re.search(r"^rank (\d+) of", container.log(), re.MULTILINE):
                    found[int(line[1])] = container
            return len(found) == number

        wait_until(all_there, seconds, f"{number} replicas that print their rank")
        return [found[rank] for rank in range(number)]

    def containers(self, service: str) -> list[Container]:
        """Returns the containers of a service, whether they run or not."""
        # Both versions of Compose set the same labels, but different container names.
        labels = [f"com.docker.compose.project={self._name}", f"com.docker.compose.service={service}"]
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        return [Container(name) for name in docker("ps", "--all", "--quiet", *filters).split()]

    def _keep_logs(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        for service in ("keygen", "server", "replica"):
            for container in self.containers(service):
                line = re.search(r"^rank (\d+) of", container.log(), re.MULTILINE)
                name = f"{service}-{line[1]}" if line else f"{service}-{container.id}"
                text = container.log("--timestamps") + json.dumps(container.state, indent=2)
                (self._logs / f"{name if service == 'replica' else service}.log").write_text(text + "\n")


def wait_until(reached: Any, seconds: float, what: str) -> None:
    """Waits until `reached()` is true.

    Raises:
        EngineError: it is still false after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() >= deadline:
            raise EngineError(f"expected {what} within {seconds:g} s")
        time.sleep(LOOK_SECONDS)
