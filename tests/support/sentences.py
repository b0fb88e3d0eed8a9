"""Texts of errors and log lines, as tests compare them."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from statsd_bn.text import unwrap


def says(pattern: str) -> Callable[[BaseException], bool]:
    """A check for `pytest.raises(check=)`: the pattern matches the error's text without its line breaks."""
    return lambda error: re.search(pattern, unwrap(str(error))) is not None


def error_of(call: Callable[..., object], *arguments: object) -> str:
    """Class and text of the error that a call raises; "no error" without one."""
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001 - the test compares it
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextmanager
def client_log(level: int = logging.WARNING) -> Iterator[list[tuple[str, str]]]:
    """Level and text of the client's log lines within the block."""
    lines: list[tuple[str, str]] = []
    logger, handler = logging.getLogger("statsd_bn.client"), logging.Handler(level)
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
