"""History: what the layers were like in the last hour, in memory, thinner with age.

Snapshots come once a second, and each may have a few figures of hundreds of layers and a thousand ranks. So they are
kept as float32, one array for a group and a moment, and fewer of them the older they are. Where even these are too
many, the group that takes most room keeps every second moment, then every third, and so on, until all fit.
"""

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.view.snapshot import Snapshot

# Until what age, in seconds, moments are kept, and how many seconds lie between two of them.
PACES = ((60.0, 1.0), (600.0, 10.0), (3600.0, 60.0))
MOST_SECONDS = PACES[-1][0]

# The oldest moment and the newest, which are never too close.
ENDS = 2

# The feed does not come to the tick.
EARLY_SECONDS = 0.5

# Bytes of all arrays: 1,000 ranks with 200 layers have a moment each three seconds, 30 seconds and three minutes.
MOST_BYTES = 100_000_000

MOST = float(np.finfo(np.float32).max)

Name = tuple[str, str]
Figures = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Moment:
    """What a group's layers were like at a time.

    Attributes:
        time: seconds since 1970.
        layers: their names, in the order of a step.
        eta2: of each layer, the share of the variance that lies between members.
        values: each layer's means, then the variances, shape (layers, 2, members).
    """

    time: float
    layers: tuple[str, ...]
    eta2: Figures
    values: Figures

    @property
    def size(self) -> int:
        """Bytes of the arrays."""
        return self.eta2.nbytes + self.values.nbytes


@dataclass(slots=True)
class Series:
    """The moments of a group, from the oldest to the newest.

    Attributes:
        moments: what is kept.
        factor: how many times the seconds of `PACES` lie between two.
    """

    moments: list[Moment] = field(default_factory=list)
    factor: int = 1

    @property
    def size(self) -> int:
        """Bytes of the arrays."""
        return sum(moment.size for moment in self.moments)

    def is_due(self, now: float) -> bool:
        """Whether the last moment is old enough for another one."""
        return not self.moments or now - self.moments[-1].time >= PACES[0][1] * self.factor - EARLY_SECONDS

    def set_back(self, now: float) -> None:
        """Where the clock was set back, the moments go with it; else nothing would be due for so long."""
        if self.moments and (seconds := self.moments[-1].time - now) > 0:
            self.moments = [replace(moment, time=moment.time - seconds) for moment in self.moments]

    def thin(self, now: float) -> None:
        """Forget what is too old, or too close to an older moment; the newest stays."""
        kept: list[Moment] = []
        for moment in self.moments[:-1]:
            pace = next((pace for age, pace in PACES if now - moment.time <= age), None)
            if pace and (not kept or moment.time - kept[-1].time >= pace * self.factor - EARLY_SECONDS):
                kept.append(moment)
        self.moments = [*kept, *self.moments[-1:]]


class History:
    """Keeps the layers of all groups; threads may share it.

    Example usage:

        history = History()
        history.add(snapshot)
        history.layer("digits", "world", "layer1.0.bn1")

    Args:
        most_bytes: of all arrays.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._series: dict[Name, Series] = {}

    @property
    def size(self) -> int:
        """Bytes of all arrays."""
        with self._lock:
            return self._size()

    def add(self, snapshot: Snapshot) -> None:
        """Keep what a snapshot says of the layers, and forget what has become old."""
        now = snapshot["time"]
        with self._lock:
            for series in self._series.values():
                series.set_back(now)
            for group in snapshot["groups"]:
                series = self._series.get((group["job"], group["group"]), Series())
                if group.get("figures", {}).get("layers") and not snapshot["error"] and series.is_due(now):
                    self._series[group["job"], group["group"]] = _extended(series, _moment(now, group["figures"]))
            self._forget(now)

    def layer(self, job: str, group: str, name: str) -> dict[str, Any] | None:
        """One layer's figures over time, or None where it is not known.

        Args:
            job: the training run.
            group: which of its groups.
            name: of the layer.

        Returns:
            `times` (seconds since 1970), `eta2` at each, and `means` and `variances`: at each those of all members.
        """
        with self._lock:
            series = self._series.get((job, group), Series())
            moments = list(series.moments)
        rows = [(moment, moment.layers.index(name)) for moment in moments if name in moment.layers]
        if not rows:
            return None
        return {
            "job": job,
            "group": group,
            "layer": name,
            "times": [moment.time for moment, _ in rows],
            "eta2": [float(moment.eta2[at]) for moment, at in rows],
            "means": [moment.values[at, 0].tolist() for moment, at in rows],
            "variances": [moment.values[at, 1].tolist() for moment, at in rows],
        }

    def _size(self) -> int:
        return sum(series.size for series in self._series.values())

    def _forget(self, now: float) -> None:
        for series in self._series.values():
            series.thin(now)
        for name, series in list(self._series.items()):
            if now - series.moments[-1].time > MOST_SECONDS:
                del self._series[name]
        while self._size() > self._most_bytes:
            name, series = max(self._series.items(), key=lambda item: item[1].size)
            if len(series.moments) > ENDS:
                series.factor += 1
                series.thin(now)
            elif len(series.moments) == ENDS:
                del series.moments[0]
            else:
                del self._series[name]  # nothing of it can be left out


def _moment(now: float, figures: dict[str, Any]) -> Moment:
    layers = figures["layers"]
    values = np.array([(layer["means"], layer["variances"]) for layer in layers])
    return Moment(
        now,
        tuple(layer["name"] for layer in layers),
        np.array([layer["eta2"] for layer in layers], np.float32),
        np.clip(values, -MOST, MOST).astype(np.float32),
    )


def _extended(series: Series, moment: Moment) -> Series:
    """The series with another moment; one of another number of members begins anew."""
    if series.moments and series.moments[-1].values.shape[2] != moment.values.shape[2]:
        series = Series()
    series.moments.append(moment)
    return series
