"""all_gather of named tensors, for measured values.

A member that fails to make its tensors sends the cause in the same all_gather, because the other members wait for it.
All members check the same gathered data, so they raise together, and their rounds stay in step.
"""

from collections.abc import Callable, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.serialization import NUMPY_DTYPES, pack, unpack
from client.session.protocol.registration import cause_of
from client.transports import process_group
from client.transports.choose import Communicator
from client.transports.named_process_group import NamedProcessGroup
from statsd_bn.checks import short_repr
from statsd_bn.errors import ProtocolError, RoundFailed, RoundMismatch
from statsd_bn.members import Members, format_ranks
from statsd_bn.text import wire_text, wrap

Tensors = dict[str | int, Tensor]

# The name of the rounds. No layer has such a name: the name of a module contains no brackets.
ROUND_NAME = "mp_sync()"

# The number of keys in an error's text; a member may send any number of them.
MAX_LISTED_KEYS = 8


def all_gather_tensors(
    communicator: Communicator | None, make: Callable[[], Mapping[Any, Tensor]]
) -> dict[int, Tensors]:
    """Returns all members' tensors on the CPU, by rank, in order; without a communicator only this process's.

    `make` returns this member's tensors; the names are equal. Its exception reaches the others as RoundFailed.
    """
    try:
        tensors = make()
        _check_keys(tensors)
        message = pack([tensors, ""])
    except Exception as error:
        _all_gather(communicator, pack([{}, wire_text(cause_of(error))]))
        raise
    gathered, causes = {}, {}
    for member, data in _all_gather(communicator, message).items():
        gathered[member], causes[member] = _unpack(member, data)
    _check_no_failure({member: cause for member, cause in causes.items() if cause})
    _check_names(gathered)
    return gathered


def _all_gather(communicator: Communicator | None, message: bytes) -> dict[int, bytes]:
    if communicator is None:
        return {0: message}
    if isinstance(communicator, NamedProcessGroup):
        return process_group.all_gather(communicator, ROUND_NAME, message)
    return communicator.all_gather(ROUND_NAME, message)


def _check_keys(tensors: Mapping[Any, Tensor]) -> None:
    for name in tensors:
        if not isinstance(name, str | int):
            raise TypeError(f"expected keys of type str or int, got {name!r}")


def _unpack(member: int, data: bytes) -> tuple[Tensors, str]:
    """Returns a member's tensors, and the cause if it has none."""
    where = f"{ROUND_NAME}: the values of rank {member}"
    try:
        state = unpack(data)
    except ProtocolError as error:
        raise ProtocolError(f"{where}: {error.message}") from error
    match state:
        case [dict(tensors), str(cause)] if _are_named_tensors(tensors):
            return tensors, wire_text(cause)
        case other:
            raise ProtocolError(f"{where}: expected tensors by name and a text, got {short_repr(other)}")


def _are_named_tensors(tensors: dict[Any, Any]) -> bool:
    return all(isinstance(name, str | int) and isinstance(each, Tensor) and each.ndim for name, each in tensors.items())


def _check_no_failure(causes: dict[int, str]) -> None:
    if causes:
        member, cause = next(iter(causes.items()))
        text = f"expected values from all ranks, got none from {Members.of(causes)}; rank {member}: {cause}"
        raise RoundFailed(f"{ROUND_NAME}: {text}", member=member, cause=cause)


def _check_names(gathered: dict[int, Tensors]) -> None:
    partial = {
        name: Members.of(member for member, tensors in gathered.items() if name in tensors)
        for name in chain.from_iterable(gathered.values())
        if not all(name in tensors for tensors in gathered.values())
    }
    if partial:
        some = islice(partial.items(), MAX_LISTED_KEYS)
        got = "; ".join(f"{short_repr(name)} only from {members}" for name, members in some)
        more = f" and {len(partial) - MAX_LISTED_KEYS} keys more" if len(partial) > MAX_LISTED_KEYS else ""
        raise RoundMismatch(f"{ROUND_NAME}: expected the same keys from ranks {Members.of(gathered)}, got {got}{more}")


# Conversion of measured values.

_NUMBERS = (bool, int, float, np.integer, np.floating, np.bool_)


def as_tensor(data: Any, double_precision: bool) -> Tensor:
    """Returns a tensor, an array, a number, or a list or tuple of these as a tensor of at least one dimension.

    Other types than a tensor are converted to float64 (complex128) if `double_precision`.
    """
    tensor = _tensor(data, double_precision and not isinstance(data, Tensor))
    return tensor if tensor.ndim else tensor.reshape(1)


def concatenate(name: str, tensors: dict[int, Tensor]) -> Tensor:
    """Returns the members' tensors, concatenated along dimension 0, in whose length alone they may differ.

    An empty list, or any tensor of shape (0,), is compatible with every dtype and shape.
    """
    parts = {member: tensor for member, tensor in tensors.items() if tensor.shape != (0,)} or tensors
    layouts: dict[str, list[int]] = {}
    for member, tensor in parts.items():
        shape = ", ".join(["*", *map(str, tensor.shape[1:])])
        layouts.setdefault(f"{str(tensor.dtype).removeprefix('torch.')} of shape ({shape})", []).append(member)
    if len(layouts) > 1:
        got = "; ".join(f"{layout} from {format_ranks(Members.of(members))}" for layout, members in layouts.items())
        raise RoundMismatch(f"{name}: expected one dtype, and one shape but for dimension 0, from all ranks, got {got}")
    return torch.cat(list(parts.values()))


def from_tensor(tensor: Tensor, data: Any, return_tensor: bool) -> Any:
    """Returns a tensor on the device of `data`, or if not `return_tensor` an array for an array, else a list."""
    if return_tensor:
        return tensor.to(data.device) if isinstance(data, Tensor) else tensor
    return tensor.numpy() if isinstance(data, np.ndarray) else tensor.tolist()


def _tensor(data: Any, is_double: bool) -> Tensor:
    """Returns a tensor of the same shape, which may have no dimensions."""
    if isinstance(data, Tensor):
        if data.layout is not torch.strided:
            raise TypeError(f"expected a dense tensor, got one with layout {data.layout}")
        return _cast(data.cpu(), is_double)
    if isinstance(data, np.ndarray):
        if data.dtype.name not in NUMPY_DTYPES:
            raise TypeError(f"expected an array of numbers or bool, got dtype {data.dtype}")
        return _cast(torch.tensor(data.astype(data.dtype.newbyteorder("="))), is_double)
    if isinstance(data, list | tuple):
        return _from_list(data, is_double)
    if isinstance(data, _NUMBERS):
        return _from_numbers(data, is_double)
    raise TypeError(f"expected a tensor, an array, a number, or a list of these, got {type(data).__name__}")


def _cast(tensor: Tensor, is_double: bool) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) if is_double else tensor


def _from_numbers(data: Any, is_double: bool) -> Tensor:
    try:
        # Without an intermediate float32, which would lose digits.
        return torch.tensor(data, dtype=torch.float64 if is_double else None)
    except (OverflowError, RuntimeError, ValueError) as error:  # the type depends on the version of torch
        if isinstance(error, OverflowError) or "Overflow" in str(error):
            kind = "float64" if is_double else "int64"
            raise ValueError(f"expected numbers that fit into {kind}, got {short_repr(data)}") from error
        raise


def _from_list(data: list[Any] | tuple[Any, ...], is_double: bool) -> Tensor:
    kinds = _types_within(data)
    for kind in kinds:
        if not issubclass(kind, (Tensor, np.ndarray, *_NUMBERS)):
            text = f"expected a list of numbers, arrays, tensors or such lists, got {kind.__name__} in it"
            raise TypeError(wrap(text))
    # torch converts plain numbers fast, arrays slowly, and tensors with a warning.
    if not any(issubclass(kind, Tensor | np.ndarray) for kind in kinds):
        return _from_numbers(data, is_double)
    elements = [_tensor(element, is_double) for element in data]
    shapes = {tuple(element.shape) for element in elements}
    if len(shapes) > 1:
        raise ValueError(f"expected a list of elements of one shape, got {sorted(shapes)}")
    return torch.stack(elements)


def _types_within(data: list[Any] | tuple[Any, ...]) -> set[type]:
    kinds = {type(element) for element in data}
    nested = (element for element in data if isinstance(element, list | tuple))
    return {kind for kind in kinds if not issubclass(kind, list | tuple)}.union(*map(_types_within, nested))
