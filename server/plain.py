"""Plain text: what others have sent, on its way to the log or to a terminal."""

import logging


class PlainFormatter(logging.Formatter):
    """Writes a message on one line, so that nobody who is named in it can forge another, or speak to a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Returns the message without what follows it, such as a traceback."""
        return plain(super().formatMessage(record))


def plain(text: str) -> str:
    """Returns text with all that is not printable, line feeds too, as a string literal of Python would have it."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
