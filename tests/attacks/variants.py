"""Variants: which of an attack's are played with all tests, and which by `scripts/attack` alone."""

from collections.abc import Mapping

import pytest
import zmq

needs_curve = pytest.mark.skipif(not zmq.has("curve"), reason="no CURVE")

# Where keys make no difference to what holds it.
keys_if_long = pytest.mark.parametrize(
    "with_keys", [False, pytest.param(True, marks=[needs_curve, pytest.mark.attack_long])], indirect=True
)


def long(value: object, name: str | None = None) -> object:
    """A value for which an attack is played by `scripts/attack` alone."""
    return pytest.param(value, id=name, marks=pytest.mark.attack_long)


def first_is_quick(cases: Mapping[str, object]) -> list[object]:
    """Named values, all but the first of which are for `scripts/attack` alone."""
    (name, value), *others = cases.items()
    return [pytest.param(value, id=name), *(long(value, name) for name, value in others)]
