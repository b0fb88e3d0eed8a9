"""Log lines: makes text that others sent safe to log, and limits how often one kind of message is logged."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from statsd_bn.text import plain

# Letters of a line: the longest error of the project has 600; whoever reaches the port can cause one of 4,096 bytes.
MAX_LINE = 1000


class PlainFormatter(logging.Formatter):
    """Writes a message on one short line, so that text from others cannot forge a line or control a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The message without what follows it, such as a traceback."""
        line = plain(super().formatMessage(record))
        more = len(line) - MAX_LINE
        return line if more <= 0 else f"{line[:MAX_LINE]}... ({more} more characters)"


PERIOD_SECONDS = 60.0
MOST_IN_A_PERIOD = 30


@dataclass(slots=True)
class _Kind:
    """One kind of message: the start of its period, and how many have come since."""

    since: float
    number: int = 0


class Sparing(logging.Filter):
    """Logs at most 30 messages of a kind in a minute; the first one after says how many were left out.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record; messages with the same format are of one kind."""
        now = self._clock()
        kind = self._kinds.setdefault(str(record.msg), _Kind(now))
        if now - kind.since >= PERIOD_SECONDS:
            left_out = max(0, kind.number - MOST_IN_A_PERIOD)
            if left_out:
                record.msg = f"{record.msg} ({left_out} more like this were left out of the log)"
            kind.since, kind.number = now, 0
        kind.number += 1
        return kind.number <= MOST_IN_A_PERIOD
