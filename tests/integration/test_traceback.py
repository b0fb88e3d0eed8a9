"""The error output when ranks run different layers: a short traceback and a table."""

import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.launched import Launched, free_port, made_once
from support.paths import ROOT

pytestmark = pytest.mark.long

PROGRAM = ROOT / "tests" / "programs" / "skipping_program.py"
FRAME = re.compile(r'^  File "(.*?)", line \d+, in (.+)$', re.MULTILINE)
OURS = tuple(f"{ROOT / package}/" for package in ("client", "statsd_bn", "server"))
RANK = re.compile(r"rank \d+ \(")
WHAT = "statsd_bn.errors.RoundMismatch: deadlock: the ranks wait in different places"


@pytest.fixture(scope="module")
def stderr(tmp_path_factory) -> dict[str, str]:
    def run_into_it(folder: Path) -> None:
        # Without a launcher: torchrun might end the slower rank before it has raised.
        environ = {"STATSD_BN_LOG_LEVEL": "info", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, PROGRAM]
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(Launched(command, {**environ, "RANK": rank}, folder / f"errors-{rank}"))
                for rank in "01"
            ]
            assert [rank.end() for rank in ranks] == [1, 1]

    folder = made_once(tmp_path_factory, "traceback", run_into_it)
    return {rank: (folder / f"errors-{rank}").read_text() for rank in "01"}


def traceback_of(text: str) -> str:
    return text[text.index("Traceback (most recent call last):") :]


@pytest.mark.parametrize(("rank", "function"), [("0", "forward"), ("1", "backward")])
def test_a_traceback_shows_one_frame_of_ours_below_the_users_line(stderr, rank, function):
    frames = FRAME.findall(traceback_of(stderr[rank]))
    assert [name for file, name in frames if file.startswith(OURS)] == [function]
    assert [name for file, name in frames if file == str(PROGRAM)] == ["<module>", "main"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_error_has_a_short_first_line_and_a_row_for_each_rank(stderr, rank):
    lines = [line for line in stderr[rank].splitlines() if not line.startswith("20")]  # without lines of logs
    first = lines.index(WHAT)
    assert len(lines[first]) <= 120
    zero, one, where, advice, see = lines[first + 1 : first + 6]
    # Rank 1 skips a layer, so it is already in the backward pass.
    assert re.fullmatch(r"  rank 0 \(.*, pid \d+\)  waits [\d.]+ s  in forward of layer 'second', step 2", zero)
    assert re.fullmatch(r"  rank 1 \(.*, pid \d+\)  waits [\d.]+ s  in backward of layer 'first', step 2", one)
    assert zero.index("waits") == one.index("waits")
    assert where.startswith("  in job '")
    assert advice.startswith("Run the same layers in the same order")
    assert see == "see docs/errors.md#roundmismatch"


def test_the_servers_log_reports_the_deadlock_once(stderr):
    log = [line for line in stderr["0"].splitlines() if line.startswith("20")]
    assert len([line for line in log if "deadlock: the ranks wait" in line]) == 1
    leaving = [line for line in log if line.endswith("leaves after the same RoundMismatch")]
    assert len(leaving) == len({RANK.search(line).group() for line in leaving}) == 2
