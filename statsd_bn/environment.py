"""Variables of the environment, read with clear words where they are wrong."""

from collections.abc import Mapping

from statsd_bn.errors import ConfigurationError


def integer(environ: Mapping[str, str], name: str, default: int) -> int:
    """Returns a variable's value, or the default where it is not set or empty.

    Raises:
        ConfigurationError: it is no integer.
    """
    found = optional_integer(environ, name)
    return default if found is None else found


def optional_integer(environ: Mapping[str, str], name: str) -> int | None:
    """Returns a variable's value, or None where it is not set or empty.

    Raises:
        ConfigurationError: it is no integer.
    """
    text = environ.get(name, "")
    try:
        return int(text) if text else None
    except ValueError as error:
        raise ConfigurationError(f"{name}: expected an integer, got {text!r}") from error
