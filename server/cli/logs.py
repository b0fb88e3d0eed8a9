"""Logging: escapes text from peers, and limits the rate of each kind of message."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from statsd_bn.text import escape

# Maximum characters of a line: the longest error of the project has 600, but a peer can cause one of 4,096 bytes.
MAX_LINE = 1000


class PlainFormatter(logging.Formatter):
    """Writes each message on one short line, so that text from peers cannot forge lines or control a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The escaped message, without a traceback."""
        line = escape(super().formatMessage(record))
        more = len(line) - MAX_LINE
        return line if more <= 0 else f"{line[:MAX_LINE]}... ({more} more characters)"


PERIOD_SECONDS = 60.0
MAX_PER_PERIOD = 30


@dataclass(slots=True)
class _MessageCount:
    """Start of the current period of one kind of message, and the number of messages since."""

    since: float
    number: int = 0


class RateLimitFilter(logging.Filter):
    """Logs at most 30 messages of a kind per minute; the next one has the number of suppressed messages."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[str, _MessageCount] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record; messages with the same format string are of one kind."""
        now = self._clock()
        kind = self._kinds.setdefault(str(record.msg), _MessageCount(now))
        if now - kind.since >= PERIOD_SECONDS:
            left_out = max(0, kind.number - MAX_PER_PERIOD)
            if left_out:
                record.msg = f"{record.msg} ({left_out} similar messages were suppressed)"
            kind.since, kind.number = now, 0
        kind.number += 1
        return kind.number <= MAX_PER_PERIOD
