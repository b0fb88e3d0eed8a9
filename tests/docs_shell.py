"""Runs a shell block of the documentation, command by command.

Ports are replaced by free ones. `torchrun` with a script in no folder, such as train.py, runs the Python block before
it in as many processes. They are forked from one that has loaded torch, since torchrun's own would load it for seconds
each; tests/test_lightning.py and others run the real one. What does not run at all stands in `NOT_RUN`, with what is
checked of it instead.
"""

import argparse
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch.distributed.run import get_args_parser

from docs_blocks import ROOT, Block, script_before
from docs_runner import Run
from server.__main__ import COMMANDS

SECONDS = 60.0

Words = Sequence[str]

ASSIGNMENT = re.compile(r"[A-Z_]+=")


def check_extras(words: Words) -> None:
    """Every extra that is to be installed is one of the project's."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for word in words for found in re.findall(r"\[(.*?)\]", word) for name in found.split(",")]
    assert set(named) <= set(extras), f"expected extras of {sorted(extras)}, got {named}"


def check_script(words: Words) -> None:
    """The script is there."""
    assert os.access(ROOT / words[0], os.X_OK), f"expected a script at {words[0]}, found none"


def check_files(words: Words) -> None:
    """Each file that is named is there, from the root or from docker/."""
    for word in words:
        if word.endswith((".yml", "Dockerfile")):
            assert any((ROOT / folder / word).is_file() for folder in (".", "docker")), f"expected a file {word}"


def check_torchrun(words: Words) -> None:
    """Torchrun would understand it, and a script of the project is there."""
    script = torchrun(words).training_script
    assert "/" not in script or (ROOT / script).is_file(), f"expected a script at {script}, found none"


def torchrun(words: Words) -> argparse.Namespace:
    """Returns torchrun's arguments."""
    try:
        return get_args_parser().parse_args(list(words[1:]))
    except SystemExit:
        raise AssertionError(f"torchrun does not understand {shlex.join(words)}") from None


# By a pattern of the command: why it is not run, and what is checked.
NOT_RUN: dict[str, tuple[str, Callable[[Words], None]]] = {
    "pip install ": ("it would change the machine, and needs a package index", check_extras),
    "scripts/demo": ("tests/test_examples.py runs the demo", check_script),
    "scripts/test": ("it runs this very test", check_script),
    "torchrun .*--nnodes": ("it needs several hosts", check_torchrun),
    "torchrun .*examples/": ("tests/test_accelerate.py runs the one, others the other", check_torchrun),
    "docker ": ("it needs a container engine; docker/harness runs the images", check_files),
    "kubectl ": ("it needs a cluster; tests/test_kubernetes.py holds the manifests against their schema", check_files),
    "cd docker": ("what follows in the block is not run either", lambda _: None),
}

WHAT_TO_DO = (
    "Nobody knows how to run {command!r} in a test. If it can run, teach `Shell` in tests/docs_shell.py to; "
    "else give `NOT_RUN` there the reason, and a check of what would go wrong most easily"
)


class Shell:
    """Runs the commands of one block; leaving it ends the servers that it has started.

    Args:
        block: the block.
        folder: the working directory, which keeps what the block makes.
        endpoint: of a running server, for a block that speaks to one without starting it.
        environs: gives the environments of so many processes.
        python: runs a Python block.
    """

    def __init__(
        self, block: Block, folder: Path, endpoint: str, environs: Callable[[int], Any], python: Callable[[Run], None]
    ) -> None:
        self._block = block
        self._folder = folder
        self._endpoint = endpoint
        self._environs = environs
        self._python = python
        self._exported: dict[str, str] = {}
        self._servers = ExitStack()
        for name in ("docker", "examples", "scripts"):
            (folder / name).symlink_to(ROOT / name)

    def run(self) -> None:
        """Runs all commands in their order; raises AssertionError if one fails."""
        with self._servers:
            for line in self._block.text.replace("\\\n", " ").splitlines():
                self._run_line(shlex.split(line, comments=True))

    def _run_line(self, words: list[str]) -> None:
        if words[:1] == ["export"]:
            self._exported |= self._assigned(words[1:])
            return
        command = list(itertools.dropwhile(ASSIGNMENT.match, words))
        if command:
            own = self._assigned(words[: len(words) - len(command)])
            self._run_command([word for word in command if word != "&"], {**self._exported, **own})

    def _assigned(self, words: Words) -> dict[str, str]:
        pairs = (word.split("=", 1) for word in words)
        return {name: self._reachable(value) for name, value in pairs}

    def _run_command(self, words: list[str], environ: Mapping[str, str]) -> None:
        command = " ".join(words)
        for pattern, (_, check) in NOT_RUN.items():
            if re.match(pattern, command):
                check(words)
                return
        if words[:3] == ["python", "-m", "server"] and words[3] in COMMANDS:
            self._finish([sys.executable, *map(self._reachable, words[1:])], environ)
        elif words[:3] == ["python", "-m", "server"]:
            self._serve(words[3:], environ)
        elif words[0] == "torchrun":
            self._launch(words, environ)
        else:
            raise AssertionError(WHAT_TO_DO.format(command=command))

    def _reachable(self, word: str) -> str:
        return self._endpoint if re.fullmatch(r"tcp://.+:\d+", word) else word

    def _launch(self, words: Words, environ: Mapping[str, str]) -> None:
        options = torchrun(words)
        assert "/" not in options.training_script, WHAT_TO_DO.format(command=" ".join(words))
        script = script_before(self._block)
        environs = [{**one, **environ} for one in self._environs(int(options.nproc_per_node))]
        self._python(Run(script.page, script.line, script.text, str(self._folder), environs))

    def _finish(self, command: Words, environ: Mapping[str, str]) -> None:
        process = self._start(command, environ)
        try:
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{shlex.join(command)} ended with {process.returncode}:\n{output}"

    def _serve(self, words: Words, environ: Mapping[str, str]) -> None:
        free = [re.sub(r":\d+$", ":*", word) for word in words]
        process = self._servers.enter_context(self._start([sys.executable, "-m", "server", *free], environ))
        self._servers.callback(process.kill)  # after an orderly end it does nothing
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("listening on "):
                break
        else:
            raise AssertionError(f"{shlex.join(words)} starts no server:\n{''.join(said)}")
        self._servers.callback(_end, process)
        self._endpoint = line.split()[-1]

    def _start(self, command: Words, environ: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        code = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert code == 0, f"the server ended with {code}"
