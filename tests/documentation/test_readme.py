"""README.md, as a newcomer follows it: each script and command alone, exactly as printed, in an empty folder.

The line before a script names its file. Commands start real processes, and only the package is on the path.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

import client
from documentation.docs_blocks import README, ROOT, Block, blocks_of
from support.launched import MARK, PATIENT, PROC, end_all, free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

BLOCKS = blocks_of(README)
SCRIPTS = {re.findall(r"`(\w+\.py)`", block.before)[-1]: block for block in BLOCKS if block.language == "python"}
# Commands in a line of text, and the block of docs/seeing.md that trains README's script.
INLINE = [
    Block("README.md", 0, "sh", f"{command}\n")
    for command in re.findall(r"`((?:torchrun|python) [^`]*\.py)`", README.read_text())
]
MONITORING = [block for block in blocks_of(ROOT / "docs" / "seeing.md") if "train.py" in block.text]
SHELL = [*(block for block in BLOCKS if block.language == "sh"), *INLINE, *MONITORING]
DIFFS = [block for block in BLOCKS if block.language == "diff"]

# Variables that give a process its rank, job or address; a newcomer's shell has none of them.
FOREIGN = re.compile(r"STATSD_BN_|SLURM_|TORCHELASTIC_|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)$")

MOST_LINES = 120
SECONDS = 200.0


def files_of(block: Block) -> list[str]:
    return [name for name in SCRIPTS if name in block.text]


def block_with(command: str) -> Block:
    (found,) = [block for block in SHELL if command in block.text]
    return found


class Bash:
    def __init__(self, block: Block, **variables: str) -> None:
        # The path of a socket has at most 107 bytes, and pytest's folders alone may be longer.
        self.folder = Path(tempfile.mkdtemp(prefix="readme-"))
        for name in files_of(block):
            (self.folder / name).write_text(SCRIPTS[name].text)
        own = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(self.folder),
            "CUDA_VISIBLE_DEVICES": "",
            "PET_MASTER_PORT": str(free_port("")),  # torchrun's default port may be in use; it binds all addresses
            MARK: self.folder.name,
            **variables,
        }
        self.lines: list[str] = []
        self._more = threading.Condition()
        self.process = subprocess.Popen(
            ["bash", "-c", block.text],  # noqa: S607 - systems have bash in different places
            cwd=self.folder,
            env={name: value for name, value in os.environ.items() if not FOREIGN.match(name)} | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line)
                self._more.notify_all()

    def until(self, pattern: str) -> re.Match[str]:
        with self._more:
            found = self._more.wait_for(lambda: re.search(pattern, "".join(self.lines)), SECONDS)
        assert found, f"expected {pattern!r} in the output of the block:\n{''.join(self.lines)}"
        return found

    def done(self) -> str:
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        output = "".join(self.lines)
        assert code == 0, f"the block ended with {code}:\n{output}"
        return output

    def close(self) -> None:
        """Kill all processes of the block: its session, and the ranks in torchrun's sessions."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        end_all(self.folder.name, self.process, self._reader)
        self.process.stdout.close()
        shutil.rmtree(self.folder)


@pytest.fixture
def bash() -> Iterator[Callable[..., Bash]]:
    with ExitStack() as ending:

        def start(block: Block, **variables: str) -> Bash:
            shell = Bash(block, **variables)
            ending.callback(shell.close)
            return shell

        yield start


def test_the_readme_is_within_its_line_limit():
    assert len(README.read_text().splitlines()) <= MOST_LINES


def test_every_block_is_a_script_or_a_command_and_every_script_is_run():
    assert {block.language for block in BLOCKS} == {"python", "sh", "diff"}
    assert len(SCRIPTS) == sum(block.language == "python" for block in BLOCKS)
    assert {name for block in SHELL for name in files_of(block)} == set(SCRIPTS)


@pytest.mark.parametrize("block", DIFFS, ids=lambda block: block.line)
def test_a_diff_has_at_most_five_new_lines_of_python_that_use_public_names(block):
    added = [line[1:] for line in block.text.splitlines() if not line.startswith("-")]
    assert len(added) <= 5
    compile("\n".join(added), README, "exec")
    names = set(re.findall(r"client\.(\w+)", block.text))
    assert names
    assert names <= set(client.__all__)


def test_the_two_commands_are_existing_scripts():
    commands = [line.split()[0] for line in block_with("scripts/demo").text.splitlines()]
    assert commands == ["scripts/demo", "scripts/test"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


def test_the_script_for_torchrun_trains(bash):
    # On a busy machine a rank may be silent for longer than the default of 3.5 s, and the other would get ReplicaLost.
    output = bash(block_with("torchrun --nproc-per-node 2 train.py\n"), **PATIENT).done()
    steps = int(re.search(r"after (\d+) steps", output)[1])
    for rank in range(2):
        assert re.search(rf"rank {rank}: loss [\d.]+ after {steps} steps and {2 * steps} rounds", output)


def test_the_script_for_data_parallel_trains(bash):
    assert re.search(r"loss [\d.]+, gradient [\d.]+", bash(block_with("python replicas.py")).done())


@pytest.mark.skipif(not (PROC / "self/environ").exists(), reason="finds processes by /proc")
def test_a_process_that_a_block_leaves_running_delays_no_test():
    with closing(Bash(Block("README.md", 0, "sh", "setsid sleep 1000 & echo begun"))) as shell:
        shell.until("begun")
    assert not shell._reader.is_alive()


def test_a_stopped_rank_is_found_as_the_page_says(bash):
    shell = bash(block_with("python -m server status"))
    pid = int(shell.until(r"\d+ rounds done(?:.|\n)*\n +1 +\d.*  \S+,\s+pid\s+(\d+)")[1])
    os.kill(pid, signal.SIGSTOP)
    shell.until(rf"rank 1 \(\S+, pid {pid}\) is lost: no sign of life for [\d.]+ s")
    # The other rank raises if it waits in a layer, and aborts if it waits in a collective.
    shell.until(rf"(ReplicaLost|aborting)\b.*rank 1 \(\S+, pid {pid}\)")
