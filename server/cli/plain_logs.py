"""Plain log lines: what others have sent, on its way to the log."""

import logging

from statsd_bn.text import plain

# Letters of a line: the longest error of the project has 600, and whoever reaches the port can make one of 4,096 bytes.
MAX_LINE = 1000


class PlainFormatter(logging.Formatter):
    """Writes a message on one short line, so that nobody named in it can forge another, or speak to a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Returns the message without what follows it, such as a traceback."""
        line = plain(super().formatMessage(record))
        more = len(line) - MAX_LINE
        return line if more <= 0 else f"{line[:MAX_LINE]}... ({more} more characters)"
