"""Transport: the contract of all transports; LocalPipe: the transport of a group with one member."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from client.diagnostics.collectives import rank_in_torch
from client.native.library import DONE, EXCHANGE, NativeRow
from client.session.connection import current_connection
from statsd_bn.members import NO_MEMBERS, Members
from statsd_bn.messages import Aggregate
from statsd_bn.reduction import Rows, is_finite, non_finite_members, sum_in_order
from statsd_bn.round_key import FORWARD, RoundKey

_DIGEST_BYTES = 8
_DIGEST_MASK = (1 << 8 * _DIGEST_BYTES) - 1

# Odd random factors. Digests of two rounds of one layer and phase differ while steps and calls are below 2^30; digests
# of other rounds collide only by chance.
_STEP_FACTOR, _CALL_FACTOR = 0x9FD35B1C64E8A72B, 0xC25A0F9716B3D4E9


class Transport:
    """Exchanges this process's rows for the aggregate over all members.

    All transports return the same bits. Transports compare equal (`==`) if they carry the same layer in the same way.

    Example usage:

        transport = transport_for("stem.bn", group=None)
        forward = transport.run_slave(rows)
        backward = transport.run_slave(gradient_rows, forward.key.of_phase(BACKWARD))
    """

    __slots__ = ()

    def run_slave(self, contribution: Rows, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Exchange a contribution, one row per replica of this process, for the aggregate of its round."""
        # Without a key the round is the layer's next forward round; `phase` is then one of `FORWARD_PHASES`.
        raise NotImplementedError

    def run_row(self, row: NativeRow, /, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate | RoundKey:
        """Like `run_slave` for a row not yet computed; returns the round's key if the native core finished the pass."""
        return self.run_slave(row.measured(), key, phase)

    @property
    def rank(self) -> int:
        """This process's number among the members that an aggregate lists."""
        raise NotImplementedError

    def places(self) -> Mapping[int, str]:
        """Host and process ID of the members, by number, as far as known; may query the server."""
        return {}

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Key of a round of an earlier call."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LocalPipe(Transport):
    """The transport between the replicas of one process."""

    layer: str

    def run_slave(self, contribution: Rows, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate:
        """Add the rows in replica order."""
        counts, values = contribution.counts, contribution.values
        total = sum_in_order(values)
        rank = self.rank
        non_finite = NO_MEMBERS if is_finite(total) else non_finite_members([(rank, values)])
        key = key or _local_key(self.layer, 0, 0, phase)
        return Aggregate.unchecked(key, len(counts), sum(counts), _only(rank), total, non_finite)

    def run_row(self, row: NativeRow, /, key: RoundKey | None = None, phase: str = FORWARD) -> Aggregate | RoundKey:
        """Use the row itself as the sum."""
        if row.run(EXCHANGE) == DONE:
            return key or _local_key(self.layer, 0, 0, phase)
        return self.run_slave(row.contribution, key, phase)

    @property
    def rank(self) -> int:
        """This process's rank in its job, or else in torch's default process group, or else 0."""
        connection = current_connection()
        return connection.rank if connection else rank_in_torch() or 0

    def key(self, step: int, call: int, phase: str) -> RoundKey:
        """Key of a round of an earlier call."""
        return _local_key(self.layer, step, call, phase)


@lru_cache(maxsize=64)
def _only(rank: int) -> Members:
    return Members.of([rank])


@lru_cache(maxsize=1024)
def _local_key(layer: str, step: int, call: int, phase: str) -> RoundKey:
    return RoundKey("in-process", "world", 0, step, layer, call, phase)


def key_digest(key: RoundKey) -> int:
    """Digest of a round's key, 64 bits, unsigned: members compare it to detect that their rounds differ."""
    job, group, epoch, step, layer, call, phase = key
    return (_layer_digest(job, group, epoch, layer, phase) + step * _STEP_FACTOR + call * _CALL_FACTOR) & _DIGEST_MASK


@lru_cache(maxsize=4096)
def _layer_digest(*parts: str | int) -> int:
    # The repr of a tuple of strings and integers is unambiguous, and faster than the wire encoding.
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=_DIGEST_BYTES).digest(), "little")
