"""Programs around client/native/core/round.c: one explores all orders of its steps, one has ranks as threads."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from client.native.build import COMPILERS
from support.paths import ROOT

CORE, PROGRAMS = ROOT / "client" / "native" / "core", ROOT / "tests" / "simulation" / "core"

COMPILER = next((path for name in COMPILERS if (path := shutil.which(name))), "")

# Events in a group: explore.c takes the sum of the chosen ones.
OTHER_KEY, CLOSES, ESCALATES, KILLS = 1, 2, 4, 8

# The explorer copies all memory for each state, so slots have room for only one row.
SMALL = ("SLOT = 1 << 18", "SLOT = 128")


def program(folder: Path, name: str, *flags: str, changed: tuple[tuple[str, str], ...] = ()) -> Path:
    """Compiles a program around round.c, in which each text of `changed`, which must occur once, is replaced."""
    text = (CORE / "round.c").read_text()
    for before, after in changed:
        assert text.count(before) == 1, f"round.c: expected once: {before}"
        text = text.replace(before, after)
    source, target = folder / "round.c", folder / name
    source.write_text(text)
    inputs = [str(PROGRAMS / f"{name}.c"), f'-DROUND_C="{source}"', f"-I{CORE}"]
    command = [COMPILER, "-std=gnu11", "-O1", "-g", "-ffp-contract=off", "-w", "-pthread", *flags, *inputs]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


def explored(path: Path, ranks: int, rounds: int, what: int) -> str:
    """The last line of an exploration: the number of states, or a finding."""
    arguments = [str(path), str(ranks), str(rounds), str(what)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [f"ended with {done.returncode}"])[-1]


def main() -> int:
    findings = 0
    with tempfile.TemporaryDirectory() as folder:
        path = program(Path(folder), "explore", changed=(SMALL,))
        for ranks, rounds in ((2, 2), (2, 3), (3, 1), (3, 2)):
            for what in (0, OTHER_KEY, CLOSES, ESCALATES, KILLS):
                started = time.monotonic()
                found = explored(path, ranks, rounds, what)
                findings += not found.endswith(" states")
                seconds = time.monotonic() - started
                print(f"{ranks} ranks, {rounds} rounds, scenario {what}: {found} in {seconds:.1f} s", flush=True)
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
