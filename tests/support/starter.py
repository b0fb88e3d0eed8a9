"""A fork server with torch and its compiler: processes start in milliseconds, in the fork server's environment."""

import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Self

STARTER = multiprocessing.get_context("forkserver")

# Torch loads the compiler at the first optimizer of a process, `client.connect` does too, and the first compiled call
# loads the compiler's backend, which takes more than a second.
STARTER.set_forkserver_preload(["client", "torch._dynamo", "torch._inductor.compile_fx", "conftest", "support.frozen"])

WAIT_SECONDS = 100.0


def warm_up() -> None:
    """Start the fork server, so that no test's time includes its start; it lives as long as this process."""
    process = STARTER.Process(target=int)
    process.start()
    process.join(WAIT_SECONDS)


def run_script(path: Path, arguments: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
    """Run a script in a process of the starter as Python would, with its output in a file."""
    os.environ.update(environ)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    with output.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    runpy.run_path(str(path), run_name="__main__")


# Gloo groups are never freed (`ddp_programs.keep`), and each has three threads that wake a hundred times a second. A
# process with 30 groups takes 2.5 % of a core; new processes start within 0.1 s.
MOST_THREADS = 120


class MemberProcesses:
    """A pool of processes, kept from test to test until they have `MOST_THREADS` threads; `__exit__` ends them."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._executor = _started(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._executor)

    def for_one_test(self) -> ProcessPoolExecutor:
        """Returns processes with torch loaded; new ones if a test has killed one or they have too many threads."""
        if not _is_whole(self._executor) or _threads(self._executor) > MOST_THREADS:
            _end(self._executor)
            self._executor = _started(self._number)
        return self._executor


def _is_whole(executor: ProcessPoolExecutor) -> bool:
    try:
        executor.submit(int).result(WAIT_SECONDS)
    except BrokenProcessPool:
        return False
    return True


def _threads(executor: ProcessPoolExecutor) -> int:
    """Number of threads of all processes; 0 without /proc."""
    return sum(len(list(Path(f"/proc/{number}/task").glob("*"))) for number in executor._processes)


def _started(number: int) -> ProcessPoolExecutor:
    together = STARTER.Barrier(number)
    executor = ProcessPoolExecutor(number, mp_context=STARTER, initializer=_wait_for_all, initargs=(together,))
    try:
        # Wait until all have imported torch, so that no test's time limit includes it.
        for started in [executor.submit(int) for _ in range(number)]:
            started.result(timeout=WAIT_SECONDS)
    except BaseException:
        _end(executor)
        raise
    return executor


def _wait_for_all(together: threading.Barrier) -> None:
    together.wait()


def _end(executor: ProcessPoolExecutor) -> None:
    processes = list(executor._processes.values())
    executor.shutdown(wait=False, cancel_futures=True)
    # Tests wait for the ends of their members' programs, so a process that does not end now hangs.
    for process in processes:
        connection.wait([process.sentinel], 10.0)
        process.kill()
