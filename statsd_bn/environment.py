"""Variables of the environment, read with clear words where they are wrong."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

from statsd_bn.errors import ConfigurationError

PREFIX = "STATSD_BN_"

# How alike a misspelt name is: one letter of ten is wrong, or two are swapped.
ALIKE = 0.85

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")

# Of an integer; beyond, Python converts it to no float.
MAX_BITS = 63

LOG_LEVELS = ("debug", "info", "warning", "error")


def integer(environ: Mapping[str, str], name: str, default: int) -> int:
    """Returns a variable's value, or the default where it is not set or empty.

    Raises:
        ConfigurationError: it is no integer.
    """
    found = optional_integer(environ, name)
    return default if found is None else found


def boolean(environ: Mapping[str, str], name: str) -> bool:
    """Returns whether a variable is set to 1, true, yes or on, in any case; not set or empty means no.

    Raises:
        ConfigurationError: it is neither one of these nor 0, false, no or off.
    """
    text = environ.get(name, "").strip().lower()
    if text in TRUE or text in FALSE or not text:
        return text in TRUE
    raise ConfigurationError(f"{name}: expected one of {', '.join((*TRUE, *FALSE))}, got {text!r:.80}")


def log_level(environ: Mapping[str, str], name: str, default: str) -> str:
    """Returns one of `LOG_LEVELS` that a variable names, in any case, or the default where it is not set or empty.

    Raises:
        ConfigurationError: it names none.
    """
    text = environ.get(name, "").strip().lower() or default
    if text not in LOG_LEVELS:
        raise ConfigurationError(f"{name}: expected one of {LOG_LEVELS}, got {text!r:.80}")
    return text


def optional_integer(environ: Mapping[str, str], name: str) -> int | None:
    """Returns a variable's value, or None where it is not set or empty.

    Raises:
        ConfigurationError: it is no integer, or one of more than 64 bits.
    """
    text = environ.get(name, "")
    try:
        value = int(text) if text else None
    except ValueError as error:
        raise ConfigurationError(f"{name}: expected an integer, got {text!r:.80}") from error
    if value is not None and value.bit_length() > MAX_BITS:
        raise ConfigurationError(f"{name}: expected an integer of at most {MAX_BITS} bits, got {text!r:.80}")
    return value


def misspelt(environ: Mapping[str, str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields variables that are nearly one of the known ones, each with that one.

    Others with our prefix say nothing: server and client may be started with one environment.
    """
    names = set(known)
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in names:
            stems = {each.removeprefix(PREFIX): each for each in names}
            for stem in get_close_matches(name.removeprefix(PREFIX), stems, n=1, cutoff=ALIKE):
                yield name, stems[stem]
