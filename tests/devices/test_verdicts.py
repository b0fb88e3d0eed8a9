"""When flags are looked at, and who waits for it."""

import threading

import pytest
import torch

from client.autograd.verdicts import Slot, Verdicts


def test_who_waits_for_a_device_does_not_hold_up_other_threads(monkeypatch):
    """The round it waits for may want another rank, which waits for a round of another thread of this process."""
    verdicts, waits, has_come = Verdicts(), threading.Event(), threading.Event()

    def wait(_):
        waits.set()
        assert has_come.wait(60)

    monkeypatch.setattr(Slot, "wait", wait)
    monkeypatch.setattr(Slot, "is_filled", lambda _: has_come.is_set())
    told = []

    def refuse():
        with pytest.raises(ValueError, match="said"):
            verdicts.hand_in(torch.tensor([True]), say, at_once=True)
        told.append("at once")

    first = threading.Thread(target=refuse)
    first.start()
    assert waits.wait(60)
    second = threading.Thread(target=verdicts.hand_in, args=(torch.tensor([False]), say))
    second.start()
    second.join(10)
    is_held_up = second.is_alive()
    has_come.set()
    first.join(60)
    second.join(60)
    assert not is_held_up
    assert told == ["at once"]


def say(_):
    raise ValueError("said")
