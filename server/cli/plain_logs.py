"""Plain log lines: makes text that others sent safe to log."""

import logging

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
