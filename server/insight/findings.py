"""Findings: what was noticed of a group, for its log and status."""

import logging
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

logger = logging.getLogger("statsd_bn.server")

# The latest are kept, and no text is longer than this.
MOST_FINDINGS, MOST_TEXT = 8, 512


@dataclass(frozen=True, slots=True)
class Finding:
    """One of them.

    Attributes:
        kind: what it is about, as "straggler".
        rank: whose it is.
        step: the step that the group was in.
        text: what to say, one line.
        layer: the layer that shows it; empty if it is about none.
    """

    kind: str
    rank: int
    step: int
    text: str
    layer: str = ""


class Findings:
    """Those of one group.

    Args:
        name: of job and group, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: deque[Finding] = deque(maxlen=MOST_FINDINGS)

    def add(self, kind: str, rank: int, step: int, text: str, layer: str = "") -> None:
        """Keep a finding, and warn of it."""
        finding = Finding(kind, rank, step, text[:MOST_TEXT], layer)
        self._found.append(finding)
        logger.warning("%s: %s: %s", self._name, finding.kind, finding.text)

    @property
    def told(self) -> list[dict[str, Any]]:
        """Entries of a report, the oldest first."""
        return [asdict(finding) for finding in self._found]
