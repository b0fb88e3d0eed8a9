"""Every code block of README.md and docs/ runs, and every link leads somewhere.

A Python block runs as it stands, in as many processes as it speaks of, with what `docs_stand_ins.py` lists; what it is
to connect to is the tests' own server. A shell block runs command by command, see `docs_shell.py`.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from docs_blocks import PAGES, ROOT, Block, all_blocks
from docs_runner import Outcome, Run
from docs_shell import Shell
from ports import free_port

BLOCKS = list(all_blocks())

# A language of which nothing is run: drawings, and bytes in protocol.md, have none.
NOTHING_TO_RUN = ""

ENDPOINT = re.compile(r"tcp://[\w.]+:\d+")


def of(language: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == language], ids=str)


def test_every_block_is_in_a_language_that_is_tested():
    tested = {"python", "sh", "toml", NOTHING_TO_RUN}
    for block in BLOCKS:
        assert block.language in tested, (
            f"{block} is in {block.language!r}, of which nothing is tested. Use one of {sorted(tested)}, or add a test "
            "for it to tests/test_docs.py"
        )


@of("python")
def test_a_python_block_runs(block, python, environs, tmp_path, endpoint_of):
    text = ENDPOINT.sub(endpoint_of(block), block.text)
    outcome = python(Run(block.page, block.line, text, str(tmp_path), environs(block)))
    assert set(outcome.codes) == {0}, (
        f"{block} ended with {outcome.codes}. It runs as it stands, with the names that tests/docs_stand_ins.py lists; "
        f"whatever else it uses it must make.\n{outcome.output}"
    )


@of("sh")
def test_a_shell_block_runs(block, server, tmp_path, environ):
    Shell(block, tmp_path, server.endpoint, {**environ, "STATSD_BN_ENDPOINT": server.endpoint}).run()


def test_a_python_block_that_fails_is_shown_with_its_line_on_the_page(python, environs, tmp_path):
    broken = Block("docs/page.md", 7, "python", "import client\n\nclient.no_such_name()\n")
    outcome = python(Run(broken.page, broken.line, broken.text, str(tmp_path), environs(broken)))
    assert outcome.codes == [1]
    assert 'File "docs/page.md", line 9' in outcome.output
    assert "no_such_name" in outcome.output


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("rm -r /", "Nobody knows how to run 'rm -r /' in a test"),
        ("python -m server check --no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("python -m server --log-level loud", "invalid choice: 'loud'"),
        ("pip install 'statsd-bn[everything]'", r"got \['everything'\]"),
        ("docker compose -f no-such.yml up", "expected a file no-such.yml"),
        ("scripts/test-all", "expected a script at scripts/test-all"),
    ],
)
def test_a_command_that_cannot_be_right_fails(tmp_path, environ, command, complaint):
    with pytest.raises(AssertionError, match=complaint):
        Shell(Block("docs/page.md", 7, "sh", command), tmp_path, "tcp://127.0.0.1:1", environ).run()


@of("toml")
def test_a_toml_block_is_toml(block):
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_to_tests_that_are_there(page):
    for target, test in re.findall(r'\]\((?!https?:)([^)#\s]+)(?:#[^)\s]*)?(?: "(test_\w+)")?\)', page.read_text()):
        file = page.parent / target
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        assert not test or f"def {test}(" in file.read_text(), f"{page.name} names {test}, which is not in {target}"


@pytest.fixture(scope="module")
def python() -> Iterator[Callable[[Run], Outcome]]:
    """Runs Python blocks."""
    command = [sys.executable, str(Path(__file__).with_name("docs_runner.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run(told: Run) -> Outcome:
            print(json.dumps(asdict(told)), file=process.stdin, flush=True)
            return Outcome(**json.loads(process.stdout.readline()))

        yield run
        process.kill()


@pytest.fixture
def environ() -> dict[str, str]:
    """What programs get: a machine without devices, on which client, server and the stand-ins can be imported."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def environs(job, server) -> Callable[[Block], list[Mapping[str, str]]]:
    """The environments of a block's processes, as torchrun would set them."""

    def of_block(block: Block) -> list[Mapping[str, str]]:
        size = processes_of(block)
        common = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RUN_ID": job,
            "STATSD_BN_ENDPOINT": server.endpoint,
            "CUDA_VISIBLE_DEVICES": "",
        }
        return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]

    return of_block


def processes_of(block: Block) -> int:
    """As many as it says; two if it connects and says nothing."""
    if said := re.search(r"world_size=(\d+)", block.text):
        return int(said[1])
    return 2 if re.search(r"client\.connect\(|Trainer\(", block.text) else 1


@pytest.fixture
def endpoint_of(server, request) -> Callable[[Block], str]:
    """Where a block is to connect to: a server with keys if it names one."""
    return lambda block: request.getfixturevalue("closed_server") if "curve=" in block.text else server.endpoint


@pytest.fixture
def closed_server(tmp_path) -> Iterator[str]:
    """The endpoint of a server with keys; alice's lies in the working directory."""
    keys = tmp_path / "keys"
    keygen = [sys.executable, "-m", "server", "keygen", str(keys), "--client", "alice"]
    subprocess.run(keygen, check=True, timeout=30, stdout=subprocess.DEVNULL)
    (tmp_path / "alice.key_secret").write_bytes((keys / "secrets" / "alice.key_secret").read_bytes())
    command = [sys.executable, "-m", "server", "--bind", "tcp://127.0.0.1:*", "--curve", str(keys)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield process.stdout.readline().split()[-1]
        process.terminate()
