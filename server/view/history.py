"""History: a group's speed and layer statistics over ten minutes, in bounded memory. Pure."""

import base64
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statsd_bn.timing import quantile

SECONDS = 600.0
INTERVAL_SECONDS = 4.0  # between the points of a trend; the minimum between samples of layers

# Memory for the samples of all groups' layers; groups share it equally, and large ones are sampled less often.
MAX_BYTES = 2**25

FloatArray = NDArray[np.float32]


class Trend:
    """Rounds per second and round trips of one group, a point every `INTERVAL_SECONDS`."""

    def __init__(self) -> None:
        # Time, rounds per second, median, 99th percentile, and the highest step.
        self._points: deque[tuple[float, float, float, float, int]] = deque(maxlen=int(SECONDS / INTERVAL_SECONDS))
        self._since: tuple[float, int, Sequence[int]] | None = None

    def add(self, now: float, group: Mapping[str, Any]) -> None:
        """Add a report's entry of the group; `now` is in seconds since 1970."""
        rounds, counts = group["rounds_done"], group.get("round_trip_seconds", {"counts": ()})["counts"]
        if self._since:
            then, old_rounds, old = self._since
            if now - then < INTERVAL_SECONDS - 0.5:
                return
            # The report omits empty buckets at the end. A restarted server counts anew.
            old = [*old, *[0] * (len(counts) - len(old))] if sum(counts) >= sum(old) else [0] * len(counts)
            growth = [max(0, count - before) for count, before in zip(counts, old, strict=False)]
            speed = max(0.0, (rounds - old_rounds) / (now - then))
            step = max((member["step"] for member in group["members"]), default=0)
            step = max(step, self._points[-1][4]) if self._points else step
            self._points.append((now, speed, quantile(growth, 0.5), quantile(growth, 0.99), step))
        self._since = now, rounds, counts

    def interrupt(self) -> None:
        """Start anew after a restart of the server: no point spans it."""
        self._since = None

    def time_of(self, step: int) -> float | None:
        """Approximate time of a step, in seconds since 1970; None if it is before the history or not yet in it."""
        at = bisect_left(self._points, step, key=lambda point: point[4])
        if not 0 < at < len(self._points):
            return None
        (before, *_, low), (after, *_, high) = self._points[at - 1], self._points[at]
        return before + (after - before) * (step - low) / (high - low)

    @property
    def entry(self) -> dict[str, list[float]]:
        """The points as a snapshot has them."""
        names = ("rounds_per_second", "median", "p99")
        numbers = {name: [float(f"{one[at]:.3g}") for one in self._points] for at, name in enumerate(names, start=1)}
        return {"seconds": [round(one[0], 1) for one in self._points], **numbers}


class LayerHistory:
    """Mean and variance of each layer and rank of one group, a sample every `interval` seconds."""

    def __init__(self) -> None:
        self.interval = INTERVAL_SECONDS
        self._layers: list[str] = []
        # Time, and means and variances, shape (2, layers, members).
        self._samples: deque[tuple[float, FloatArray]] = deque()

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, now: float, figures: Mapping[str, Any], max_bytes: int) -> None:
        """Add a group's figures, see `server.view.feed`; keep at most `SECONDS` and `max_bytes` of earlier samples."""
        if self._samples and now - self._samples[-1][0] < self.interval - 0.5:
            return
        sample = np.array((figures["means"], figures["variances"]), "<f4")
        if figures["layers"] != self._layers or (self._samples and sample.shape != self._samples[-1][1].shape):
            self._layers = figures["layers"]
            self._samples.clear()
        # The server samples finite rows only, so after a NaN it repeats its figures.
        if not self._samples or not np.array_equal(sample, self._samples[-1][1]):
            self._samples.append((now, sample))
        self.interval = max(INTERVAL_SECONDS, SECONDS * sample.nbytes / max_bytes)
        excess = (len(self._samples) - 1) * sample.nbytes - max_bytes
        while len(self._samples) > 1 and (now - self._samples[0][0] > SECONDS or excess > 0):
            self._samples.popleft()
            excess -= sample.nbytes

    def of_layer(self, name: str) -> dict[str, Any] | None:
        """`seconds`, `means` and `variances` of the samples, see `SnapshotBuilder.history`; None if unknown."""
        if name not in self._layers:
            return None
        at, samples = self._layers.index(name), list(self._samples)
        values = np.array([sample[:, at] for _, sample in samples])
        means, variances = (base64.b64encode(values[:, index].tobytes()).decode() for index in range(2))
        seconds = [round(time, 1) for time, _ in samples]
        return {"members": values.shape[2], "seconds": seconds, "means": means, "variances": variances}
