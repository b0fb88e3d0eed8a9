"""Torch's own threads, lent to functions of C."""

import ctypes
import ctypes.util
import threading

import pytest
import torch

from client.kernels import torch_threads

Range = tuple[int, int]
needs_loop = pytest.mark.skipif(
    torch_threads._loop() is torch_threads._in_this_thread, reason="torch lends no threads before 2.10"
)


def shared(units: int, grain: int) -> list[tuple[int, Range]]:
    """Which thread was given which range; each has to be given the numbers as well."""
    found, numbers = [], set()

    @torch_threads._Function
    def note(begin, end, given):
        found.append((threading.get_native_id(), (begin, end)))
        numbers.add(ctypes.cast(given, ctypes.POINTER(ctypes.c_int64))[1])

    address = ctypes.cast(note, ctypes.c_void_p).value
    torch_threads.share(units, grain, address, [3, 7])
    assert numbers == {7}
    return sorted(found, key=lambda each: each[1])


@needs_loop
def test_units_are_dealt_to_torchs_threads(set_threads):
    set_threads(2)
    (first, own), (second, others) = shared(100, 1)
    assert (own, others) == ((0, 50), (50, 100))
    assert threading.get_native_id() == first != second


def test_units_that_are_worth_one_thread_are_the_callers(set_threads):
    set_threads(2)
    assert shared(100, 100) == [(threading.get_native_id(), (0, 100))]


def test_one_thread_is_the_callers(set_threads):
    set_threads(1)
    assert shared(100, 1) == [(threading.get_native_id(), (0, 100))]


def test_a_torch_that_lends_none_leaves_all_to_the_caller(monkeypatch, set_threads):
    set_threads(2)
    monkeypatch.setattr(torch_threads, "_loop", lambda: torch_threads._in_this_thread)
    assert shared(100, 1) == [(threading.get_native_id(), (0, 100))]


def test_a_loop_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(torch_threads, "_loop", lambda: lambda *_: 1)
    with pytest.raises(RuntimeError, match="threads did not"):
        torch_threads.share(1, 1, 0, [0])


@pytest.mark.parametrize("library", ["no such file", ctypes.util.find_library("c")])
def test_a_torch_without_such_a_loop_leaves_all_to_the_caller(monkeypatch, library):
    monkeypatch.setattr(torch._C, "__file__", library)
    torch_threads._loop.cache_clear()
    try:
        assert torch_threads._loop() is torch_threads._in_this_thread
    finally:
        torch_threads._loop.cache_clear()
