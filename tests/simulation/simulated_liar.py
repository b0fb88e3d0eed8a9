"""A member that lies to a restarted server: it says that it was given an answer to the round that it waits for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np

from client.connection.session import Session
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


@contextmanager
def lying(number: int) -> Iterator[None]:
    """Lets all sessions of a member lie."""
    latest: dict[bytes, tuple[RoundKey, tuple[int, ...]]] = {}
    introduction, contribution = Session.introduction, Session.contribution

    def note(self: Session, key: RoundKey, rows: Rows, attempt: int = 0) -> bytes:
        latest[self.token] = key, rows.values.shape[1:]
        return contribution(self, key, rows, attempt)

    def introduce(self: Session) -> list[bytes]:
        frames = introduction(self)
        key, shape = latest.get(self.token, (None, ()))
        told = {result.key for result in self._results}
        # Before its first result it would pretend to be in a run that others have not begun: another lie than this.
        if self.member.rank != number or not told or key in told:
            return frames
        return with_a_lie(frames, lie(self.token, key, Members.of(range(self.member.world_size)), shape))

    with mock.patch.object(Session, "introduction", introduce), mock.patch.object(Session, "contribution", note):
        yield
