"""Every member's tensors, by name, to every member, in one all_gather.

A member that cannot make its tensors says so in the same all_gather. It must not stay away, because the others wait for
it. All members check the same gathered data, so all raise together, and stay in step.
"""

from collections.abc import Callable, Mapping
from itertools import chain, islice
from typing import Any

from torch import Tensor

from client.serialization import pack, unpack
from client.session.protocol.registration import cause_of
from client.transports import process_group
from client.transports.choose import Communicator
from client.transports.named_process_group import NamedProcessGroup
from statsd_bn.checks import shown
from statsd_bn.errors import ProtocolError, RoundFailed, RoundMismatch
from statsd_bn.members import Members
from statsd_bn.text import told

Tensors = dict[str | int, Tensor]

# The name of its rounds. No layer has such a name: the name of a module contains no brackets.
TRANSPORT = "mp_sync()"

# The most keys in an error's text; a member may send any number of them.
MAX_TOLD_KEYS = 8


def share(communicator: Communicator | None, make: Callable[[], Mapping[Any, Tensor]]) -> dict[int, Tensors]:
    """Returns every member's tensors on the CPU, by rank, in order.

    Args:
        communicator: what reaches the other members; None if this process has no others.
        make: returns this member's tensors, by names that are the same on all members, in any order.

    Raises:
        TypeError: a name is neither str nor int, or a tensor cannot travel.
        Exception: what `make` raises, after the other members were told.
        RoundFailed: another member raised.
        RoundMismatch: the names differ.
        StatsdBNError: the exchange failed, with the reason.
    """
    try:
        message = _packed(make())
    except Exception as error:
        _gathered(communicator, _message({}, cause_of(error)))
        raise
    shared, causes = {}, {}
    for member, data in _gathered(communicator, message).items():
        shared[member], causes[member] = _unpacked(member, data)
    _check_nobody_raised({member: cause for member, cause in causes.items() if cause})
    _check_names(shared)
    return shared


def _gathered(communicator: Communicator | None, message: bytes) -> dict[int, bytes]:
    if communicator is None:
        return {0: message}
    if isinstance(communicator, NamedProcessGroup):
        return process_group.all_gather(communicator, TRANSPORT, message)
    return communicator.all_gather(TRANSPORT, message)


def _packed(tensors: Mapping[Any, Tensor]) -> bytes:
    for name in tensors:
        if not isinstance(name, str | int):
            raise TypeError(f"expected keys of type str or int, got {name!r}")
    return _message(tensors, "")


def _message(tensors: Mapping[str | int, Tensor], cause: str) -> bytes:
    """What a member sends: its tensors, or why it has none."""
    return pack([tensors, told(cause)])


def _unpacked(member: int, data: bytes) -> tuple[Tensors, str]:
    try:
        return _read(data)
    except ProtocolError as error:
        raise ProtocolError(f"{TRANSPORT}: the values of rank {member}: {error.message}") from error


def _read(data: bytes) -> tuple[Tensors, str]:
    match unpack(data):
        case [dict(tensors), str(cause)] if _is_named(tensors):
            return tensors, told(cause)
        case other:
            raise ProtocolError(f"expected tensors by name and a text, got {shown(other)}")


def _is_named(tensors: dict[Any, Any]) -> bool:
    return all(
        isinstance(name, str | int) and isinstance(tensor, Tensor) and tensor.ndim for name, tensor in tensors.items()
    )


def _check_nobody_raised(causes: dict[int, str]) -> None:
    if causes:
        member, cause = next(iter(causes.items()))
        raise RoundFailed(
            f"{TRANSPORT}: expected values from all ranks, got none from {Members.of(causes)}; rank {member}: {cause}",
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
        some = islice(partial.items(), MAX_TOLD_KEYS)
        got = "; ".join(f"{shown(name)} only from {members}" for name, members in some)
        more = f" and {len(partial) - MAX_TOLD_KEYS} keys more" if len(partial) > MAX_TOLD_KEYS else ""
        raise RoundMismatch(f"{TRANSPORT}: expected the same keys from ranks {Members.of(shared)}, got {got}{more}")
