"""Sharing: every member's tensors, by name, to every member, in one gather.

A member that cannot give what it was asked for says so in the same gather. It must not stay away: the others wait for
it. Whatever does not fit is found in what all have gathered, so all raise, and all go on in step.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import msgpack
import numpy as np
from torch import Tensor

from client.arrays import decode, encode, unpacked
from client.connection import Connection
from client.registration import cause_of
from statsd_bn import limits
from statsd_bn.errors import ProtocolError, RoundFailed, RoundMismatch
from statsd_bn.members import Members
from statsd_bn.messages import shown

Tensors = dict[str | int, Tensor]

# The name of its rounds; no layer of a model is called so, since a place in a model has no brackets.
LANE = "mp_sync()"


def share(connection: Connection | None, make: Callable[[], Mapping[Any, Tensor]]) -> dict[int, Tensors]:
    """Returns every member's tensors, by member, in order; on the CPU.

    Args:
        connection: to the other members; None where there are none.
        make: returns this member's tensors, by names that are the same on all members, in any order.

    Raises:
        TypeError: a name is neither str nor int, or a tensor cannot travel.
        Exception: what `make` raises, when the other members have been told.
        RoundFailed: another member raised.
        RoundMismatch: the names differ.
        StatsdBNError: the exchange failed, with the reason.
    """
    try:
        message = _packed(make())
    except Exception as error:
        _gathered(connection, _message([], cause_of(error), []))
        raise
    shared, causes = {}, {}
    for member, data in _gathered(connection, message).items():
        shared[member], causes[member] = _unpacked(member, data)
    _check_nobody_raised({member: cause for member, cause in causes.items() if cause})
    _check_names(shared)
    return shared


def _gathered(connection: Connection | None, message: bytes) -> dict[int, bytes]:
    return {0: message} if connection is None else connection.gather(LANE, message)


def _packed(tensors: Mapping[Any, Tensor]) -> bytes:
    for name in tensors:
        if not isinstance(name, str | int):
            raise TypeError(f"expected keys of type str or int, got {name!r}")
    return _message(list(tensors), "", list(tensors.values()))


def _message(names: list[str | int], cause: str, tensors: list[Tensor]) -> bytes:
    """What a member gives: first its names and why it has nothing to give, as bytes; then the tensors."""
    told = cause.encode(errors="replace")[: limits.MAX_TEXT_BYTES].decode(errors="ignore")
    return encode([np.frombuffer(msgpack.packb([names, told]), np.uint8), *tensors])


def _unpacked(member: int, data: bytes) -> tuple[Tensors, str]:
    try:
        return _read(data)
    except ProtocolError as error:
        raise ProtocolError(f"{LANE}: what member {member} gave: {error}") from error


def _read(data: bytes) -> tuple[Tensors, str]:
    arrays = decode(data)
    head = arrays.pop(0) if arrays else None
    if not isinstance(head, np.ndarray) or head.dtype != np.uint8:
        raise ProtocolError(f"expected an array of uint8 first, got {'nothing' if head is None else head.dtype}")
    tensors = [array for array in arrays if isinstance(array, Tensor)]
    if len(tensors) < len(arrays):
        raise ProtocolError(f"expected tensors only, got {len(arrays) - len(tensors)} numpy arrays among them")
    match unpacked("names", head.tobytes()):
        case [list(names), str(cause)] if all(isinstance(name, str | int) for name in names):
            pass
        case other:
            raise ProtocolError(f"expected a list of names and a text, got {shown(other)}")
    if len(set(names)) != len(tensors) or len(names) != len(tensors):
        raise ProtocolError(f"expected a name of its own for each of {len(tensors)} tensors, got {shown(names)}")
    return dict(zip(names, tensors, strict=True)), cause


def _check_nobody_raised(causes: dict[int, str]) -> None:
    if causes:
        member, cause = next(iter(causes.items()))
        raise RoundFailed(
            f"{LANE}: expected values from all members, got none from {Members.of(causes)}; member {member}: {cause}",
            member=member,
            cause=cause,
        )


def _check_names(shared: dict[int, Tensors]) -> None:
    partial = {
        name: Members.of(member for member, tensors in shared.items() if name in tensors)
        for name in chain.from_iterable(shared.values())
        if not all(name in tensors for tensors in shared.values())
    }
    if partial:
        told = "; ".join(f"{shown(name)} only from {members}" for name, members in partial.items())
        raise RoundMismatch(f"{LANE}: expected the same keys from members {Members.of(shared)}, got {told}")
