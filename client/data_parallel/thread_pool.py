"""Workers: threads that outlive what they ran, so that a forward pass need not make one for each of its replicas.

To make and join a thread takes 80 µs, and with it come and go the threads that torch gives each thread for its
operators, which costs milliseconds. Workers are kept for the next pass, whichever module's it is.
"""

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Task = Callable[[], None]


class _Worker:
    """A thread that runs one task after another."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Task, threading.Lock]] = SimpleQueue()
        threading.Thread(target=self._work, name="statsd_bn replica", daemon=True).start()

    def start(self, task: Task) -> threading.Lock:
        """Runs a task; the lock that it returns is released when the task is through."""
        running = threading.Lock()
        running.acquire()
        self._tasks.put((task, running))
        return running

    def _work(self) -> None:
        while True:
            task, running = self._tasks.get()
            try:
                task()
                del task  # the wait for the next one must not keep alive what this one knew
                _idle.append(self)
            finally:
                running.release()


_idle: list[_Worker] = []  # a list's own append and pop need no lock, which a fork could find taken
os.register_at_fork(after_in_child=_idle.clear)  # no thread but the caller's lives on in a child


def run(tasks: Sequence[Task]) -> None:
    """Runs all tasks at the same time, each in a thread of its own, and waits for them.

    Args:
        tasks: must not raise; one that does ends its thread, with a traceback, and no other.
    """
    for running in [_take().start(task) for task in tasks]:
        running.acquire()


def _take() -> _Worker:
    try:
        return _idle.pop()
    except IndexError:
        return _Worker()
