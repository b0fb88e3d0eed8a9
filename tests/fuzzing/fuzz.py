"""Sends fuzzed frames to a server's socket and to the pure server; `scripts/fuzz` runs it.

A real server gets frames on its socket. Then a server without a socket gets random sequences of frames (plays), and its
memory must stay flat. At last coverage guides the plays (atheris).
"""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType

from attacks import socket_fuzz
from fuzzing.fuzz_target import SOUND, Play

# A turn's byte is 8 times its kind, plus a peer. The kinds 8 to 11 send a sound frame with 0 to 3 bytes changed.
SOUND_TURN = 8 << 3

# The server's memory is compared after this share of a flood's frames and after all of them.
SETTLED = 0.2
GROWTH_KIB = 2048


class Grown(AssertionError):
    """The server's memory has grown with the frames it was given."""


def seeds() -> Iterator[bytes]:
    for number in range(len(SOUND)):
        yield bytes([SOUND_TURN, number])
    yield b"".join(bytes([SOUND_TURN | number % 8, number]) for number in range(len(SOUND)))


def random_play(chance: random.Random) -> bytes:
    turns = []
    for _ in range(chance.randrange(1, 40)):
        what = chance.choice((0, 2, 4, 5, 6, *[8] * 8, 9, 9, 10, 11))
        rest = bytes(chance.randrange(256) for _ in range(10)) if what > 5 else b""
        turns.append(bytes([what << 3 | chance.randrange(8)]) + rest)
    return b"".join(turns)


def flood(frames: int, seed: int) -> int:
    chance = random.Random(seed)
    play = Play()
    settled = 0
    while play.frames < frames:
        play.run(random_play(chance))
        play.begin_again()
        if not settled and play.frames >= SETTLED * frames:
            settled = _resident_kib()
    grown = _resident_kib() - settled
    if grown > GROWTH_KIB:
        raise Grown(f"{grown} KiB between {SETTLED:.0%} of {frames} frames and their end")
    return play.frames


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """Yields the functions that a module defines, and the methods and properties of its classes."""
    own = [found for found in vars(module).values() if getattr(found, "__module__", "") == module.__name__]
    members = [member for kind in own if isinstance(kind, type) for member in vars(kind).values()]
    for found in own + members:
        function = getattr(found, "fget", None) or getattr(found, "__func__", found)
        if isinstance(function, FunctionType):
            yield function


def main(arguments: Sequence[str] | None = None) -> int:
    """Plays all kinds of fuzzed frames; a fault that they find raises."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="plays guided by coverage (default 10; 0: none)")
    parser.add_argument("--frames", type=int, default=10_000_000, help="in random plays (default 10,000,000; 0: none)")
    parser.add_argument(
        "--socket", type=int, default=500_000, help="frames for a real server (default 500,000; 0: no server)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, help="folder of plays, which gets new ones (default: a temporary one)")
    options = parser.parse_args(arguments)
    if options.socket:
        socket_fuzz.main(options.socket, options.seed)
    logging.disable(logging.CRITICAL)
    if options.frames:
        began = time.monotonic()
        frames = flood(options.frames, options.seed)
        print(f"{frames} frames to one server in {time.monotonic() - began:.0f} s, memory flat")
    return _led_by_coverage(options.minutes, options.seed, options.corpus)


def _led_by_coverage(minutes: float, seed: int, corpus: Path | None) -> int:
    if not minutes:
        return 0
    try:
        import atheris  # noqa: PLC0415 - some systems lack it
    except ImportError:
        print("skipped the plays guided by coverage: atheris is not installed (the extra `fuzz` has it)")
        return 0
    # Instruments the loaded functions; atheris would otherwise import the modules a second time.
    for name in [name for name in sys.modules if name.split(".")[0] in {"server", "statsd_bn"}]:
        for function in functions_of(sys.modules[name]):
            atheris.instrument_func(function)
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus or Path(folder)
        corpus.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds()):
            (corpus / f"seed-{number}").write_bytes(data)
        limits = [f"-max_total_time={int(60 * minutes)}", f"-seed={seed + 1}", "-max_len=1024", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *limits, str(corpus)], lambda data: Play().run(data))
        atheris.Fuzz()
    return 0


def _resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")))


if __name__ == "__main__":
    sys.exit(main())
