"""Bounded calls: torch's store waits for ever for the answer of a process that is frozen, whatever its timeout says."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns what a call returns, or raises what it raises; it is made in a thread, which is left if it takes longer.

    Raises:
        TimeoutError: it took longer.
    """
    result: Future[T] = Future()
    threading.Thread(target=_make, args=[call, result], name="statsd_bn call", daemon=True).start()
    return result.result(seconds)


def _make(call: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is raised where the call was asked for
        result.set_exception(error)
