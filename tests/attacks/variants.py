"""Marks for the variants of an attack: some run in every test run, the others only in `scripts/attack`."""

from collections.abc import Mapping

import pytest


def long(value: object, name: str | None = None) -> object:
    """A value with which only `scripts/attack` runs an attack."""
    return pytest.param(value, id=name, marks=pytest.mark.attack_long)


def first_is_quick(cases: Mapping[str, object]) -> list[object]:
    """Named values; all but the first are only for `scripts/attack`."""
    (name, value), *others = cases.items()
    return [pytest.param(value, id=name), *(long(value, name) for name, value in others)]
