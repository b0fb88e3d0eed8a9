"""Environment variables, read with errors that name the variable and the expected value."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TypeVar

from statsd_bn.errors import ConfigurationError

PREFIX = "STATSD_BN_"

SIMILARITY = 0.85  # of a misspelt name: one letter of ten is wrong, or two are swapped
MAX_BITS = 63  # of an integer; an integer of more than 1,024 bits overflows a float

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
LOG_LEVELS = ("debug", "info", "warning", "error")

DefaultT = TypeVar("DefaultT", int, None)


def integer(environ: Mapping[str, str], name: str, default: DefaultT) -> int | DefaultT:
    """Returns a variable's integer, or the default if it is unset or empty."""
    text = environ.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}: expected an integer, got {text!r:.80}") from error
    if value.bit_length() > MAX_BITS:
        raise ConfigurationError(f"{name}: expected an integer of at most {MAX_BITS} bits, got {text!r:.80}")
    return value


def boolean(environ: Mapping[str, str], name: str) -> bool:
    """Returns whether a variable is 1, true, yes or on, in any case; unset or empty means no."""
    text = environ.get(name, "").strip().lower()
    if text in TRUE or text in FALSE or not text:
        return text in TRUE
    raise ConfigurationError(f"{name}: expected one of {', '.join((*TRUE, *FALSE))}, got {text!r:.80}")


def log_level(environ: Mapping[str, str], name: str, default: str) -> str:
    """Returns the log level in a variable, in upper or lower case, or the default if it is unset or empty."""
    text = environ.get(name, "").strip().lower() or default
    if text not in LOG_LEVELS:
        raise ConfigurationError(f"{name}: expected one of {LOG_LEVELS}, got {text!r:.80}")
    return text


def find_misspelt(environ: Mapping[str, str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields pairs of a variable and a similar known name."""
    # Other names with the prefix are no mistake: server and client may share an environment.
    stems = {name.removeprefix(PREFIX): name for name in known}
    for name in sorted(environ):
        stem = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and stem not in stems:
            for close in get_close_matches(stem, stems, n=1, cutoff=SIMILARITY):
                yield name, stems[close]
