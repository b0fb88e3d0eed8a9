"""A setting and its source: errors and the log say not only what a value is, but who gave it."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)
Value = TypeVar("Value")

ARGUMENT = "argument"
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting(Generic[T_co]):
    """One value; as text "world_size 4 (WORLD_SIZE)".

    Attributes:
        name: what the argument of `client.connect` is called.
        value: the value.
        source: "argument", "default", or the environment variable that gave it.
    """

    name: str
    value: T_co
    source: str

    def __str__(self) -> str:
        return f"{self.name} {self.value!r:.80} ({self.source})"


def found(name: str, value: Value | None, source: str) -> Setting[Value] | None:
    """Returns the setting, or None where the source gives no value; so that sources can be joined by `or`."""
    return None if value is None else Setting(name, value, source)
