"""What somebody sees whose ranks do not run the same layers, under torchrun: a short traceback, and a table."""

import re
import sys
from pathlib import Path

import pytest

from support.launched import Launched
from support.made_once import made_once
from support.paths import ROOT

pytestmark = pytest.mark.long

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PROGRAM = ROOT / "tests" / "programs" / "skipping_program.py"
FRAME = re.compile(r'^  File "(.*?)", line \d+, in (.+)$', re.MULTILINE)
OURS = tuple(f"{ROOT / package}/" for package in ("client", "statsd_bn", "server"))
RANK = re.compile(r"rank \d+ \(")
WHAT = "statsd_bn.errors.RoundMismatch: the ranks wait for one another in different places, so nobody can go on"


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, str]:
    """The error output of each rank; the server's is rank 0's."""

    def run_into_it(folder: Path) -> None:
        options = ["--nproc-per-node", "2", "--redirects", "3", "--log-dir", folder / "logs"]
        environ = {"STATSD_BN_LOG_LEVEL": "info", "PYTHONPATH": str(ROOT)}
        with Launched([*TORCHRUN, *options, PROGRAM], environ, folder / "errors") as run:
            assert run.end() == 1

    folder = made_once(tmp_path_factory, "traceback", run_into_it)
    return {path.parent.name: path.read_text() for path in (folder / "logs").rglob("stderr.log")}


def traceback_of(text: str) -> str:
    """From its head to the end."""
    return text[text.index("Traceback (most recent call last):") :]


@pytest.mark.parametrize(("rank", "function"), [("0", "forward"), ("1", "backward")])
def test_a_traceback_shows_one_frame_of_ours_below_the_users_line(told, rank, function):
    frames = FRAME.findall(traceback_of(told[rank]))
    assert [name for file, name in frames if file.startswith(OURS)] == [function]
    assert [name for file, name in frames if file == str(PROGRAM)] == ["<module>", "main"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_short_line_says_what_and_a_row_for_each_rank_who_waits_where(told, rank):
    lines = [line for line in told[rank].splitlines() if not line.startswith("20")]  # of the server's log
    first = lines.index(WHAT)
    assert len(lines[first]) <= 120
    zero, one, where, advice, see = lines[first + 1 : first + 6]
    # Rank 1 is done with a layer less: it is in the backward pass already.
    assert re.fullmatch(r"  rank 0 \(.*, pid \d+\)  waits [\d.]+ s  in forward of second, step 2", zero)
    assert re.fullmatch(r"  rank 1 \(.*, pid \d+\)  waits [\d.]+ s  in backward of first, step 2", one)
    assert zero.index("waits") == one.index("waits")
    assert where.startswith("  in job '")
    assert advice.startswith("Run the same layers in the same order")
    assert see == "see docs/errors.md#roundmismatch"


def test_the_servers_log_has_it_once(told):
    log = [line for line in told["0"].splitlines() if line.startswith("20")]
    assert len([line for line in log if "wait for one another" in line]) == 1
    leaving = [line for line in log if line.endswith("leaves after this RoundMismatch")]
    # Torchrun ends the slower rank, maybe before it has left.
    assert 1 <= len(leaving) == len({RANK.search(line).group() for line in leaving})
