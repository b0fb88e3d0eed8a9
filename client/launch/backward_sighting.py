"""Sees whether this process trains, by looking now and then whether a thread of it is in a backward pass.

Not every training steps an optimizer of torch's soon: some accumulate gradients for minutes, or move the weights
themselves. A hook on all forward passes would see these too, but torch goes a slower way through each module while
there is one, and compiles anew when it is gone. A look costs the training nothing.
"""

import sys
import threading
from collections.abc import Callable

from client.whereabouts.stack import frames, module_of

# The first look, so that it comes long after the start, and the pause until the next one.
FIRST_LOOK_SECONDS = 20.0
PAUSE_SECONDS = 1.0

# What backward passes of all kinds go through.
_MODULES = ("torch.autograd", "torch.autograd.graph")
_FUNCTIONS = ("backward", "_engine_run_backward")


class BackwardSighting:
    """Calls a function when a backward pass is seen; once, and from a thread of its own.

    Args:
        call: what to call.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._has_ended = threading.Event()
        threading.Thread(target=self._look_now_and_then, name="statsd_bn first step", daemon=True).start()

    def end(self) -> None:
        """Looks no more."""
        self._has_ended.set()

    def _look_now_and_then(self) -> None:
        pause = FIRST_LOOK_SECONDS
        while not self._has_ended.wait(pause):
            # Whatever ends it before a backward pass begins has ended it by the time that this pass is seen.
            if is_in_backward() and not self._has_ended.is_set():
                self._call()
                return
            pause = PAUSE_SECONDS


def is_in_backward() -> bool:
    """Returns whether a thread of this process is in a backward pass."""
    threads = sys._current_frames().values()  # noqa: SLF001 - the only way to other threads
    return any(
        frame.f_code.co_name in _FUNCTIONS and module_of(frame) in _MODULES
        for innermost in threads
        for frame in frames(innermost)
    )
