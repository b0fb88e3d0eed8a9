"""Tally: the moments of everything a layer sees while `recalibrate` runs a model over its batches."""

import threading

from statsd_bn.moments import Moments


class Tally:
    """A layer's moments over many batches.

    Attributes:
        moments: of all batches so far; None before the first.
    """

    def __init__(self) -> None:
        self.moments: Moments | None = None
        self._lock = threading.Lock()

    def add(self, batch: Moments) -> None:
        """Counts one more batch; replicas that never meet, as those of torch's own DataParallel, may do so at once."""
        with self._lock:
            self.moments = batch if self.moments is None else self.moments.merge(batch)
