"""When flags are read, and which threads wait for them."""

import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch

from client.ops.device_errors import AsyncChecks, Slot


def test_waiting_for_a_device_does_not_block_other_threads(monkeypatch):
    """The awaited round may need another rank, which waits for a round of another thread of this process."""
    checks, waits, has_come = AsyncChecks(), threading.Event(), threading.Event()

    def wait(_):
        waits.set()
        assert has_come.wait(60)

    monkeypatch.setattr(Slot, "wait", wait)
    monkeypatch.setattr(Slot, "is_filled", lambda _: has_come.is_set())
    outcomes = []

    def refuse():
        with pytest.raises(ValueError, match="said"):
            checks.submit(torch.tensor([True]), fail, wait=True)
        outcomes.append("at once")

    first = threading.Thread(target=refuse)
    first.start()
    assert waits.wait(60)
    second = threading.Thread(target=checks.submit, args=(torch.tensor([False]), fail))
    second.start()
    second.join(10)
    is_held_up = second.is_alive()
    has_come.set()
    first.join(60)
    second.join(60)
    assert not is_held_up
    assert outcomes == ["at once"]


def fail(_):
    raise ValueError("said")


@pytest.fixture
def capturing(monkeypatch):
    """Two GPUs, the first one current; graphs are captured on the GPUs in the returned set."""
    current, found = [0], set()

    @contextmanager
    def entered(device):
        current.append(torch.device(device).index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] in found)
    return found


SECOND = torch.device("cuda", 1)


@pytest.mark.parametrize(("captured", "is_taken"), [(0, True), (1, False)])
def test_flags_are_copied_unless_a_graph_is_captured_on_their_device(monkeypatch, capturing, captured, is_taken):
    capturing.add(captured)
    filled = []
    monkeypatch.setattr(Slot, "__init__", lambda *_: None)
    monkeypatch.setattr(Slot, "fill", lambda _, flags: filled.append(flags))
    monkeypatch.setattr(Slot, "is_filled", lambda _: False)

    class Flags:
        device, dtype = SECOND, torch.bool

        def __len__(self):
            return 1

    AsyncChecks().submit(Flags(), fail)
    assert bool(filled) is is_taken


@pytest.mark.parametrize(("captured", "is_seen"), [(0, True), (1, False)])
def test_flags_are_not_read_while_a_graph_is_captured_on_the_device_of_the_next_round(capturing, captured, is_seen):
    checks = AsyncChecks()
    checks.submit(torch.tensor([False]), fail)
    slot = Slot(1, torch.device("cpu"), torch.bool)
    slot.fill(torch.tensor([True]))
    checks._open.append((slot, (1, SECOND, torch.bool), fail))
    capturing.add(captured)
    with pytest.raises(ValueError, match="said") if is_seen else nullcontext():
        checks.poll(SECOND)
