"""Worker processes that play the members of the tests."""

import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any, Self

from support.starter import STARTER

WAIT_SECONDS = 100.0

# Gloo groups are never freed (`ddp_programs.keep`), and the thread of each wakes a hundred times a second: the groups
# of a whole run of the tests took a fifth of two cores. Most tasks make one.
TASKS = 128


class MemberProcesses:
    """A pool of processes, kept from test to test and replaced after `TASKS` tasks; leaving it ends them.

    Args:
        number: of the processes.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._executor = _started(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._executor)

    def for_one_test(self) -> ProcessPoolExecutor:
        """Returns the processes, which have imported torch; others, if a test has killed one of them."""
        if self._executor.tasks >= TASKS or not self._executor.is_whole():
            _end(self._executor)
            self._executor = _started(self._number)
        return self._executor


class _Executor(ProcessPoolExecutor):
    """One that counts its tasks."""

    tasks = 0

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks += 1
        return super().submit(*args, **kwargs)

    def is_whole(self) -> bool:
        """Whether all processes are there."""
        try:
            self.submit(int).result(WAIT_SECONDS)
        except BrokenProcessPool:
            return False
        return True


def _started(number: int) -> _Executor:
    together = STARTER.Barrier(number)
    executor = _Executor(number, mp_context=STARTER, initializer=_wait_for_all, initargs=(together,))
    try:
        # All have imported torch, as conftest.py does, when the first test's time begins.
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
    # Tests wait for their members, so one that does not end now hangs.
    for process in processes:
        connection.wait([process.sentinel], 10.0)
        process.kill()
