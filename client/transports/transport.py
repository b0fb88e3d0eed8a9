"""Transport: the contract of all transports."""

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, Protocol

from client.native.library import NativeRow
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows
from statsd_bn.round_key import FORWARD, RoundKey

_DIGEST_BYTES = 8
_DIGEST_MASK = (1 << 8 * _DIGEST_BYTES) - 1

# Odd random factors. Digests of two rounds of one layer differ while steps and calls are below 2^30; digests of two
# layers collide only by chance.
_STEP_FACTOR, _CALL_FACTOR = 0x9FD35B1C64E8A72B, 0xC25A0F9716B3D4E9


class NativeResult(NamedTuple):
    """Result of a round in which the native core computed the row, exchanged it and finished the pass."""

    key: RoundKey
    seconds: float = 0.0


class Transport(Protocol):
    """Exchanges this process's rows for the aggregate over all members.

    All transports return the same bits. Two transports are equal if they carry the same layer in the same way.

    Example usage:

        transport = transport_for("stem.bn", group=None)
        forward = transport.run_slave(rows)
        backward = transport.run_slave(gradient_rows, forward.key.of_phase(BACKWARD))
    """

    def run_slave(self, contribution: Rows, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Exchange a contribution for the aggregate of its round.

        Args:
            contribution: one row per replica of this process.
            key: of the round; None for the layer's next forward round.
            phase: of that forward round, one of `FORWARD_PHASES`, the same on all members.
        """

    def run_row(self, row: NativeRow, key: RoundKey | None = None, phase: str = FORWARD) -> "Aggregate | NativeResult":
        """Like `run_slave`, for a row that is not computed yet; the native core finishes the pass where it can."""

    @property
    def rank(self) -> int:
        """This process's number among the members that an aggregate lists."""

    def places(self) -> Mapping[int, str]:
        """Host and process ID of the members, by number, as far as known; may query the server."""

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Key of a round of an earlier call."""


def key_digest(key: RoundKey) -> int:
    """Digest of a round's key, 64 bits, unsigned: members compare it to detect that their rounds differ."""
    job, group, epoch, step, layer, call, phase = key
    return (_layer_digest(job, group, epoch, layer, phase) + step * _STEP_FACTOR + call * _CALL_FACTOR) & _DIGEST_MASK


@lru_cache(maxsize=4096)
def _layer_digest(*parts: str | int) -> int:
    # The repr of a tuple of strings and integers is unambiguous, and faster than the wire encoding.
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=_DIGEST_BYTES).digest(), "little")
