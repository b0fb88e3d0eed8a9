"""A member that lies to a restarted server: it says that it was given an answer to the round that it waits for."""

from dataclasses import replace

import numpy as np

from client.conversation.last_settled import LastSettled
from client.conversation.member import Member
from simulation.simulated_frames import SimulatedSession
from statsd_bn import limits
from statsd_bn.members import Members
from statsd_bn.messages import Aggregate, Result
from statsd_bn.round_key import RoundKey
from statsd_bn.rows import Rows
from statsd_bn.wire import decode, encode

LIE = 1e30


def lie(token: bytes, key: RoundKey, members: Members, shape: tuple[int, ...]) -> bytes:
    """The frame of a result that no server has made."""
    return encode(Result(token, Aggregate(key, len(members), len(members), members, np.full(shape, LIE))))


def with_a_lie(frames: list[bytes], forged: bytes) -> list[bytes]:
    """An introduction that announces one result more, and begins with it."""
    register, *results = frames
    results = [forged, *results[-limits.KEPT_ROUNDS + 1 :]]
    return [encode(replace(decode(register), results=len(results))), *results]


class LyingSession(SimulatedSession):
    """A session that tells a restarted server of a result that it was not given."""

    def __init__(self, token: bytes, member: Member, last_settled: LastSettled) -> None:
        super().__init__(token, member, last_settled)
        self._latest: tuple[RoundKey, tuple[int, ...]] | None = None

    def contribution(self, key: RoundKey, rows: Rows, attempt: int = 0) -> bytes:
        self._latest = key, rows.values.shape[1:]
        return super().contribution(key, rows, attempt)

    def introduction(self) -> list[bytes]:
        frames = super().introduction()
        told = {result.key for result in self._results}
        # Before its first result it would pretend to be in a run that others have not begun: another lie than this.
        if not self._latest or not told or self._latest[0] in told:
            return frames
        key, shape = self._latest
        return with_a_lie(frames, lie(self.token, key, Members.of(range(self.member.world_size)), shape))
