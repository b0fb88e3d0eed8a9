"""Runs the documentation's `docker` commands with a container engine, if STATSD_BN_TEST_ENGINE is 1."""

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Self

from support.paths import ROOT

FOLDER = ROOT / "docker"

# Limit of a training in eight containers on two cores, after all images were pulled.
TRAINING_SECONDS = 600.0

ASKED_FOR_BY = "STATSD_BN_TEST_ENGINE"


def script(name: str) -> ModuleType:
    """Imports a script of `docker/`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def want_of_engine(words: Sequence[str] = ()) -> str | None:
    """Why a command cannot run here, or None."""
    if os.environ.get(ASKED_FOR_BY) != "1":
        return f"runs only with {ASKED_FOR_BY}=1"
    if shutil.which("docker") is None:
        return "needs a container engine; docker/bootstrap-engine gives one"
    if any("gpu" in word for word in words) and shutil.which("nvidia-container-cli") is None:
        return "needs the NVIDIA container toolkit, and devices"
    if "monitoring" in words:
        return "needs an image registry, for Prometheus and Grafana"
    return None


class Engine:
    def __init__(self, logs: Path) -> None:
        self._scripts = script("engine")
        project = f"statsd-bn-docs-{os.getpid()}"
        self._settings = {**self._scripts.build_settings(), "COMPOSE_PROJECT_NAME": project}
        self._compose = self._scripts.compose_command()
        files = [FOLDER / "docker-compose.yml"]
        self._stack = self._scripts.Stack(self._compose, files, project, self._settings, logs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)

    def run(self, words: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        environ = {**os.environ, **self._settings, **environ}
        command = [*self._compose, *words[2:]] if words[1] == "compose" else list(words)
        if words[1] == "build":
            command[2:2] = self._build_arguments()
        if words[1] == "compose" and "up" in words:
            self._up(command, environ, folder)
        else:
            subprocess.run(command, cwd=folder, env=environ, check=True, timeout=self._scripts.BUILD_SECONDS)

    def _build_arguments(self) -> Iterator[str]:
        """The build arguments that the compose file derives from the same settings."""
        if base := self._settings.get("BASE_IMAGE"):
            yield from ("--build-arg", f"BASE_IMAGE={base}")
        if network := self._settings.get("BUILD_NETWORK"):
            yield from ("--network", network)

    def _up(self, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        """Waits until every replica has trained and exited with 0, and then presses Ctrl-C, as a person would."""
        number = int(environ.get("REPLICAS", "4"))
        start_time = datetime.now(UTC).isoformat()
        process = subprocess.Popen(command, cwd=folder, env=environ, stdin=subprocess.DEVNULL)

        def ended() -> list[int]:
            found = []
            for container in self._stack.containers("replica"):
                with suppress(self._scripts.EngineError):  # a container of the previous run may be in removal
                    found.append(container.state)
            return [one["ExitCode"] for one in found if one["StartedAt"] > start_time and not one["Running"]]

        try:
            self._scripts.wait_until(
                lambda: process.poll() is not None or len(ended()) == number,
                TRAINING_SECONDS,
                f"{number} replicas that have ended",
            )
            codes = ended()
            assert codes == [0] * number, f"expected {number} replicas that end with 0, got {codes}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(self._scripts.COMMAND_SECONDS)
