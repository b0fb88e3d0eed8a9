"""Runs a shell block of the documentation, command by command.

Ports are replaced by free ones. For `torchrun` on one node the Python block before it runs in forked processes; on
several nodes the real command runs. `docker` needs an engine; `test_kubernetes.py` checks `kubectl`.
"""

import argparse
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from documentation.docs_blocks import ROOT, Block, script_before
from documentation.docs_engine import Engine, want_of_engine
from documentation.docs_runner import Run
from server.__main__ import COMMANDS
from support.launched import MARK, free_port, kill_all

SECONDS = 60.0

Words = Sequence[str]

# The project, and the stand-ins for names that a reader's script has.
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "tests")])

ASSIGNMENT = re.compile(r"[A-Z_]+=")


def check_script(words: Words) -> None:
    assert os.access(ROOT / words[0], os.X_OK), f"expected a script at {words[0]}, found none"


def check_files(words: Words, folder: Path) -> None:
    for word in words:
        if word.endswith((".yml", "Dockerfile")):
            assert (ROOT / folder / word).is_file(), f"expected a file {word}"


def torchrun(words: Words) -> argparse.Namespace:
    try:
        return get_args_parser().parse_args(list(words[1:]))
    except SystemExit:
        raise AssertionError(f"torchrun does not understand {shlex.join(words)}") from None


WHAT_TO_DO = "No test can run {command!r} yet: add it to `Shell` in tests/documentation/docs_shell.py"


class Shell:
    """The commands of one block, run in a folder; `run` also ends the servers that they start."""

    def __init__(
        self, block: Block, folder: Path, endpoint: str, environs: Callable[[int], Any], python: Callable[[Run], None]
    ) -> None:
        self._block = block
        self._folder = folder
        self._endpoint = endpoint
        self._environs = environs
        self._python = python
        # A server that a block starts listens where the block's other commands look for it.
        self._bind_environ = {"STATSD_BN_BIND": endpoint}
        self._exported: dict[str, str] = {}
        self._started = ExitStack()
        self._mark = uuid.uuid4().hex
        self._at = Path()
        self._engine: Engine | None = None
        self._wanting: str | None = None
        for name in ("docker", "examples", "scripts"):
            (folder / name).symlink_to(ROOT / name)

    def run(self) -> None:
        """Runs all commands in order; raises AssertionError if one fails, and skips the test if one lacks something."""
        with self._started:
            self._started.callback(kill_all, self._mark)  # the ranks of a launcher that was killed
            for line in self._block.text.replace("\\\n", " ").splitlines():
                self._run_line(shlex.split(line, comments=True))
        if self._wanting:
            pytest.skip(f"{self._block}: {self._wanting}")

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
        return {name: self._reachable(_expanded(value)) for name, value in pairs}

    def _run_command(self, words: list[str], environ: Mapping[str, str]) -> None:
        command = " ".join(words)
        if words[0].startswith("scripts/test"):  # not run: it would run this test again
            check_script(words)
        elif words[:3] == ["python", "-m", "server"] and words[3:] and words[3] in COMMANDS:
            self._finish([sys.executable, *map(self._reachable, words[1:])], {**self._bind_environ, **environ})
        elif words[:3] == ["python", "-m", "server"]:
            self._serve(words[3:], environ)
        elif words[0] == "torchrun":
            self._launch(words, environ)
        elif words[0] == "cd":
            self._at /= words[1]
        elif words[0] == "docker":
            self._contain(words, environ)
        elif words[0] == "kubectl":
            self._command_cluster(words)
        else:
            raise AssertionError(WHAT_TO_DO.format(command=command))

    def _reachable(self, word: str) -> str:
        return self._endpoint if re.fullmatch(r"tcp://.+:\d+|ipc://.+", word) else word

    def _launch(self, words: Words, environ: Mapping[str, str]) -> None:
        options = torchrun(words)
        assert "/" not in options.training_script, WHAT_TO_DO.format(command=" ".join(words))
        script = script_before(self._block, options.training_script)
        nodes = int(options.nnodes.partition(":")[0])
        if nodes == 1:
            environs = [{**one, **environ} for one in self._environs(int(options.nproc_per_node))]
            self._python(Run(script.page, script.line, script.text, str(self._folder), environs))
        else:
            text = f"from documentation.docs_stand_ins import *\n\n{script.text}"
            (self._folder / options.training_script).write_text(text)
            self._launch_nodes(nodes, words, options.rdzv_endpoint, environ)

    def _launch_nodes(self, number: int, words: Words, meeting: str, environ: Mapping[str, str]) -> None:
        assert meeting, f"{self._block}: expected several nodes to have a --rdzv-endpoint"
        here = f"127.0.0.1:{free_port()}"
        arguments = [word.replace(meeting, here) for word in words[1:]]
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        with ThreadPoolExecutor() as agents:
            nodes = [agents.submit(self._finish, command, environ) for _ in range(number)]
        for node in nodes:
            node.result()

    def _contain(self, words: Words, environ: Mapping[str, str]) -> None:
        check_files(words, self._at)
        self._wanting = self._wanting or want_of_engine(words)
        if not self._wanting:
            self._engine = self._engine or self._started.enter_context(Engine(self._folder / "logs"))
            self._engine.run(words, environ, ROOT / self._at)

    def _command_cluster(self, words: Words) -> None:
        applies, creates = words[1:3] == ["apply", "-f"], words[1:4] == ["create", "secret", "generic"]
        assert applies or creates, WHAT_TO_DO.format(command=" ".join(words))
        check_files(words, self._at)
        for file in (word.partition("=")[2] for word in words if word.startswith("--from-file=")):
            assert (self._folder / file).is_file(), f"expected the block to make a file {file}"
        if creates and shutil.which("kubectl") is None:
            self._wanting = "needs kubectl"
        elif creates:
            self._finish([*words, "--dry-run=client"], {"HOME": str(self._folder)})

    def _finish(self, command: Words, environ: Mapping[str, str], folder: Path | None = None) -> None:
        process = self._start(command, environ, folder)
        try:
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{shlex.join(command)} ended with {process.returncode}:\n{output}"

    def _serve(self, words: Words, environ: Mapping[str, str]) -> None:
        free = [re.sub(r":\d+$", ":*", word) for word in words]
        process = self._started.enter_context(self._start([sys.executable, "-m", "server", *free], environ))
        self._started.callback(process.kill)  # does nothing if the process has ended
        output = []
        for line in process.stdout:
            output.append(line)
            if line.startswith("listening on "):
                break
        else:
            raise AssertionError(f"{shlex.join(words)} starts no server:\n{''.join(output)}")
        self._started.callback(_end, process)
        self._endpoint = line.split()[-1]
        self._bind_environ = {}

    def _start(self, command: Words, environ: Mapping[str, str], folder: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=folder or self._folder,
            env={
                **os.environ,
                "PYTHONPATH": PYTHONPATH,
                "XDG_RUNTIME_DIR": str(self._folder),
                MARK: self._mark,
                **environ,
            },
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


def _expanded(value: str) -> str:
    if not value.startswith("$("):
        return value
    command = ["bash", "-c", f'printf %s "{value}"']
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
