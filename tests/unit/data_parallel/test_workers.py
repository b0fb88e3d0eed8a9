"""Worker threads run tasks at the same time, and are kept for the next ones."""

import multiprocessing
import threading
import weakref

from client.data_parallel.any_device import run_tasks


def idents_of(number):
    found = []
    together = threading.Barrier(number, timeout=20)

    def task():
        together.wait()
        found.append(threading.get_ident())

    run_tasks([task] * number)
    return set(found)


def test_the_next_tasks_run_in_the_same_threads():
    assert idents_of(3) == idents_of(3)
    assert idents_of(2) < idents_of(3)


def test_a_task_may_run_others():
    inner = []
    run_tasks([lambda: inner.append(idents_of(3))] * 2)
    assert [len(idents) for idents in inner] == [3, 3]


class Known:
    """An object that a task refers to."""


def test_a_worker_keeps_no_reference_to_an_ended_task():
    known = Known()
    reference = weakref.ref(known)
    run_tasks([known.__repr__])
    del known
    assert reference() is None


def test_a_task_that_raises_ends_its_thread_and_leaves_no_caller_waiting(monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(arguments.exc_type))
    runs = []

    def fail():
        runs.append(threading.get_ident())
        raise MemoryError("too large")

    run_tasks([fail])
    (ident,) = runs
    for thread in threading.enumerate():
        if thread.ident == ident:
            thread.join(20)
    assert raised == [MemoryError]
    assert len(idents_of(3)) == 3


def test_a_forked_child_has_its_own_workers():
    idents_of(2)
    child = multiprocessing.get_context("fork").Process(target=idents_of, args=(2,))
    child.start()
    child.join(20)
    exitcode = child.exitcode
    child.kill()
    assert exitcode == 0
