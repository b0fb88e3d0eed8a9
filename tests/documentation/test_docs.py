"""Every code block of docs/ runs, and every link there and in README.md leads somewhere.

A Python block runs as it stands, in as many processes as it names, with the names of `docs_stand_ins.py` and the tests'
own server; a shell block runs by `docs_shell.py`. `test_readme.py` runs README.md's blocks.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator

import pytest

from documentation.docs_blocks import PAGES, README, ROOT, Block, all_blocks
from documentation.docs_engine import want_of_engine
from documentation.docs_runner import Run, Runner
from documentation.docs_shell import Shell
from support.launched import free_port
from support.newer_torch import skip_if_one_is_missing, skip_without_its_library

# Without README.md, which `test_readme.py` runs, and without blocks with "bn.socket", which need README's script.
BLOCKS = [block for block in all_blocks() if ROOT / block.page != README and "bn.socket" not in block.text]

# Why a page has blocks without a language, which do not run.
NOTHING_TO_RUN = {
    "docs/architecture.md": "a drawing that tests/documentation/test_architecture_page.py compares with the code",
    "docs/errors.md": "an error as it is printed",
    "docs/getting-started.md": "a status as it is printed",
    "docs/protocol.md": "drawings, and bytes that tests/documentation/test_protocol_doc.py compares with the code's",
}

ENDPOINT = re.compile(r"tcp://[\w.-]+:\d+")


def of(language: str) -> pytest.MarkDecorator:
    """The blocks of a language; those with torchrun on several nodes run the real command, and take long."""
    blocks = [
        pytest.param(block, id=str(block), marks=pytest.mark.long if "torchrun --nnodes=" in block.text else [])
        for block in BLOCKS
        if block.language == language
    ]
    return pytest.mark.parametrize("block", blocks)


def test_every_block_is_tested():
    tested = {"python", "sh", "toml", "text"}  # test_examples.py tests the only "text", the demo's table
    for block in BLOCKS:
        assert block.language in tested or (not block.language and block.page in NOTHING_TO_RUN), (
            f"{block} is in the language {block.language!r}, which has no test. Use one of {sorted(tested)}, add a "
            "test to this file, or say in NOTHING_TO_RUN why there is nothing to test"
        )


@of("python")
def test_a_python_block_runs(block, python, environs, tmp_path, endpoint_of):
    skip_if_one_is_missing(block.text)
    skip_without_its_library(block.text)
    text = ENDPOINT.sub(endpoint_of(block), block.text)
    python(Run(block.page, block.line, text, str(tmp_path), environs(processes_of(block))))


@of("sh")
@pytest.mark.timeout(120 if want_of_engine() else 2400)  # building images takes minutes
def test_a_shell_block_runs(shell, block):
    shell(block).run()


def test_a_python_block_that_fails_is_shown_with_its_line_on_the_page(python, environs, tmp_path):
    broken = Run("docs/page.md", 7, "import client\n\nclient.no_such_name()\n", str(tmp_path), environs(1))
    with pytest.raises(AssertionError, match=r'File "docs/page.md", line 9(.|\n)*no_such_name'):
        python(broken)


@of("toml")
def test_a_toml_block_is_toml(block):
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_existing_files_and_tests(page):
    for target, test in re.findall(r'\]\((?!https?:)([^)#\s]+)(?:#[^)\s]*)?(?: "(test_\w+)")?\)', page.read_text()):
        file = page.parent / target
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        assert not test or f"def {test}(" in file.read_text(), f"{page.name} names {test}, which is not in {target}"


@pytest.mark.parametrize("file", [*PAGES, ROOT / "server" / "__main__.py"], ids=lambda file: file.name)
def test_extras_are_installed_from_a_clone(file):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = file.read_text()
    assert "statsd-bn[" not in text, f"{file.name}: no index has statsd-bn; expected '.[EXTRA]'"
    assert set(re.findall(r"'\.\[(\w+)\]'", text)) <= extras.keys()


@pytest.fixture(scope="module")
def python() -> Iterator[Callable[[Run], None]]:
    with Runner() as runner:

        def run(task: Run) -> None:
            outcome = runner.run(task)
            assert set(outcome.codes) == {0}, (
                f"{task.page}:{task.line} ended with {outcome.codes}. A block runs as it stands; it must define all "
                f"names but those in tests/documentation/docs_stand_ins.py.\n{outcome.output}"
            )

        yield run


@pytest.fixture
def shell(python, environs, server, tmp_path) -> Callable[[Block], Shell]:
    return lambda block: Shell(block, tmp_path, server.endpoint, environs, python)


@pytest.fixture
def environs(job) -> Callable[[int], list[dict[str, str]]]:
    """Returns the environments of a number of processes, as torchrun would set them, on a machine without devices."""

    def of_size(size: int) -> list[dict[str, str]]:
        common = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RUN_ID": job,
            "CUDA_VISIBLE_DEVICES": "",
        }
        return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]

    return of_size


def processes_of(block: Block) -> int:
    """The number of processes that a block names; two if it connects and names none."""
    if match := re.search(r"world_size=(\d+)", block.text):
        return int(match[1])
    return 2 if re.search(r"client\.connect\(|Trainer\(", block.text) else 1


@pytest.fixture
def endpoint_of(server, request) -> Callable[[Block], str]:
    """The endpoint of the server for a block; the server has keys if the block has `curve=`."""
    return lambda block: request.getfixturevalue("closed_server") if "curve=" in block.text else server.endpoint


@pytest.fixture
def closed_server(tmp_path) -> Iterator[str]:
    """The endpoint of a server with keys; alice's key is in the working directory."""
    keys = tmp_path / "keys"
    keygen = [sys.executable, "-m", "server", "keygen", str(keys), "--client", "alice"]
    subprocess.run(keygen, check=True, timeout=30, stdout=subprocess.DEVNULL)
    (tmp_path / "alice.key_secret").write_bytes((keys / "secrets" / "alice.key_secret").read_bytes())
    command = [sys.executable, "-m", "server", "--bind", "tcp://127.0.0.1:*", "--curve", str(keys)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield process.stdout.readline().split()[-1]
        process.terminate()
